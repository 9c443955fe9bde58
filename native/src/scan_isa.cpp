// The kernels of vector search for one instruction set. Compiled once per set, with its flags and RL_ISA naming it.
#include "kernels/scan.h"

#define RL_JOIN(a, b) a##b
#define RL_TABLE(isa) RL_JOIN(isa, _scan_kernels)

namespace ridgeline {

const ScanKernels* RL_TABLE(RL_ISA)() {
  static const ScanKernels table = {scan_products, scan_select};
  return &table;
}

}  // namespace ridgeline
