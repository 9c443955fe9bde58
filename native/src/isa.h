// Which instruction sets run on this machine.
#pragma once
#include <string>

#include "kernels.h"

namespace ridgeline {

// The kernels of this name, or the best ones for an empty name; null where they do not run here.
const Kernels* find_kernels(const std::string& isa);
std::string available_isas();  // best first, comma-separated

}  // namespace ridgeline
