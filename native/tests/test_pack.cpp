// Packing and unpacking: nothing is lost that the format can hold, and nothing broken gets in.
#include <algorithm>
#include <vector>

#include "packed.h"

namespace {

// ---- half precision, written here a second time so that the library's is not its own judge ----

double half_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return h & 0x8000 ? -size : size;
}

uint16_t random_half(Random& random, bool subnormal) {  // finite
  const int exponent = subnormal ? 0 : random.integer(1, 30);
  return uint16_t(random.integer(0, 1) << 15 | exponent << 10 | random.integer(0, 0x3ff));
}

void put_half(uint8_t* at, uint16_t h) { at[0] = uint8_t(h), at[1] = uint8_t(h >> 8); }
double get_half(const uint8_t* at) { return half_value(uint16_t(at[0] | at[1] << 8)); }

// ---- GGUF blocks, as their specification has them: value(block, i) of weight i ----

struct Gguf {
  int type, format, weights, bytes, scales;  // scales: half-precision numbers
  int scales_at;                             // in the block
  double (*value)(const uint8_t* block, int i);
};

int nibble(const uint8_t* quants, int i) { return i < 16 ? quants[i] & 15 : quants[i - 16] >> 4; }
int fifth(const uint8_t* bits, int i) { return (bits[i / 8] >> (i % 8) & 1) << 4; }

double k_value(const uint8_t* block, int i, int quant) {
  const uint8_t* packed = block + 4;
  const int j = i / 32;
  const int scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
  const int minimum = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
  return get_half(block) * scale * quant - get_half(block + 2) * minimum;
}
int k_nibble(const uint8_t* quants, int i) {  // 64 weights share 32 bytes: low nibbles, then high
  const uint8_t byte = quants[i / 64 * 32 + i % 32];
  return i % 64 < 32 ? byte & 15 : byte >> 4;
}

const Gguf kTypes[] = {
    {2, RL_Q4_H, 32, 18, 1, 0, [](const uint8_t* b, int i) { return get_half(b) * (nibble(b + 2, i) - 8); }},
    {3, RL_Q4_HM, 32, 20, 2, 0, [](const uint8_t* b, int i) { return get_half(b) * nibble(b + 4, i) + get_half(b + 2); }},
    {6, RL_Q8_FM, 32, 22, 1, 0,
     [](const uint8_t* b, int i) { return get_half(b) * ((nibble(b + 6, i) | fifth(b + 2, i)) - 16); }},
    {7, RL_Q8_FM, 32, 24, 2, 0,
     [](const uint8_t* b, int i) { return get_half(b) * (nibble(b + 8, i) | fifth(b + 4, i)) + get_half(b + 2); }},
    {8, RL_Q8_H, 32, 34, 1, 0, [](const uint8_t* b, int i) { return get_half(b) * int8_t(b[2 + i]); }},
    {12, RL_Q4_K, 256, 144, 2, 0, [](const uint8_t* b, int i) { return k_value(b, i, k_nibble(b + 16, i)); }},
    {13, RL_Q8_FM, 256, 176, 2, 0,
     [](const uint8_t* b, int i) {
       return k_value(b, i, k_nibble(b + 48, i) | (b[16 + i % 32] >> (i / 32) & 1) << 4);
     }},
    {14, RL_Q6_K, 256, 210, 1, 208,
     [](const uint8_t* b, int i) {  // 128 weights share 64 bytes of nibbles and 32 of upper bits
       const int j = i % 128, byte = b[i / 128 * 64 + j % 64];
       const int quant = (j < 64 ? byte & 15 : byte >> 4) | (b[128 + i / 128 * 32 + j % 32] >> (j / 32 * 2) & 3) << 4;
       return get_half(b + 208) * int8_t(b[192 + i / 16]) * (quant - 32);
     }},
};

std::vector<uint8_t> random_blocks(Random& random, const Gguf& gguf, int rows, int k) {
  std::vector<uint8_t> source(size_t(rows) * (k / gguf.weights) * gguf.bytes);
  for (uint8_t& byte : source) byte = uint8_t(random.bits());
  for (size_t block = 0; block < source.size(); block += gguf.bytes)
    for (int s = 0; s < gguf.scales; s++)
      put_half(&source[block + gguf.scales_at + 2 * s], random_half(random, random.integer(0, 9) == 0));
  return source;
}

float gguf_value(const Gguf& gguf, const std::vector<uint8_t>& source, int k, int row, int column) {
  const size_t block = size_t(row) * (k / gguf.weights) + column / gguf.weights;
  return float(gguf.value(&source[block * gguf.bytes], column % gguf.weights));
}

