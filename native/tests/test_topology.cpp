// The order of CPUs for threads, on machines described by files: one thread per core first, slow cores and second threads later.
#include "topology.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "check.h"

namespace {

using ridgeline::cpu_list;
using ridgeline::placement;

std::string text(const std::vector<int>& cpus) {
  std::string all;
  for (int cpu : cpus) all += (all.empty() ? "" : ",") + std::to_string(cpu);
  return all;
}

std::vector<int> up_to(int count) {
  std::vector<int> cpus;
  for (int cpu = 0; cpu < count; cpu++) cpus.push_back(cpu);
  return cpus;
}

std::vector<int> order(const std::string& root, const std::vector<int>& allowed) { return placement(root, allowed).order; }

class Machine {
 public:
  Machine() {
    char name[] = "/tmp/topology-XXXXXX";
    root = mkdtemp(name);
  }
  ~Machine() {
    for (size_t i = made_.size(); i-- > 0;)
      if (unlink(made_[i].c_str())) rmdir(made_[i].c_str());
    rmdir(root.c_str());
  }
  void write(const std::string& path, const std::string& words) {
    for (size_t at = 1; (at = path.find('/', at)) != std::string::npos; at++)
      if (!mkdir((root + path.substr(0, at)).c_str(), 0700)) made_.push_back(root + path.substr(0, at));
    std::ofstream(root + path) << words << "\n";
    made_.push_back(root + path);
  }
  void siblings(int cpu, const std::string& words) {
    write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list", words);
  }
  std::string root;

 private:
  std::vector<std::string> made_;
};

// The CPUs of threads 1 and up of a pool.
std::string bound(const Machine& machine, const std::vector<int>& allowed, int count) {
  const ridgeline::Placement place = placement(machine.root, allowed);
  std::string all;
  for (int thread = 1; thread < count; thread++) all += text(cpus_of_thread(place, thread, count)) + ";";
  return all;
}

void lists_are_read_and_other_texts_are_not() {
  CHECK_EQUAL(text(cpu_list("0-3,8")) == "0,1,2,3,8", true);
  CHECK_EQUAL(text(cpu_list("5")) == "5", true);
  for (const char* wrong : {"", "a", "3-1", "-2", "1-x", "0-9999999"}) {
    about("'%s'", wrong);
    CHECK(cpu_list(wrong).empty());
  }
}

void cores_come_before_their_second_threads() {
  Machine machine;
  for (int cpu = 0; cpu < 4; cpu++) machine.siblings(cpu, cpu < 2 ? "0-1" : "2-3");
  CHECK(text(order(machine.root, up_to(4))) == "0,2,1,3");
  CHECK(text(order(machine.root, {1, 2, 3})) == "1,2,3");  // 0 belongs to others: 1 is its core's first
}

void slow_cores_come_after_fast_ones() {
  Machine machine;
  for (int cpu = 0; cpu < 4; cpu++) machine.siblings(cpu, cpu < 2 ? "0-1" : "2-3");
  for (int cpu = 4; cpu < 6; cpu++) machine.siblings(cpu, std::to_string(cpu));
  machine.write("/sys/devices/cpu_atom/cpus", "4-5");
  CHECK(text(order(machine.root, up_to(6))) == "0,2,4,5,1,3");
}

void little_cores_come_after_big_ones() {
  Machine machine;
  const int capacities[] = {290, 290, 870, 1024};
  for (int cpu = 0; cpu < 4; cpu++)
    machine.write("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cpu_capacity", std::to_string(capacities[cpu]));
  CHECK(text(order(machine.root, up_to(4))) == "2,3,0,1");
}

void a_machine_that_says_nothing_keeps_its_order() { CHECK(text(order("/nonexistent", up_to(3))) == "0,1,2"); }

void a_pool_with_all_fast_cores_has_a_cpu_for_each_thread() {
  Machine machine;
  for (int cpu = 0; cpu < 8; cpu++) machine.siblings(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  CHECK(bound(machine, up_to(8), 4) == "1;2;3;");
  CHECK(bound(machine, up_to(8), 6) == "1;2;3;4;5;");
  CHECK(bound(machine, {4, 5, 6, 7}, 4) == "5;6;7;");  // half a machine, given to a replica by its affinity mask
}

// Two replicas with half the cores each must not both take the first half.
void smaller_pools_share_all_fast_cores() {
  Machine machine;
  for (int cpu = 0; cpu < 4; cpu++) machine.siblings(cpu, cpu < 2 ? "0-1" : "2-3");
  for (int cpu = 4; cpu < 8; cpu++) machine.siblings(cpu, std::to_string(cpu));
  machine.write("/sys/devices/cpu_atom/cpus", "6-7");
  CHECK(bound(machine, up_to(8), 3) == "0,2,4,5;0,2,4,5;");
  CHECK(bound(machine, {6, 7}, 3) == ";;");                   // more threads than CPUs
  CHECK(bound(machine, {4, 5, 6, 7}, 3) == "5;6;");           // more than fast cores
}

void pools_of_one_or_two_threads_run_anywhere() {
  Machine machine;
  CHECK(bound(machine, up_to(2), 2) == ";");
  CHECK(bound(machine, up_to(16), 2) == ";");
}

}  // namespace

int main() {
  isa_under_test();
  lists_are_read_and_other_texts_are_not();
  cores_come_before_their_second_threads();
  slow_cores_come_after_fast_ones();
  little_cores_come_after_big_ones();
  a_machine_that_says_nothing_keeps_its_order();
  a_pool_with_all_fast_cores_has_a_cpu_for_each_thread();
  smaller_pools_share_all_fast_cores();
  pools_of_one_or_two_threads_run_anywhere();
  return report();
}
