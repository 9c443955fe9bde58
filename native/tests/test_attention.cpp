// The attention kernels of the instruction set under test; the cases are in attention_cases.h.
#include "attention_cases.h"
#include "isa.h"

int main() {
  attention_cases::check_attention(*ridgeline::find_kernels(isa_under_test()));
  return report();
}
