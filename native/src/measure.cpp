// The ceilings of this machine: what no kernel can beat, measured the way kernels read and multiply.
#include <chrono>
#include <cstring>
#include <string>

#include "../include/ridgeline_native.h"
#include "errors.h"
#include "isa.h"
#include "memory.h"
#include "threads.h"

namespace ridgeline {
namespace {

constexpr int kRepeats = 5;

double seconds_of(const std::function<void()>& work) {
  const auto started = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// Best of a few: interference only ever makes a ceiling look lower.
double best_seconds(const std::function<void()>& work) {
  double best = seconds_of(work);
  for (int i = 1; i < kRepeats; i++) best = std::min(best, seconds_of(work));
  return best;
}

uint64_t sum_of(const uint64_t* from, size_t count) {
  uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
  for (size_t i = 0; i + 8 <= count; i += 8) {
    a += from[i], b += from[i + 1], c += from[i + 2], d += from[i + 3];
    e += from[i + 4], f += from[i + 5], g += from[i + 6], h += from[i + 7];
  }
  return a ^ b ^ c ^ d ^ e ^ f ^ g ^ h;
}

// What work() measures, or -1 with a reason where the system has no memory or threads for it.
template <typename Work>
double measured(const Work& work) {
  try {
    return work();
  } catch (const std::exception& error) {
    fail(std::string("no memory or no threads for it: ") + error.what());
    return -1.0;
  }
}

double read_rate(const void* memory, size_t bytes, int threads) {
  const Kernels* kernels = find_kernels("");
  Memory buffer{memory ? 0 : bytes};
  if (!memory) std::memset(buffer.data(), 1, bytes);
  const auto* from = static_cast<const uint64_t*>(memory ? memory : buffer.data());
  ThreadPool pool(threads, kernels->start_thread);
  std::atomic<uint64_t> sink{0};
  const size_t words = bytes / 8 / size_t(threads);
  const double seconds = best_seconds([&] {
    pool.run([&](int thread) { sink += sum_of(from + size_t(thread) * words, words); });
  });
  return double(words) * 8 * threads / seconds;
}

double peak_rate(const Kernels& kernels, int kind, int threads) {
  ThreadPool pool(threads, kernels.start_thread);
  std::vector<double> operations(static_cast<size_t>(threads));
  const int64_t rounds = 200000;
  const double seconds = best_seconds([&] {
    pool.run([&](int thread) { operations[size_t(thread)] = kernels.peak_operations(kind, rounds); });
  });
  double total = 0;
  for (double count : operations) total += count;
  return total / seconds;
}

}  // namespace
}  // namespace ridgeline

using namespace ridgeline;

extern "C" double rl_measure_read(const void* memory, int64_t bytes, int32_t threads) {
  if (bytes < 4096 || threads < 1) return 0.0;
  return measured([&] { return read_rate(memory, size_t(bytes), threads); });
}

extern "C" double rl_measure_peak(const char* isa, int32_t kind, int32_t threads) {
  const Kernels* kernels = find_kernels(isa ? isa : "");
  if (!kernels || threads < 1 || kind < RL_PEAK_F32 || kind > RL_PEAK_INT8) return 0.0;
  return measured([&] { return peak_rate(*kernels, kind, threads); });
}
