// Which CPUs a pool's threads are pinned to, read from the system's files.
#pragma once
#include <string>
#include <vector>

namespace ridgeline {

// "0-3,8" as numbers; nothing for a text that is no such list.
std::vector<int> cpu_list(const std::string& text);

// The allowed CPUs in the order in which threads should have them: one per core of the fast kind, then the slow kind
// (Intel's efficiency cores, ARM's little ones), then the second threads of cores. root: "/", or a folder that describes another machine.
std::vector<int> placement(const std::string& root, const std::vector<int>& allowed);

}  // namespace ridgeline
