// Linear kernels against sums in double precision: every weight format with every form of inputs it is multiplied with.
//
// The reference multiplies what the kernel multiplies: unpacked weights and inputs rounded as the kernel rounds them.
// Tolerances are those of float sums, in the worst case: a term that goes through m roundings is off by m · 2^-24 of
// its size.
#pragma once
#include <vector>

#include "kernels.h"
#include "packed.h"
#include "quantized.h"

namespace linear_cases {

using ridgeline::InputKind;
using ridgeline::Inputs;
using ridgeline::Kernels;
using ridgeline::kGroup;
using ridgeline::kPanel;
using ridgeline::padded_k;

inline const char* kind_name(InputKind kind) {
  const char* const names[] = {"Float", "Bf16", "Int8", "Int8Expanded", "Int8Coded", "Int8Words", "Int16", "Int16PerRow", "Bf16Rows", "Int16Rows"};
  return names[int(kind)];
}
inline bool row_after_row(InputKind kind) { return kind == InputKind::Bf16Rows || kind == InputKind::Int16Rows; }

inline bool expands_to_bytes(const Kernels& kernels) {
  const std::string name = kernels.name;
  return name.rfind("avx512", 0) == 0 || name == "avxvnni";
}
inline bool multiplies_bf16(const Kernels& kernels) { return std::string(kernels.name) == "avx512" || std::string(kernels.name) == "amx"; }
inline bool codes_scales(const Kernels& kernels) { return std::string(kernels.name) == "avx2"; }
inline bool has_words(const Kernels& kernels, int format) {
  return std::string(kernels.name) == "avx2" && (format == RL_Q8_H || format == RL_Q8_FM);
}
inline bool is_expanded(InputKind kind) { return kind == InputKind::Int8Expanded || kind == InputKind::Int8Coded; }

// The forms of inputs a format is multiplied with; the last ones on some sets only.
inline std::vector<InputKind> kinds_of(const Kernels& kernels, int format, bool amx) {
  std::vector<InputKind> kinds;
  if (format == RL_F32) return {InputKind::Float};
  if (format == RL_BF16) kinds = {InputKind::Bf16};
  else if (format == RL_Q8_C) kinds = {InputKind::Int16PerRow};
  else if (format == RL_F8) kinds = {InputKind::Float};
  else kinds = {has_words(kernels, format) ? InputKind::Int8Words : InputKind::Int8, InputKind::Int16};
  if (format == RL_F8 && (amx || multiplies_bf16(kernels))) kinds.push_back(InputKind::Bf16);
  const bool few_bits = ridgeline::is_four_bit(format) || format == RL_Q6_K;
  if (few_bits && expands_to_bytes(kernels)) kinds.push_back(InputKind::Int8Expanded);
  if (few_bits && codes_scales(kernels)) kinds.push_back(InputKind::Int8Coded);
  if (amx && format != RL_Q6_K) kinds.push_back(format == RL_Q8_C ? InputKind::Int16Rows : InputKind::Bf16Rows);
  return kinds;
}

// Rows of floats, and memory for what the kernels make of them: not a byte more than they may use.
class Prepared {
 public:
  Prepared(const Kernels& kernels, int format, InputKind kind, const std::vector<float>& x, int k, int rows)
      : k_(padded_k(k)), high_(bytes(kind, rows) * size_t(ridgeline::high_bytes(kind))),
        low_(bytes(kind, rows)), scales_(size_t(rows) * k_ / kGroup), sums_(size_t(rows) * k_ / kGroup * ridgeline::sums_per_group(kind, format)),
        inputs{kind, ridgeline::Tiling(rows, kernels.tile_rows), k_, high_.data(), low_.data(), scales_.data(),
               sums_.data(), ridgeline::multiplied_offset(kind, format), ridgeline::sums_per_group(kind, format)} {
    for (int row = 0; row < rows; row++) {
      Aligned<float> values(static_cast<size_t>(k));  // on its own, so that a sanitizer sees a read beyond the row
      std::copy(x.begin() + size_t(row) * k, x.begin() + size_t(row + 1) * k, values.data());
      kernels.prepare_row(values.data(), k, inputs, row);
    }
  }

 private:
  // AMX reads tiles of 16 rows and 64 bytes: the last ones reach beyond the rows there are.
  size_t bytes(InputKind kind, int rows) const { return size_t(rows + (row_after_row(kind) ? 16 : 0)) * k_; }

