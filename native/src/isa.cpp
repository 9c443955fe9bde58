// The choice of instruction set: what CPUID claims is tried out, in a child process that may die of it. Some virtual
// machines advertise sets that trap, others hide details of sets that work.
#include "isa.h"

#if defined(RL_HAS_AVXVNNI)
#include <cpuid.h>
#endif
#if defined(RL_HAS_NEON) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(RL_HAS_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

#include <mutex>

namespace ridgeline {
namespace {

struct Candidate {
  const char* name;
  const Kernels* (*kernels)();
  bool (*claimed)();
  int runs = -1;  // unknown yet, no, yes
};

#if defined(RL_HAS_AVXVNNI)
// Leaf 7, subleaf 1: the 256-bit byte dot product in VEX encoding, on CPUs without AVX-512 too. Not every compiler has a name for it.
bool claims_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(RL_HAS_NEON)
// What the system says about the CPU: a bit of the auxiliary vector on Linux, a name on macOS.
[[maybe_unused]] bool claims_arm([[maybe_unused]] unsigned kind, [[maybe_unused]] unsigned long bit, [[maybe_unused]] const char* name) {
#if defined(__linux__)
  return getauxval(kind) & bit;
#elif defined(__APPLE__)
  int there = 0;
  size_t bytes = sizeof there;
  return sysctlbyname(name, &there, &bytes, nullptr, 0) == 0 && there;
#else
  return false;
#endif
}
constexpr unsigned kHwcap = 16, kHwcap2 = 26;  // AT_HWCAP, AT_HWCAP2
#endif

Candidate candidates[] = {
#if defined(RL_HAS_AMX)
    // No CPUID leaf is asked for AMX itself: some machines hide it. The trial asks the kernel for permission.
    {"amx", amx_kernels, [] { return bool(__builtin_cpu_supports("avx512bf16")); }},
#endif
#if defined(RL_HAS_AVX512)
    {"avx512", avx512_kernels,
     [] { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"); }},
#endif
#if defined(RL_HAS_AVX512VNNI)
    {"avx512vnni", avx512vnni_kernels, [] { return bool(__builtin_cpu_supports("avx512vnni")); }},
#endif
#if defined(RL_HAS_AVXVNNI)
    {"avxvnni", avxvnni_kernels, claims_avx_vnni},
#endif
#if defined(RL_HAS_AVX2)
    {"avx2", avx2_kernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
#if defined(RL_HAS_I8MM)
    {"i8mm", i8mm_kernels, [] { return claims_arm(kHwcap2, 1ul << 13, "hw.optional.arm.FEAT_I8MM"); }},
#endif
#if defined(RL_HAS_DOTPROD)
    {"dotprod", dotprod_kernels, [] { return claims_arm(kHwcap, 1ul << 20, "hw.optional.arm.FEAT_DotProd"); }},
#endif
#if defined(RL_HAS_NEON)
    {"neon", neon_kernels, [] { return true; }, 1},
#endif
    {"portable", portable_kernels, [] { return true; }, 1},
};

// Runs a few instructions of every kind the set has; only calls that are safe after fork. The child reports through a
// pipe: a process that ignores SIGCHLD never learns how its children ended.
bool survives(const Kernels* kernels) {
  int ends[2];
  if (pipe(ends)) return false;
  const pid_t child = fork();
  if (child == 0) {
    kernels->start_thread();
    for (int kind = RL_PEAK_F32; kind <= RL_PEAK_INT8; kind++) kernels->peak_operations(kind, 2);
    const char alive = 1;
    _exit(write(ends[1], &alive, 1) == 1 ? 0 : 1);
  }
  close(ends[1]);
  char alive = 0;
  const bool survived = child > 0 && read(ends[0], &alive, 1) == 1;
  close(ends[0]);
  if (child > 0) waitpid(child, nullptr, 0);
  return survived;
}

bool runs_here(Candidate& candidate) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (candidate.runs < 0) candidate.runs = candidate.claimed() && survives(candidate.kernels());
  return candidate.runs == 1;
}

}  // namespace

const Kernels* find_kernels(const std::string& isa) {
  for (Candidate& candidate : candidates)
    if ((isa.empty() || isa == candidate.name) && runs_here(candidate)) return candidate.kernels();
  return nullptr;
}

std::string available_isas() {
  std::string all;
  for (Candidate& candidate : candidates)
    if (runs_here(candidate)) all += (all.empty() ? "" : ",") + std::string(candidate.name);
  return all;
}

}  // namespace ridgeline
