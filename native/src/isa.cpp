// The choice of instruction set: what CPUID claims is tried out, in a child process that may die of it. Some virtual
// machines advertise sets that trap, others hide details of sets that work.
#include "isa.h"

#if defined(RL_HAS_AVXVNNI)
#include <cpuid.h>
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
