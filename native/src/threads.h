// A pool whose threads meet often: a step has hundreds of short phases, so they spin at barriers and sleep only
// between steps.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ridgeline {

class ThreadPool {
 public:
  // `begin` runs once on every thread, the caller's included, before any work.
  ThreadPool(int count, void (*begin)());
  ~ThreadPool();

  int size() const { return count_; }
  // Runs work(thread index) on every thread, the caller being thread 0, and returns when all are done.
  void run(const std::function<void(int)>& work);
  // Inside run(): waits until every thread has come here.
  void barrier();

 private:
  void worker(int index);
  bool woken_before_sleep(uint64_t seen) const;

  const int count_;
  void (*const begin_)();
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  // Each on a cache line of its own: one is spun on while the others are written.
  alignas(64) std::atomic<uint64_t> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint64_t> phase_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace ridgeline
