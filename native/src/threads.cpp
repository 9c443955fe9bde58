#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <chrono>

#include "topology.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ridgeline {
namespace {

// Between steps: a scheduler's pause is shorter, an idle server's longer. Yielding lets the HTTP process have the CPU.
constexpr auto kAwakeBetweenSteps = std::chrono::microseconds(300);
constexpr long kNapNanoseconds = 20000;

}  // namespace

void Phase::pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Asleep, not yielding: an idle CPU takes over a thread that waits for another one, a yielding CPU does not.
void Phase::nap() {
  const timespec length{0, kNapNanoseconds};
  nanosleep(&length, nullptr);
}

namespace {

Placement own_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return {};
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
#endif
  return placement("", cpus);
}

void pin(std::thread& thread, const std::vector<int>& cpus) {
#if defined(__linux__)
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#else
  (void)thread, (void)cpus;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int count, void (*begin)()) : count_(count), begin_(begin) {
  const Placement place = own_cpus();
  try {
    // The caller, thread 0, is left as it is: what it starts later would inherit its CPU. The system moves it to the first CPU,
    // which no other thread is bound to.
    for (int i = 1; i < count_; i++) {
      threads_.emplace_back([this, i] { worker(i); });
      pin(threads_.back(), cpus_of_thread(place, i, count_));
    }
  } catch (...) {  // the system has no more threads: those that run must end before the pool does
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
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
      running_.store(count_ - 1, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  work(0);
  Phase::wait_until([this] { return running_.load(std::memory_order_acquire) == 0; });
}

bool ThreadPool::woken_before_sleep(uint64_t seen) const {
  const auto until = std::chrono::steady_clock::now() + kAwakeBetweenSteps;
  do {
    for (int spins = 0; spins < 200; spins++) {
      if (generation_.load(std::memory_order_acquire) != seen) return true;
      Phase::pause();
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
    running_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace ridgeline