int pack(const Gguf& gguf, const std::vector<uint8_t>& source, int rows, Packed& into, const int32_t* map = nullptr) {
  const rl_matrix& m = into.matrix;
  return rl_pack_gguf(gguf.type, gguf.format, m.n, m.k, source.data(), rows, map, into.data.data());
}

// ---- cases ----

void floats_come_back_as_near_as_the_format_allows() {
  Random random;
  for (int format : kFormats)
    for (int round = 0; round < 12; round++) {
      const int n = random.integer(1, 70), k = random.integer(1, 600);
      const std::vector<float> source = random_floats(random, size_t(n) * k);
      Packed packed(format, n, k);
      CHECK_OK(rl_pack_float(format, n, k, source.data(), packed.data.data()));
      const std::vector<float> back = packed.all();
      for (int row = 0; row < n; row++) {
        float row_size = 0.0f;
        for (int i = 0; i < k; i++) row_size = std::max(row_size, std::fabs(source[row * k + i]));
        for (int i = 0; i < k; i++) {
          float low = 0.0f, high = 0.0f;
          for (int j = i / 32 * 32; j < std::min(k, i / 32 * 32 + 32); j++)
            low = std::min(low, source[row * k + j]), high = std::max(high, source[row * k + j]);
          float super_size = 0.0f;
          for (int j = i / 256 * 256; j < std::min(k, i / 256 * 256 + 256); j++)
            super_size = std::max(super_size, std::fabs(source[row * k + j]));
          const float size = std::max(-low, high), value = source[row * k + i];
          // Half a step, and for half-precision scales and minima their own rounding (2^-11 of the largest value).
          double tolerance = 0.0;
          if (format == RL_BF16) tolerance = std::fabs(value) * 0x1p-8;
          if (format == RL_Q4_H) tolerance = size / 8;  // up to a whole step: the range ends at 7
          if (format == RL_Q4_HM) tolerance = (high - low) / 30 + size * 0x1p-9;
          // Units are made for the 256 weights: a group's own scale is up to one 63rd (127th) of the largest one's too large.
          if (format == RL_Q4_K) tolerance = (high - low) / 30 + super_size / 500;
          if (format == RL_Q6_K) tolerance = size / 32 + super_size / 4000;  // as Q4_H: the range ends at 31
          if (format == RL_Q4_Z) tolerance = (high - low) / 15 + size * 0x1p-9;  // the zero point is rounded too
          if (format == RL_F8) {  // three bits, or half the least subnormal number
            float block = 0.0f;
            for (int j = i / 128 * 128; j < std::min(k, i / 128 * 128 + 128); j++)
              block = std::max(block, std::fabs(source[row * k + j]));
            tolerance = std::fabs(value) / 16 + block / 448 / 1024;
          }
          if (format == RL_Q8_H) tolerance = size / 254 + size * 0x1p-10;
          if (format == RL_Q8_FM) tolerance = (high - low) / 510 + size * 1e-6;
          if (format == RL_Q8_C) tolerance = row_size / 254 + row_size * 1e-6;
          about("format %d, [%d, %d], row %d, column %d", format, n, k, row, i);
          CHECK_NEAR(back[row * k + i], value, tolerance * 1.001);
        }
      }
    }
}

void a_part_unpacks_as_it_does_in_the_whole() {
  Random random;
  for (int format : kFormats) {
    about("format %d", format);
    const int n = 53, k = 97;
    const std::vector<float> source = random_floats(random, size_t(n) * k);
    Packed packed(format, n, k);
    CHECK_OK(rl_pack_float(format, n, k, source.data(), packed.data.data()));
    const std::vector<float> all = packed.all();
    for (int round = 0; round < 10; round++) {
      const int first = random.integer(0, n - 1), count = random.integer(0, n - first);
      const std::vector<float> part = packed.rows(first, count);
      CHECK(std::equal(part.begin(), part.end(), all.begin() + size_t(first) * k));
    }
    float none;
    CHECK_REFUSED(rl_unpack(&packed.matrix, 0, n + 1, &none), "rows");
    CHECK_REFUSED(rl_unpack(&packed.matrix, -1, 1, &none), "rows");
    CHECK_REFUSED(rl_unpack(&packed.matrix, n, 1, &none), "rows");
    CHECK_REFUSED(rl_unpack(&packed.matrix, 0x7fffffff, 1, &none), "rows");
  }
}