  const int k_;
  Aligned<uint8_t> high_, low_;
  Aligned<float> scales_, sums_;

 public:
  const Inputs inputs;
};

// [rows][n padded to whole panels], starting from `before`: what the kernel adds to. In two calls, where the inputs are
// more than one tile, so that none counts on having all the tiles.
inline std::vector<float> multiply(const Kernels& kernels, const rl_matrix& w, const Prepared& x,
                                   const std::vector<float>& before, bool add) {
  const size_t stride = size_t(ridgeline::num_panels(w.n)) * kPanel;
  std::vector<float> out = before;
  Aligned<uint8_t> scratch(kernels.panel_scratch_bytes(x.inputs.k));
  const int tiles = x.inputs.tiling.count, part = (tiles + 1) / 2;
  for (int first = 0; first < tiles; first += part)
    kernels.panel_products(w, 0, ridgeline::num_panels(w.n), x.inputs, first, std::min(tiles, first + part), out.data(), stride,
                           add, scratch.data());
  return out;
}

inline std::vector<double> rounded_inputs(InputKind kind, const float* x, int k) {
  std::vector<double> out(static_cast<size_t>(k));
  const bool bf16 = kind == InputKind::Bf16 || kind == InputKind::Bf16Rows;
  if (kind == InputKind::Float || bf16) {
    for (int i = 0; i < k; i++) out[i] = bf16 ? as_bf16(x[i]) : x[i];
  } else if (ridgeline::has_row_scale(kind)) {
    as_steps(x, k, 16256.0f, out.data());
  } else {
    for (int at = 0; at < k; at += kGroup)
      as_steps(x + at, std::min(kGroup, k - at), ridgeline::has_two_limbs(kind) ? 16256.0f : 127.0f, out.data() + at);
  }
  return out;
}

// AMX expands quantized weights to bf16, ties away from zero.
inline float as_expanded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x8000) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Expected {
  double value, tolerance;
};

inline Expected dot(int format, InputKind kind, const float* w, const std::vector<double>& x) {
  const int k = int(x.size()), groups = (k + kGroup - 1) / kGroup;
  double value = 0, sizes = 0, spread = 0, row_most = 0;
  for (int i = 0; i < k; i++) row_most = std::max(row_most, std::fabs(double(w[i])));
  for (int g = 0; g < groups; g++) {
    double inputs = 0, most = 0;
    for (int i = g * kGroup; i < std::min(k, (g + 1) * kGroup); i++) {
      const bool expanded = kind == InputKind::Bf16Rows && ridgeline::is_quantized(format);
      const double term = double(expanded ? as_expanded(w[i]) : w[i]) * x[i];
      value += term, sizes += std::fabs(term), inputs += std::fabs(x[i]), most = std::max(most, std::fabs(double(w[i])));
    }
    // A quantized weight is scale · q + minimum: at most 2 and 1 times as large as the largest weight (and 1 % for an
    // uneven range), and the two are summed apart.
    spread += 3.06 * (format == RL_Q8_C || is_expanded(kind) ? row_most : most) * inputs;
  }
  // Floats: a product and a sum for each input. Quantized: exact inside a group, then both parts are rounded and added.
  const bool by_group = ridgeline::is_quantized(format) && format != RL_F8 && kind != InputKind::Bf16Rows;
  const int sums = format == RL_Q6_K ? 2 * groups : groups;  // it has a scale per half group
  return {value, by_group ? (2 * sums + 8) * kUnit * spread : (2 * k + 4) * kUnit * sizes + 1e-30};
}

struct Case {
  int format;
  InputKind kind;
  int n, k, rows;
  bool bias, add, extreme;  // extreme: nothing but the largest sizes, where sums of bytes could overflow
  uint64_t seed;
  bool aligned = false;  // extreme, and no two products cancel: a group's sum is the largest there is
};

