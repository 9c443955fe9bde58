// The linear kernels of the instruction set under test; the cases are in linear_cases.h.
#include "isa.h"
#include "linear_cases.h"

int main() {
  const std::string isa = isa_under_test();
  linear_cases::check_linear(*ridgeline::find_kernels(isa), isa == "amx");
  return report();
}
