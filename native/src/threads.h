// A pool for work in hundreds of short phases. A phase ends when its pieces are done, not when all threads have arrived:
// a thread that lost its CPU to another process delays the others only by the piece it holds.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ridgeline {

// One phase: pieces 0 … count - 1, taken in order by the threads that arrive. Every thread passes every phase; a late one may
// get no piece.
class alignas(64) Phase {
 public:
  // Runs begin() before this thread's first piece, work(piece) for each that it gets; returns when all pieces are done.
  template <typename Begin, typename Work>
  void share(int count, const Begin& begin, const Work& work) {
    int piece = next_.fetch_add(1, std::memory_order_relaxed);
    if (piece < count) begin();
    for (; piece < count; piece = next_.fetch_add(1, std::memory_order_relaxed)) {
      work(piece);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
    wait_until([&] { return done_.load(std::memory_order_acquire) >= count; });
  }

  // Spins for the microseconds a phase lasts, then sleeps briefly: the thread it waits for may need this CPU.
  template <typename Condition>
  static void wait_until(const Condition& met) {
    for (int spins = 0; spins < kSpins; spins++) {
      if (met()) return;
      pause();
    }
    while (!met()) nap();
  }

  static void pause();
  static void nap();

 private:
  static constexpr int kSpins = 2000;

  std::atomic<int> next_{0}, done_{0};
};

class ThreadPool {
 public:
  // `begin` runs once on every thread, the caller's included, before any work.
  ThreadPool(int count, void (*begin)());
  ~ThreadPool();

  int size() const { return count_; }
  // Runs work(thread index) on every thread, the caller being thread 0, and returns when all are done.
  void run(const std::function<void(int)>& work);

 private:
  void worker(int index);
  void stop();
  bool woken_before_sleep(uint64_t seen) const;

  const int count_;
  void (*const begin_)();
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  // On separate cache lines: one is spun on while the other is written.
  alignas(64) std::atomic<uint64_t> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace ridgeline