inline std::vector<float> random_inputs(Random& random, const Case& c) {
  std::vector<float> x = random_floats(random, size_t(c.rows) * c.k);
  for (float& value : x)
    if (c.extreme) value = random.integer(0, 1) || c.aligned ? 1.0f : -1.0f;
  if (c.aligned)  // rows of one sign each
    for (size_t i = 0; i < x.size(); i++) x[i] *= i / size_t(c.k) % 2 ? -1.0f : 1.0f;
  for (int row = 0; row < c.rows && !c.extreme; row++)
    for (int at = 0; at < c.k; at += kGroup) {  // groups of very different sizes, and some of nothing
      const int what = random.integer(0, 9);
      const float size = what == 0 ? 0.0f : what == 1 ? 1e-35f : what == 2 ? 1000.0f : what == 3 ? 1e-4f : 1.0f;
      for (int i = at; i < std::min(c.k, at + kGroup); i++) x[size_t(row) * c.k + i] *= size;
    }
  return x;
}

inline std::vector<float> random_weights(Random& random, const Case& c) {
  std::vector<float> w = random_floats(random, size_t(c.n) * c.k);
  for (float& value : w)
    if (c.extreme) value = float(random.integer(-1, 1));
  // Every q but a group's first is the largest: Q4_H reaches from -8 to 7, and a group's largest size becomes -8.
  for (size_t i = 0; i < w.size() && c.aligned; i++)
    w[i] = i % size_t(c.k) % kGroup == 0 ? -1.0f : c.format == RL_Q4_H ? 0.875f : 1.0f;
  // Every other output has the least q instead: -8 and -32 with the offset, in formats that have one.
  for (size_t i = 0; i < w.size() && c.aligned && ridgeline::group_offset(c.format); i++)
    if (i / size_t(c.k) % 2) w[i] = 1.0f;
  return w;
}

// The weights as they are after expanding, found by multiplying them with one input at a time. As bytes, each must be
// within half a step (and what 16-bit arithmetic adds) of what is packed, a step being a 127th of what the output's
// groups can hold at most. With coded scales it must be within a 15,000th of that: 15 or 32 times half a unit of the scales.
inline std::vector<float> expanded_weights(const Kernels& kernels, const Packed& packed, const Case& c) {
  rl_matrix plain = packed.matrix;
  plain.bias = nullptr;
  const size_t stride = size_t(ridgeline::num_panels(c.n)) * kPanel;
  std::vector<float> ones(size_t(c.k) * c.k), none(size_t(c.k) * stride), w = packed.all();
  for (int i = 0; i < c.k; i++) ones[size_t(i) * c.k + i] = 1.0f;
  const Prepared inputs(kernels, c.format, c.kind, ones, c.k, c.k);
  const std::vector<float> seen = multiply(kernels, plain, inputs, none, false);
  for (int o = 0; o < c.n; o++) {
    double most = 0;
    for (int i = 0; i < c.k; i++) most = std::max(most, std::fabs(double(w[size_t(o) * c.k + i])));
    // A group's range reaches a 15th beyond its weights at the worst; with a zero point, which is rounded, a seventh.
    const double step = (c.format == RL_Q4_Z ? 1.15 : 1.07) * most / 127;
    for (int i = 0; i < c.k; i++) {
      about("%s expanded, [%d, %d], output %d, input %d, seed %llu", format_name(c.format), c.n, c.k, o, i,
            static_cast<unsigned long long>(c.seed));
      const double tolerance = c.kind == InputKind::Int8Coded ? step * 127 / 15000 : 0.52 * step;
      CHECK_NEAR(seen[size_t(i) * stride + o], double(w[size_t(o) * c.k + i]), tolerance + 1e-30);
      w[size_t(o) * c.k + i] = seen[size_t(i) * stride + o];
    }
  }
  return w;
}