void rows_that_pad_the_last_panel_are_zero() {
  Random random;
  for (int format : kFormats) {
    about("format %d", format);
    const int n = 21, k = 64, padded = 32;
    const std::vector<float> source = random_floats(random, size_t(n) * k);
    Packed packed(format, n, k);
    CHECK_OK(rl_pack_float(format, n, k, source.data(), packed.data.data()));
    packed.matrix.n = padded;  // the same bytes: a matrix is whole panels
    if (!CHECK_EQUAL(rl_packed_bytes(format, n, k), rl_packed_bytes(format, padded, k))) continue;
    for (float value : packed.rows(n, padded - n)) CHECK_EQUAL(value, 0.0f);
  }
}

void gguf_blocks_lose_nothing() {
  Random random;
  for (const Gguf& gguf : kTypes)
    for (int round = 0; round < 12; round++) {
      const int n = random.integer(1, 40), k = gguf.weights * random.integer(1, 5);
      const std::vector<uint8_t> source = random_blocks(random, gguf, n, k);
      Packed packed(gguf.format, n, k);
      if (!CHECK_OK(pack(gguf, source, n, packed))) continue;
      const std::vector<float> back = packed.all();
      for (int row = 0; row < n; row++)
        for (int i = 0; i < k; i++) {
          about("GGUF type %d, [%d, %d], row %d, column %d", gguf.type, n, k, row, i);
          CHECK_EQUAL(back[size_t(row) * k + i], gguf_value(gguf, source, k, row, i));
        }
    }
}

void rows_go_where_the_map_says() {
  Random random;
  for (const Gguf& gguf : kTypes) {
    about("GGUF type %d", gguf.type);
    const int rows = 24, k = gguf.weights * 2, n = 37;
    const std::vector<uint8_t> source = random_blocks(random, gguf, rows, k);
    std::vector<int32_t> map(n);
    for (int32_t& from : map) from = random.integer(-1, rows - 1);
    Packed packed(gguf.format, n, k);
    CHECK_OK(pack(gguf, source, rows, packed, map.data()));
    const std::vector<float> back = packed.all();
    for (int row = 0; row < n; row++)
      for (int i = 0; i < k; i++)
        CHECK_EQUAL(back[size_t(row) * k + i], map[row] < 0 ? 0.0f : gguf_value(gguf, source, k, map[row], i));
    for (int32_t outside : {rows, -2, 0x7fffffff}) {
      map[n / 2] = outside;
      CHECK_REFUSED(pack(gguf, source, rows, packed, map.data()), "row");
    }
    // Without a map, more rows than the source has are as far outside as a mapped one.
    CHECK_REFUSED(pack(gguf, source, rows, packed), "row");
  }
}

void a_scale_that_is_not_finite_is_refused() {
  Random random;
  for (const Gguf& gguf : kTypes)
    for (uint16_t broken : {0x7c00, 0xfc00, 0x7e00, 0xfe01})
      for (int which = 0; which < gguf.scales; which++) {
        about("GGUF type %d, scale %d is %#x", gguf.type, which, broken);
        const int n = 5, k = gguf.weights * 3;
        std::vector<uint8_t> source = random_blocks(random, gguf, n, k);
        put_half(&source[size_t(random.integer(0, n * 3 - 1)) * gguf.bytes + gguf.scales_at + 2 * which], broken);
        Packed packed(gguf.format, n, k);
        CHECK_REFUSED(pack(gguf, source, n, packed), "finite");
      }
}

void a_float_that_is_not_finite_is_refused() {
  Random random;
  for (int format : kFormats)
    for (float broken : {NAN, INFINITY, -INFINITY}) {
      about("format %d, value %g", format, broken);
      const int n = 19, k = 45;
      std::vector<float> source = random_floats(random, size_t(n) * k);
      source[size_t(random.integer(0, n * k - 1))] = broken;
      Packed packed(format, n, k);
      CHECK_REFUSED(rl_pack_float(format, n, k, source.data(), packed.data.data()), "finite");
    }
}

void a_float_too_large_for_the_format_is_refused_not_made_infinite() {
  for (int format : kFormats)
    for (float huge : {1e6f, 1e20f, 3.4e38f, -3.4e38f}) {
      const int n = 3, k = 40;
      std::vector<float> source(size_t(n) * k, 1.0f);
      source[50] = huge;
      Packed packed(format, n, k);
      if (rl_pack_float(format, n, k, source.data(), packed.data.data())) continue;
      about("format %d, value %g", format, huge);
      bool finite = true;
      for (float value : packed.all()) finite = finite && std::isfinite(value);
      CHECK(finite);
    }
}

