// Which CPUs a pool's threads are pinned to, read from the system's files.
#pragma once
#include <string>
#include <vector>

namespace ridgeline {

// "0-3,8" as numbers; nothing for a text that is no such list.
std::vector<int> cpu_list(const std::string& text);

// The allowed CPUs in the order in which threads should have them: one per core of the fast kind, then the slow kind
// (Intel's efficiency cores, ARM's little ones), then the second threads of cores.
struct Placement {
  std::vector<int> order;
  size_t fast;  // how many of them are one per core of the fastest kind there is
};
// root: "/", or a folder that describes another machine.
Placement placement(const std::string& root, const std::vector<int>& allowed);

// The CPUs that thread number `thread` of `count` is bound to; none: it may run anywhere.
// A CPU of its own only where the pool has all fast cores: two smaller pools would both take the first ones and leave
// the others idle, so theirs may run on any fast core. Nothing is bound on one or two CPUs: there the HTTP process shares
// them, and a bound thread could not step aside.
std::vector<int> cpus_of_thread(const Placement& place, int thread, int count);

}  // namespace ridgeline