inline void check_case(const Kernels& kernels, const Case& c) {
  Random random(c.seed);
  Packed packed(c.format, c.n, c.k, random_weights(random, c));
  const size_t stride = size_t(ridgeline::num_panels(c.n)) * kPanel;
  std::vector<float> bias = random_floats(random, stride);
  if (c.bias) packed.matrix.bias = bias.data();
  const std::vector<float> x = random_inputs(random, c), before = random_floats(random, stride * c.rows);
  const Prepared prepared(kernels, c.format, c.kind, x, c.k, c.rows);
  const std::vector<float> out = multiply(kernels, packed.matrix, prepared, before, c.add);

  const std::vector<float> w =
      is_expanded(c.kind) ? expanded_weights(kernels, packed, c) : packed.all();
  for (int row = 0; row < c.rows; row++) {
    const std::vector<double> inputs = rounded_inputs(c.kind, &x[size_t(row) * c.k], c.k);
    for (int o = 0; o < int(stride); o++) {
      Expected expected{0, 0};
      if (o < c.n) expected = dot(c.format, c.kind, &w[size_t(o) * c.k], inputs);
      for (const float added : {c.bias ? bias[o] : 0.0f, c.add ? before[row * stride + o] : 0.0f})
        expected.tolerance += 2 * kUnit * (std::fabs(added) + std::fabs(expected.value)), expected.value += added;
      about("%s x %s, [%d, %d], row %d of %d, output %d, bias %d, add %d, extreme %d, seed %llu", format_name(c.format),
            kind_name(c.kind), c.n, c.k, row, c.rows, o, c.bias, c.add, c.extreme, static_cast<unsigned long long>(c.seed));
      CHECK_NEAR(out[row * stride + o], expected.value, expected.tolerance);
    }
  }

  // A row's bits do not depend on the rows it is computed with.
  const int row = random.integer(0, c.rows - 1);
  const std::vector<float> own(x.begin() + size_t(row) * c.k, x.begin() + size_t(row + 1) * c.k);
  const std::vector<float> from(before.begin() + row * stride, before.begin() + (row + 1) * stride);
  const Prepared lone(kernels, c.format, c.kind, own, c.k, 1);
  const std::vector<float> alone = multiply(kernels, packed.matrix, lone, from, c.add);
  CHECK(std::memcmp(alone.data(), &out[row * stride], stride * 4) == 0);
}

inline void every_format_times_every_kind_of_inputs_is_right(const Kernels& kernels, bool amx) {
  uint64_t seed = 1;
  for (int format : kFormats)
    for (InputKind kind : kinds_of(kernels, format, amx)) {
      for (int rows = 1; rows <= 40; rows++, seed++) {
        Random random(seed);
        const bool few = rows % 4;  // small shapes for most numbers of rows, larger ones for some
        check_case(kernels, {format, kind, random.integer(1, few ? 20 : 70), random.integer(1, few ? 100 : 300), rows,
                             random.integer(0, 1) == 1, random.integer(0, 1) == 1, random.integer(0, 4) == 0, seed});
      }
      check_case(kernels, {format, kind, 17, 2049, 3, true, false, false, seed++});
      check_case(kernels, {format, kind, 16, 2048, 5, false, true, true, seed++});
      for (int rows : {1, 2, 3, 4, 9}) check_case(kernels, {format, kind, 32, 256, rows, false, false, true, seed++, true});
    }
}

// A NaN or an infinity makes its own row visibly broken, and no other row any different.
inline void a_broken_row_breaks_no_other(const Kernels& kernels, bool amx) {
  for (int format : kFormats)
    for (InputKind kind : kinds_of(kernels, format, amx))
      for (float broken : {NAN, INFINITY, -INFINITY})
        for (int rows : {1, 2, 5, 13, 33}) {
          Random random(uint64_t(rows) + 100 * format);
          const int n = 32, k = random.integer(1, 100), row = random.integer(0, rows - 1);
          about("%s x %s, [%d, %d], row %d of %d holds %g", format_name(format), kind_name(kind), n, k, row, rows, broken);
          const Packed packed(format, n, k, random_floats(random, size_t(n) * k));
          std::vector<float> x = random_floats(random, size_t(rows) * k), zeros(size_t(rows) * n);
          const Prepared whole(kernels, format, kind, x, k, rows);
          const std::vector<float> good = multiply(kernels, packed.matrix, whole, zeros, false);
          x[size_t(row) * k + random.integer(0, k - 1)] = broken;
          if (rows % 2) std::fill_n(&x[size_t(row) * k], k, broken);  // one value, or all of them
          const Prepared spoilt(kernels, format, kind, x, k, rows);
          const std::vector<float> bad = multiply(kernels, packed.matrix, spoilt, zeros, false);
          for (int r = 0; r < rows; r++) {
            if (r != row) CHECK(std::memcmp(&bad[size_t(r) * n], &good[size_t(r) * n], size_t(n) * 4) == 0);
            for (int o = 0; o < n && r == row; o++) CHECK(!std::isfinite(bad[size_t(r) * n + o]));
          }
        }
}

