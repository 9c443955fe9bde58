#include "topology.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace ridgeline {
namespace {

constexpr double kEqualCapacity = 0.75;  // of the fastest core's

// The first line. No streams in this file: they need a newer glibc than the wheel may.
std::string text_of(const std::string& path) {
  std::string line;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    for (int c; (c = std::fgetc(file)) != EOF && c != '\n';) line.push_back(char(c));
    std::fclose(file);
  }
  return line;
}

// Intel names its efficiency cores; on ARM the kernel states the capacity of each CPU. As slow_cpus() of machine.py.
std::set<int> slow_ones(const std::string& system, const std::vector<int>& allowed) {
  const std::vector<int> atoms = cpu_list(text_of(system + "cpu_atom/cpus"));
  std::set<int> slow(atoms.begin(), atoms.end());
  std::vector<int> capacities;
  for (int cpu : allowed)
    capacities.push_back(std::atoi(text_of(system + "system/cpu/cpu" + std::to_string(cpu) + "/cpu_capacity").c_str()));
  const int most = capacities.empty() ? 0 : *std::max_element(capacities.begin(), capacities.end());
  for (size_t i = 0; i < allowed.size(); i++)
    if (capacities[i] && capacities[i] < kEqualCapacity * most) slow.insert(allowed[i]);
  return slow;
}

}  // namespace

std::vector<int> cpu_list(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.c_str();
  while (*at && *at != '\n') {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    if (end == at) return {};
    long last = first;
    if (*end == '-') {
      at = end + 1;
      last = std::strtol(at, &end, 10);
      if (end == at) return {};
    }
    if ((*end && *end != ',' && *end != '\n') || first < 0 || last < first || last > 1 << 16) return {};
    for (long cpu = first; cpu <= last; cpu++) cpus.push_back(int(cpu));
    at = *end == ',' ? end + 1 : end;
  }
  return cpus;
}

Placement placement(const std::string& root, const std::vector<int>& allowed) {
  const std::string system = root + "/sys/devices/";
  const std::set<int> slow = slow_ones(system, allowed);
  std::set<int> taken;  // CPUs of cores that have a thread already
  std::vector<int> ranked[3];
  for (int cpu : allowed) {
    const int rank = taken.count(cpu) ? 2 : slow.count(cpu) ? 1 : 0;
    ranked[rank].push_back(cpu);
    for (int sibling : cpu_list(text_of(system + "system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list")))
      taken.insert(sibling);
  }
  std::vector<int> order = ranked[0];
  order.insert(order.end(), ranked[1].begin(), ranked[1].end());
  order.insert(order.end(), ranked[2].begin(), ranked[2].end());
  return {order, ranked[0].empty() ? ranked[1].size() : ranked[0].size()};
}

std::vector<int> cpus_of_thread(const Placement& place, int thread, int count) {
  if (count <= 2 || place.order.size() < size_t(count)) return {};
  if (size_t(count) >= place.fast) return {place.order[size_t(thread)]};
  return {place.order.begin(), place.order.begin() + std::ptrdiff_t(place.fast)};
}

}  // namespace ridgeline
