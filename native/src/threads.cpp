#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ridgeline {
namespace {

// At a barrier: the others are at most microseconds behind, unless one has lost its CPU; then it needs ours.
constexpr int kSpinsBeforeYield = 2000;
// Between steps: a scheduler's pause is shorter, an idle server's longer. Yielding lets the HTTP process have the CPU.
constexpr auto kAwakeBetweenSteps = std::chrono::microseconds(300);

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Worker i to the i-th CPU this process may use, where there is one for each. Not on one or two CPUs: there the HTTP
// process shares them, and a pinned thread could not step aside.
void pin(std::thread& thread, int index, int count) {
#if defined(__linux__)
  cpu_set_t allowed, one;
  if (count <= 2 || sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) < count) return;
  int seen = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &allowed) && seen++ == index) {
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
    }
#else
  (void)thread, (void)index, (void)count;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int count, void (*begin)()) : count_(count), begin_(begin) {
  for (int i = 1; i < count_; i++) {
    threads_.emplace_back([this, i] { worker(i); });
    pin(threads_.back(), i, count_);
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    generation_++;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& work) {
  begin_();  // the caller may be another thread than last time
  if (count_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  work(0);
  barrier();
}

void ThreadPool::barrier() {
  if (count_ == 1) return;
  const uint64_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
    if (spins < kSpinsBeforeYield)
      pause();
    else
      sched_yield();
  }
}

bool ThreadPool::woken_before_sleep(uint64_t seen) const {
  const auto until = std::chrono::steady_clock::now() + kAwakeBetweenSteps;
  do {
    for (int spins = 0; spins < 200; spins++) {
      if (generation_.load(std::memory_order_acquire) != seen) return true;
      pause();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

void ThreadPool::worker(int index) {
  begin_();
  uint64_t seen = 0;
  while (true) {
    if (!woken_before_sleep(seen)) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_) return;
    (*work_)(index);
    barrier();
  }
}

}  // namespace ridgeline