// A NaN scale, though packing rejects it, makes its own output visibly broken and changes no other.
inline void a_broken_scale_breaks_no_other_output(const Kernels& kernels, bool amx) {
  const int n = 32, k = 96, rows = 5;
  for (int format : kFormats)
    for (InputKind kind : kinds_of(kernels, format, amx)) {
      if (!ridgeline::is_quantized(format)) continue;
      about("%s x %s with a broken scale", format_name(format), kind_name(kind));
      Random random(uint64_t(format) + 7);
      Packed packed(format, n, k, random_floats(random, size_t(n) * k));
      const std::vector<float> x = random_floats(random, size_t(rows) * k), zeros(size_t(rows) * n);
      const Prepared inputs(kernels, format, kind, x, k, rows);
      const std::vector<float> good = multiply(kernels, packed.matrix, inputs, zeros, false);
      const bool floats = ridgeline::has_float_scales(format) || format == RL_Q8_C || format == RL_F8;
      if (!floats && std::string(kernels.name) == "portable") continue;  // its half precision has no NaN
      const uint32_t nan = floats ? 0x7fc00000u : 0x7e00u;
      std::memcpy(packed.data.data(), &nan, floats ? 4 : 2);  // the first group's, of output 0
      const std::vector<float> bad = multiply(kernels, packed.matrix, inputs, zeros, false);
      for (int row = 0; row < rows; row++) {
        CHECK(!std::isfinite(bad[size_t(row) * n]));
        CHECK(std::memcmp(&bad[size_t(row) * n + 1], &good[size_t(row) * n + 1], size_t(n - 1) * 4) == 0);
      }
    }
}

inline double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return code & 0x80 ? -size : size;
}

// Every E4M3 number but NaN, subnormal ones included, reaches the sums unrounded: one input of 1, the others 0.
inline void every_fp8_number_is_multiplied_as_it_is(const Kernels& kernels, bool amx) {
  const int n = 16, k = 256;
  std::vector<uint8_t> codes(size_t(n) * k);
  for (int i = 0; i < n * k; i++) codes[size_t(i)] = (i & 0x7f) == 0x7f ? uint8_t(0) : uint8_t(i);
  const std::vector<float> scales(size_t(n) * 2, 0.25f);
  Packed packed(RL_F8, n, k);
  CHECK_OK(rl_pack_codes(RL_F8, n, k, codes.data(), scales.data(), nullptr, packed.data.data()));
  for (InputKind kind : kinds_of(kernels, RL_F8, amx))
    for (int rows : {1, 40}) {
      const std::vector<float> before(size_t(rows) * n);
      for (int first = 0; first < k; first += rows) {
        std::vector<float> x(size_t(rows) * k);
        for (int row = 0; row < rows && first + row < k; row++) x[size_t(row) * k + first + row] = 1.0f;
        const Prepared inputs(kernels, RL_F8, kind, x, k, rows);
        const std::vector<float> out = multiply(kernels, packed.matrix, inputs, before, false);
        for (int row = 0; row < rows && first + row < k; row++)
          for (int o = 0; o < n; o++) {
            const int code = codes[size_t(o) * k + first + row];
            about("FP8 x %s, code %d, %d rows", kind_name(kind), code, rows);
            CHECK_EQUAL(double(out[size_t(row) * n + o]), 0.25 * e4m3_value(code));
          }
      }
    }
}

// Whatever number of rows a step has, the set chooses inputs that the format can be multiplied with; in deterministic
// mode always the same.
inline void the_chosen_kind_fits_the_format(const Kernels& kernels, bool amx) {
  for (int format : kFormats)
    for (int rows = 1; rows <= 600; rows++) {
      about("%s, %d rows", format_name(format), rows);
      const std::vector<InputKind> kinds = kinds_of(kernels, format, amx);
      CHECK(std::count(kinds.begin(), kinds.end(), kernels.input_kind(format, rows, false)) == 1);
      CHECK(kernels.input_kind(format, rows, true) == kernels.input_kind(format, 1, true));
      CHECK(!row_after_row(kernels.input_kind(format, rows, true)));
    }
}

inline void check_linear(const Kernels& kernels, bool amx) {
  kernels.start_thread();
  every_format_times_every_kind_of_inputs_is_right(kernels, amx);
  every_fp8_number_is_multiplied_as_it_is(kernels, amx);
  a_broken_row_breaks_no_other(kernels, amx);
  a_broken_scale_breaks_no_other_output(kernels, amx);
  the_chosen_kind_fits_the_format(kernels, amx);
}

}  // namespace linear_cases
