// The thread pool and its phases: many short runs, on more threads than there are CPUs, with pauses long enough to sleep
// in and threads that arrive late. They must not lose a wake-up, do a piece twice or never, let a thread into a phase
// whose inputs are not done, or race (TSan checks the last).
#include "threads.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <system_error>

#include "check.h"

namespace {

using ridgeline::Phase;
using ridgeline::ThreadPool;

std::atomic<int> begun{0};
void count_begin() { begun++; }
void do_nothing() {}
void wait(int microseconds) {
  if (microseconds) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

void every_thread_runs_all_work_once() {
  for (int threads = 1; threads <= 8; threads++) {
    about("%d threads", threads);
    begun = 0;
    {
      ThreadPool pool(threads, count_begin);
      CHECK_EQUAL(pool.size(), threads);
      std::vector<int> times(static_cast<size_t>(threads));
      for (int run = 0; run < 100; run++) pool.run([&](int thread) { times[size_t(thread)]++; });
      for (int count : times) CHECK_EQUAL(count, 100);
    }
    CHECK_EQUAL(begun, 100 + threads - 1);  // once on each worker; before every run on the caller's thread
  }
}

// A run of many phases. Data written in a phase's pieces is read in the next phase's without further synchronization, by any
// thread; every piece is done once, and begin() comes before a thread's first piece of a phase and not without one.
// `late` and `hold` say for how many microseconds a thread comes late to a phase, or sits on a piece.
void phases_follow_each_other(int threads, int phases, const int (&counts)[4], int (*late)(int thread, int phase),
                              int (*hold)(int phase, int piece)) {
  ThreadPool pool(threads, do_nothing);
  for (int run = 0; run < 5; run++) {
    std::vector<Phase> all(static_cast<size_t>(phases));
    std::vector<std::vector<int>> done(static_cast<size_t>(phases));
    for (int phase = 0; phase < phases; phase++) done[size_t(phase)].resize(size_t(counts[phase % 4]));
    std::atomic<int> unready{0}, wrong_begins{0};
    pool.run([&](int thread) {
      for (int phase = 0; phase < phases; phase++) {
        bool started = false;
        int pieces = 0;
        wait(late(thread, phase));
        all[size_t(phase)].share(
            counts[phase % 4], [&] { wrong_begins += started, started = true; },
            [&](int piece) {
              wrong_begins += !started, pieces++;
              if (phase)
                for (int before : done[size_t(phase - 1)]) unready += before != 1;
              wait(hold(phase, piece));
              done[size_t(phase)][size_t(piece)]++;
            });
        wrong_begins += started && !pieces;
      }
    });
    about("%d threads, %d phases, run %d", threads, phases, run);
    CHECK_EQUAL(unready, 0);
    CHECK_EQUAL(wrong_begins, 0);
    for (const std::vector<int>& pieces : done)
      for (int times : pieces) CHECK_EQUAL(times, 1);
  }
}

int never(int, int) { return 0; }

void phases_are_shared_by_any_number_of_threads() {
  for (int threads = 1; threads <= 8; threads++) {
    phases_follow_each_other(threads, 60, {1, 7, 2, 40}, never, never);
    phases_follow_each_other(threads, 12, {3, 0, 1, 9}, never, never);  // a phase may be empty
  }
}

void nobody_goes_on_before_the_last_piece_is_done() {
  for (int threads : {2, 3, 8})
    phases_follow_each_other(threads, 12, {4, 1, 9, 2}, never, [](int phase, int piece) { return piece == phase % 2 ? 200 : 0; });
}

void late_threads_pass_empty_handed() {
  // One thread comes when the others are phases ahead; then now this one, now that.
  phases_follow_each_other(3, 30, {4, 1, 9, 2}, [](int thread, int phase) { return thread == 2 && phase % 10 == 0 ? 300 : 0; }, never);
  phases_follow_each_other(4, 20, {8, 3, 5, 1}, [](int thread, int phase) { return (thread * 7 + phase * 3) % 5 ? 0 : 150; }, never);
}

// Between runs threads first spin, then sleep: pauses around the moment they fall asleep.
void sleeping_threads_wake() {
  for (int threads : {2, 4}) {
    ThreadPool pool(threads, do_nothing);
    std::atomic<int> runs{0};
    for (int i = 0; i < 60; i++) {
      pool.run([&](int) { runs++; });
      wait(i * 20);
    }
    about("%d threads", threads);
    CHECK_EQUAL(runs, 60 * threads);
  }
}

void pools_end_awake_asleep_and_unused() {
  for (int threads = 1; threads <= 8; threads++)
    for (int pause : {0, 1000}) {
      ThreadPool unused(threads, do_nothing);
      ThreadPool pool(threads, do_nothing);
      pool.run([](int) {});
      wait(pause);
    }
}

// A server's step may come from another thread each time, and two models have a pool each.
void pools_serve_any_thread_and_each_other() {
  ThreadPool first(3, do_nothing), second(2, do_nothing);
  std::atomic<int> runs{0};
  for (int i = 0; i < 20; i++) std::thread([&] { first.run([&](int) { runs++; }); }).join();
  std::thread other([&] {
    for (int i = 0; i < 50; i++) second.run([&](int) { runs++; });
  });
  for (int i = 0; i < 50; i++) first.run([&](int) { runs++; });
  other.join();
  about("two pools at a time");
  CHECK_EQUAL(runs, 20 * 3 + 50 * 2 + 50 * 3);
}

// In a separate process, which has address space for a few threads and not for all; sanitizers need more than that, and QEMU
// limits none.
void a_pool_that_gets_too_few_threads_ends_those_it_got() {
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(RL_EMULATED)
  const pid_t child = fork();
  if (child == 0) {
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t bytes = pages * rlim_t(sysconf(_SC_PAGESIZE)) + (60 << 20);
    const rlimit address_space{bytes, bytes}, stack{8 << 20, 8 << 20};
    setrlimit(RLIMIT_STACK, &stack), setrlimit(RLIMIT_AS, &address_space);
    try {
      ThreadPool pool(1000, do_nothing);
    } catch (const std::system_error&) {
      _exit(42);
    }
    _exit(0);
  }
  int status = 0;
  about("1000 threads in 60 MiB");
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 42);
#endif
}

}  // namespace

int main() {
  isa_under_test();
  a_pool_that_gets_too_few_threads_ends_those_it_got();
  every_thread_runs_all_work_once();
  phases_are_shared_by_any_number_of_threads();
  nobody_goes_on_before_the_last_piece_is_done();
  late_threads_pass_empty_handed();
  sleeping_threads_wake();
  pools_end_awake_asleep_and_unused();
  pools_serve_any_thread_and_each_other();
  return report();
}