void codes_come_back_as_they_are() {
  Random random;
  for (int format : {RL_F8, RL_Q4_Z})
    for (int round = 0; round < 12; round++) {
      const int n = random.integer(1, 40), k = random.integer(1, 300), wide = format == RL_F8 ? 128 : 32, groups = (k + wide - 1) / wide;
      std::vector<uint8_t> codes(size_t(n) * k), zeros(size_t(n) * groups);
      std::vector<float> scales(size_t(n) * groups);
      for (uint8_t& code : codes) code = uint8_t(format == RL_F8 ? random.integer(0, 126) | random.integer(0, 1) << 7 : random.integer(0, 15));
      for (uint8_t& zero : zeros) zero = uint8_t(random.integer(0, 15));
      for (float& scale : scales) scale = float(half_value(random_half(random, false)));
      Packed packed(format, n, k);
      const uint8_t* const given = format == RL_F8 ? nullptr : zeros.data();
      if (!CHECK_OK(rl_pack_codes(format, n, k, codes.data(), scales.data(), given, packed.data.data()))) continue;
      const std::vector<float> back = packed.all();
      for (int row = 0; row < n; row++)
        for (int i = 0; i < k; i++) {
          const int code = codes[size_t(row) * k + i], group = row * groups + i / wide, exponent = code >> 3 & 15;
          const double number = exponent ? std::ldexp(8 + (code & 7), exponent - 10) : std::ldexp(code & 7, -9);
          const double value = format == RL_F8 ? (code & 0x80 ? -number : number) : code - zeros[size_t(group)];
          about("format %d, [%d, %d], row %d, column %d", format, n, k, row, i);
          CHECK_EQUAL(double(back[size_t(row) * k + i]), value * double(scales[size_t(group)]));
        }
      auto refused = [&](const char* why) {
        CHECK_REFUSED(rl_pack_codes(format, n, k, codes.data(), scales.data(), given, packed.data.data()), why);
      };
      codes[0] = 0x7f;
      refused(format == RL_F8 ? "NaN" : "above 15");
      codes[0] = 0, scales[size_t(groups) - 1] = NAN;
      refused("scale");
      CHECK_REFUSED(rl_pack_codes(RL_Q8_H, n, k, codes.data(), scales.data(), given, packed.data.data()), "format");
    }
}

void shapes_and_types_that_make_no_sense_are_refused() {
  std::vector<uint8_t> source(4096);
  Aligned<uint8_t> out(4096);
  about("shapes and types");
  for (int format : {-1, 11, 1000}) CHECK_REFUSED(rl_packed_bytes(format, 16, 32), "format");
  for (int format : kFormats) {
    CHECK_REFUSED(rl_packed_bytes(format, 0, 32), "shape");
    CHECK_REFUSED(rl_packed_bytes(format, 16, 0), "shape");
    CHECK_REFUSED(rl_packed_bytes(format, -16, 32), "shape");
    CHECK_REFUSED(rl_packed_bytes(format, 16, -32), "shape");
    CHECK(rl_packed_bytes(format, 1, 1) % 64 == 0);
    CHECK(rl_packed_bytes(format, 1 << 20, 1 << 16) > int64_t(1) << 34);  // more than 32 bits of bytes
  }
  for (const Gguf& gguf : kTypes) {
    const int other = gguf.format == RL_Q8_C ? RL_Q8_H : RL_Q8_C;
    CHECK_REFUSED(rl_pack_gguf(gguf.type, other, 1, 256, source.data(), 1, nullptr, out.data()), "format");
    CHECK_REFUSED(rl_pack_gguf(gguf.type, gguf.format, 1, 48, source.data(), 1, nullptr, out.data()), "block");
  }
  CHECK_REFUSED(rl_pack_gguf(11, RL_Q8_FM, 1, 256, source.data(), 1, nullptr, out.data()), "type");  // Q3_K
}

}  // namespace

int main() {
  floats_come_back_as_near_as_the_format_allows();
  a_part_unpacks_as_it_does_in_the_whole();
  rows_that_pad_the_last_panel_are_zero();
  gguf_blocks_lose_nothing();
  rows_go_where_the_map_says();
  a_scale_that_is_not_finite_is_refused();
  a_float_that_is_not_finite_is_refused();
  a_float_too_large_for_the_format_is_refused_not_made_infinite();
  codes_come_back_as_they_are();
  shapes_and_types_that_make_no_sense_are_refused();
  return report();
}
