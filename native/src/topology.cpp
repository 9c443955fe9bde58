#include "topology.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace ridgeline {
namespace {

// The first line. No streams in this file: they need a newer glibc than the wheel may.
std::string text_of(const std::string& path) {
  std::string line;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    for (int c; (c = std::fgetc(file)) != EOF && c != '\n';) line.push_back(char(c));
    std::fclose(file);
  }
  return line;
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

std::vector<int> placement(const std::string& root, const std::vector<int>& allowed) {
  const std::string system = root + "/sys/devices/";
  const std::vector<int> slow = cpu_list(text_of(system + "cpu_atom/cpus"));
  const std::set<int> slow_ones(slow.begin(), slow.end());
  std::set<int> taken;  // CPUs of cores that have a thread already
  std::vector<int> ranked[3];
  for (int cpu : allowed) {
    const int rank = taken.count(cpu) ? 2 : slow_ones.count(cpu) ? 1 : 0;
    ranked[rank].push_back(cpu);
    for (int sibling : cpu_list(text_of(system + "system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list")))
      taken.insert(sibling);
  }
  std::vector<int> order = ranked[0];
  order.insert(order.end(), ranked[1].begin(), ranked[1].end());
  order.insert(order.end(), ranked[2].begin(), ranked[2].end());
  return order;
}

}  // namespace ridgeline
