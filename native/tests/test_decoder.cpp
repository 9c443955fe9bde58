// The library's logits against the decoder written in double precision, and each instruction set's against portable's.
//
// Differences are parts of the logits' size; what sets the tolerance is the coarsest number on the way: float sums, inputs
// of 15 bits, 8 bits or bf16, KV of bf16 or 8 bits. Seeds draw every option of a family.
#include "reference_decoder.h"
#include "tiny_model.h"

namespace {

// The root mean square of the differences, as a part of that of the logits; NaN if anything is.
template <class Row>
double difference(const Logits& a, const std::vector<Row>& b) {
  double apart = 0, size = 0;
  if (!CHECK(a.size() == b.size())) return NAN;
  for (size_t i = 0; i < a.size(); i++)
    for (size_t j = 0; j < a[i].size(); j++) {
      apart += (double(a[i][j]) - double(b[i][j])) * (double(a[i][j]) - double(b[i][j]));
      size += double(b[i][j]) * double(b[i][j]);
    }
  return std::sqrt(apart / size);
}

// What a run may differ by: from the reference, which rounds nothing, three times what was seen; from another instruction
// set, which rounds the same things but now and then to the other side, because its sums were added in another order.
struct Tolerance {
  double reference = 5e-6, portable = 5e-6;

  Tolerance(int format, int kv_format, bool eight_bits) {
    if (kv_format == RL_KV_BF16) reference += 1e-2, portable += 5e-3;
    if (kv_format == RL_KV_INT8) reference += 2e-2, portable += 1e-3;
    if (kv_format == RL_KV_INT4) reference += 3e-1, portable += 1e-2;
    if (format == RL_BF16) reference += 1.5e-2, portable += 5e-3;
    else if (format != RL_F32 && eight_bits && format != RL_Q8_C) reference += 6e-2, portable += 2e-2;
    else if (format != RL_F32) reference += 1e-3, portable += 1e-3;  // inputs of 15 bits
  }
};

void check(const std::string& isa, int format, int kv_format, bool deterministic, uint64_t seed) {
  const bool coarse = format != RL_F32 || kv_format != RL_KV_F32;
  TinyModel tiny(seed, format, kv_format, deterministic, coarse);
  Random random(seed);
  const std::vector<Sequence> sequences = random_sequences(tiny, random, {40});
  ReferenceDecoder reference(tiny.decoder);
  const std::vector<std::vector<double>> expected = reference.logits(sequences[0].tokens);
  for (int chunk : {40, 9, 1}) {
    Tolerance tolerance(format, kv_format, !deterministic && chunk > 1);
    // These take other inputs than portable does: bf16 instead of 8 bits, and instead of floats for FP8 weights.
    if ((isa == "amx" || (isa == "avx512" && format == RL_F8)) && !deterministic) tolerance.portable = 2 * tolerance.reference;
    const Logits logits = Session(tiny.decoder, isa, 2).run(sequences[0], chunk);
    about("%s, steps of %d, against the reference", tiny.name().c_str(), chunk);
    CHECK_NEAR(difference(logits, expected), 0.0, tolerance.reference);
    about("%s, steps of %d, %s against portable", tiny.name().c_str(), chunk, isa.c_str());
    CHECK_NEAR(difference(logits, Session(tiny.decoder, "portable", 1).run(sequences[0], chunk)), 0.0, tolerance.portable);
  }
}

}  // namespace

int main() {
  const std::string isa = isa_under_test();
  uint64_t seed = 100;
  for (int format : kFormats)
    for (int kv_format : {RL_KV_F32, RL_KV_BF16, RL_KV_INT8, RL_KV_INT4})
      for (bool deterministic : {true, false})
        if (seed++; !kUnderThreadSanitizer || seed % 5 == 0) check(isa, format, kv_format, deterministic, seed);
  for (int i = 0; i < (kUnderThreadSanitizer ? 2 : 40); i++) check(isa, RL_F32, RL_KV_F32, i % 2, ++seed);  // the strictest
  return report();
}
