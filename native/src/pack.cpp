// Packing: from floats or GGUF blocks to the panels of formats.h, and back.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "errors.h"
#include "formats.h"

namespace ridgeline {

float from_half(uint16_t value) {
  const uint32_t sign = uint32_t(value & 0x8000) << 16;
  const uint32_t exponent = (value >> 10) & 31, fraction = value & 0x3ff;
  union { uint32_t u; float f; } bits;
  if (exponent == 0) {
    bits.f = std::ldexp(float(fraction), -24);
    bits.u |= sign;
  } else {
    bits.u = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
  }
  return bits.f;
}

uint16_t to_half(float value) {  // to nearest, ties to even
  union { float f; uint32_t u; } bits{value};
  const uint16_t sign = uint16_t((bits.u >> 16) & 0x8000);
  const float size = std::fabs(value);
  if (!(size < 65520.0f)) return uint16_t(sign | (std::isnan(value) ? 0x7e00 : 0x7c00));
  if (size < 6.103515625e-05f) return uint16_t(sign | uint16_t(std::nearbyint(std::ldexp(size, 24))));
  const uint32_t rounded = (bits.u & 0x7fffffff) + 0xfff + ((bits.u >> 13) & 1);
  return uint16_t(sign | ((rounded >> 13) - (112 << 10)));
}

float from_e4m3(uint8_t code) {
  const int exponent = (code >> 3) & 15, fraction = code & 7;
  const float size = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
  return code & 0x80 ? -size : size;
}

uint8_t to_e4m3(float value) {
  const float size = std::min(std::fabs(value), 448.0f);
  int exponent = 0;
  std::frexp(size, &exponent);  // size = fraction · 2^exponent, fraction in [0.5, 1)
  const int step = std::max(exponent - 4, -9);  // three bits behind the first; subnormal below 2^-6
  int units = int(std::nearbyint(std::ldexp(size, -step)));  // below 16, or 16 where it rounds up to the next power of two
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  return uint8_t(sign | (units < 8 ? units : ((step + 9) << 3) + units));
}

namespace {

// A group of 32 weights of one row, on its way from a source to its panel.
struct Group {
  float scale, minimum;  // Q4_K, Q6_K: their units
  uint8_t quants[kGroup];
  uint8_t zero;       // Q4_Z
  int8_t codes[2];    // Q4_K: what the units are multiplied with; Q6_K: of both halves
};

bool has_nibbles(int format) { return is_four_bit(format) || format == RL_Q6_K; }

class PanelWriter {
 public:
  PanelWriter(int format, int k, uint8_t* out) : format_(format), k_(k), out_(out) {}

  void write(int row, int group, const Group& g) {
    uint8_t* panel = out_ + size_t(row / kPanel) * panel_bytes(format_, k_);
    const int o = row % kPanel;
    if (format_ == RL_Q8_C) {
      reinterpret_cast<float*>(panel)[o] = g.scale;
    } else if (const size_t bytes = super_bytes(format_)) {
      uint8_t* super = panel + size_t(group / 8) * bytes;
      reinterpret_cast<uint16_t*>(super)[o] = to_half(g.scale);
      uint8_t* codes = super + 2 * kPanel + o;
      if (format_ == RL_Q4_K) {
        codes[group % 8 * kPanel] = uint8_t(g.codes[0]);
        super += minima_offset(format_, k_), codes += minima_offset(format_, k_);
        reinterpret_cast<uint16_t*>(super)[o] = to_half(g.minimum);
        codes[group % 8 * kPanel] = uint8_t(g.codes[1]);
      } else {
        for (int half = 0; half < 2; half++) codes[(group % 8 * 2 + half) * kPanel] = uint8_t(g.codes[half]);
      }
    } else {
      write_scale(panel, group * kPanel + o, g.scale);
      if (has_zeros(format_)) panel[minima_offset(format_, k_) + size_t(group * kPanel + o)] = g.zero;
      if (has_minima(format_)) write_scale(panel + minima_offset(format_, k_), group * kPanel + o, g.minimum);
    }
    uint8_t* quants = panel + quants_offset(format_, k_) + size_t(group) * group_quant_bytes(format_);
    const bool nibbles = has_nibbles(format_);
    for (int i = 0; i < kGroup; i++) {  // into zeros
      quants[quant_byte(nibbles, o, i)] |= uint8_t(!nibbles ? g.quants[i] : (g.quants[i] & 15) << (i / 4 % 2 * 4));
      if (format_ == RL_Q6_K) quants[upper_byte(o, i)] |= uint8_t(g.quants[i] >> 4 << (i / 4 % 4 * 2));
    }
  }

 private:
  void write_scale(uint8_t* section, int index, float value) {
    if (has_float_scales(format_))
      reinterpret_cast<float*>(section)[index] = value;
    else
      reinterpret_cast<uint16_t*>(section)[index] = to_half(value);
  }

  const int format_, k_;
  uint8_t* out_;
};

// ---- from floats ----

float half_above(float value) {  // the smallest that is not below; value ≥ 0
  const uint16_t half = to_half(value);
  return from_half(half) < value ? from_half(uint16_t(half + 1)) : from_half(half);
}

float rounded_scale(int format, float scale) { return has_float_scales(format) ? scale : from_half(to_half(scale)); }

uint8_t quantized(float value, float scale, float minimum, int top) {
  if (scale == 0.0f) return 0;
  return uint8_t(std::clamp(std::nearbyint((value - minimum) / scale), 0.0f, float(top)));
}

// `largest`: of the whole row, for one scale per row.
Group quantize_group(int format, const float* values, int count, float largest) {
  Group g{};
  const int top = is_four_bit(format) ? 15 : 255;
  if (has_minima(format) || has_zeros(format)) {
    float low = 0.0f, high = 0.0f;  // zero stays representable, and padding is zero
    for (int i = 0; i < count; i++) low = std::min(low, values[i]), high = std::max(high, values[i]);
    g.scale = rounded_scale(format, (high - low) / float(top));
    g.minimum = rounded_scale(format, low);
    if (has_zeros(format)) g.zero = quantized(-low, g.scale, 0.0f, top), g.minimum = -g.scale * float(g.zero);
  } else {
    if (format != RL_Q8_C) {
      largest = 0.0f;
      for (int i = 0; i < count; i++)
        if (std::fabs(values[i]) > std::fabs(largest)) largest = values[i];
    }
    // Four bits reach from -8 to 7: as in Q4_0, the largest value becomes -8 exactly, whatever its sign.
    const float unit = is_four_bit(format) ? largest / -8.0f : std::fabs(largest) / 127.0f;
    g.scale = format == RL_Q8_C ? unit : rounded_scale(format, unit);
    g.minimum = zero_point(format) * g.scale;
  }
  for (int i = 0; i < kGroup; i++)
    g.quants[i] = i < count ? quantized(values[i], g.scale, g.minimum, top) : uint8_t(0);
  return g;
}

// Units for `count` weights (256 at most): no group's code for its scale or minimum is above 63 (Q4_K) or 127 (Q6_K) in size.
void choose_units(int format, const float* values, int count, float* scale, float* minimum) {
  float most = 0.0f, lowest = 0.0f, widest = 0.0f;
  for (int at = 0; at < count; at += kGroup) {
    float low = 0.0f, high = 0.0f;
    for (int i = at; i < std::min(count, at + kGroup); i++) low = std::min(low, values[i]), high = std::max(high, values[i]);
    most = std::max({most, -low, high}), lowest = std::max(lowest, -low), widest = std::max(widest, high - low);
  }
  *minimum = half_above(lowest / 63.0f);
  *scale = half_above(format == RL_Q6_K ? most / 32.0f / 127.0f : (widest + *minimum) / 15.0f / 63.0f);
}

// A group of Q4_K or Q6_K, with these units.
Group quantize_with_units(int format, const float* values, int count, float scale, float minimum) {
  Group g{};
  g.scale = scale, g.minimum = minimum;
  auto code = [](float value, float unit, int top) {
    return unit == 0.0f ? 0 : int(std::min(std::ceil(value / unit), float(top)));
  };
  for (int half = 0; half < 2; half++) {
    const int end = std::min(count, format == RL_Q6_K ? 16 * half + 16 : kGroup);
    float low = 0.0f, high = 0.0f;
    for (int i = format == RL_Q6_K ? 16 * half : 0; i < end; i++) low = std::min(low, values[i]), high = std::max(high, values[i]);
    if (format == RL_Q6_K) {  // the largest becomes -32 or close to it, whatever its sign
      const int size = code(std::max(-low, high) / 32.0f, scale, 127);
      g.codes[half] = int8_t(high > -low ? -size : size);
    } else if (half == 0) {
      const int down = code(-low, minimum, 63);
      g.codes[1] = int8_t(down);
      g.codes[0] = int8_t(code((high + float(down) * minimum) / 15.0f, scale, 63));
    }
  }
  for (int i = 0; i < kGroup; i++) {
    const float step = scale * float(g.codes[format == RL_Q6_K ? i / 16 : 0]);
    const float zero = format == RL_Q6_K ? -32.0f * step : -minimum * float(g.codes[1]);
    g.quants[i] = i < count && step != 0.0f
                      ? uint8_t(std::clamp(std::nearbyint((values[i] - zero) / step), 0.0f, format == RL_Q6_K ? 63.0f : 15.0f))
                      : uint8_t(0);
  }
  return g;
}

// The largest weight whose scale and minimum are finite as the format stores them.
float largest_weight(int format) {
  constexpr float kHalfMax = 65504.0f, kFloatMax = std::numeric_limits<float>::max();
  switch (format) {
    case RL_F32: return kFloatMax;
    case RL_BF16: return 0x1.fep127f;
    case RL_Q4_H: return 8 * kHalfMax;
    case RL_Q4_HM:
    case RL_Q4_Z: return kHalfMax;
    case RL_Q4_K: return 60 * kHalfMax;
    case RL_Q6_K: return 4000 * kHalfMax;
    case RL_Q8_H: return 127 * kHalfMax;
    default: return kFloatMax / 4;  // a group's range is twice its largest weight
  }
}

void pack_float_row(int format, int n_row, int k, const float* values, uint8_t* out) {
  uint8_t* panel = out + size_t(n_row / kPanel) * panel_bytes(format, k);
  const int o = n_row % kPanel;
  if (format == RL_F32) {
    for (int i = 0; i < k; i++) reinterpret_cast<float*>(panel)[size_t(i) * kPanel + o] = values[i];
  } else if (format == RL_BF16) {
    uint16_t* pairs = reinterpret_cast<uint16_t*>(panel);
    for (int i = 0; i < k; i++) pairs[(size_t(i / 2) * kPanel + o) * 2 + i % 2] = to_bf16(values[i]);
  } else if (format == RL_F8) {
    for (int at = 0; at < k; at += kF8Inputs) {
      float most = 0.0f;
      for (int i = at; i < std::min(k, at + kF8Inputs); i++) most = std::max(most, std::fabs(values[i]));
      const float scale = most / 448.0f;
      reinterpret_cast<float*>(panel)[at / kF8Inputs * kPanel + o] = scale;
      for (int i = at; i < std::min(k, at + kF8Inputs); i++)
        panel[quants_offset(format, k) + f8_byte(o, i)] = scale == 0.0f ? uint8_t(0) : to_e4m3(values[i] / scale);
    }
  } else {
    float largest = 0.0f;
    for (int i = 0; i < k; i++) largest = std::max(largest, std::fabs(values[i]));
    PanelWriter writer(format, k, out);
    float scale = 0.0f, minimum = 0.0f;
    for (int at = 0; at < k; at += kGroup) {
      const int count = std::min(kGroup, k - at);
      if (super_bytes(format) && at % kSuper == 0) choose_units(format, values + at, std::min(kSuper, k - at), &scale, &minimum);
      writer.write(n_row, at / kGroup, super_bytes(format) ? quantize_with_units(format, values + at, count, scale, minimum)
                                                           : quantize_group(format, values + at, count, largest));
    }
  }
}

// ---- from GGUF ----

uint16_t half_bits(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }
float half_at(const uint8_t* p) { return from_half(half_bits(p)); }

void split_nibbles(const uint8_t* bytes, uint8_t* quants) {
  for (int i = 0; i < 16; i++) quants[i] = bytes[i] & 15, quants[i + 16] = bytes[i] >> 4;
}

void add_fifth_bits(const uint8_t* bits, uint8_t* quants) {
  for (int i = 0; i < kGroup; i++) quants[i] |= uint8_t(((bits[i / 8] >> (i % 8)) & 1) << 4);
}

// The six-bit scale and minimum of sub-block j of a K block.
void k_scale(const uint8_t* packed, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = packed[j] & 63, *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4);
    *minimum = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4);
  }
}

void read_k_block(const uint8_t* block, int j, bool five_bits, Group& g) {
  int scale, minimum;
  k_scale(block + 4, j, &scale, &minimum);
  g.codes[0] = int8_t(scale), g.codes[1] = int8_t(minimum);
  g.scale = half_at(block) * (five_bits ? float(scale) : 1.0f);
  g.minimum = half_at(block + 2) * (five_bits ? -float(minimum) : 1.0f);
  const uint8_t* low = block + (five_bits ? 48 : 16) + j / 2 * 32;
  for (int i = 0; i < kGroup; i++) {
    g.quants[i] = j % 2 ? low[i] >> 4 : low[i] & 15;
    if (five_bits) g.quants[i] |= uint8_t(((block[16 + i] >> j) & 1) << 4);
  }
}

void read_q6_block(const uint8_t* block, int j, Group& g) {
  const uint8_t *low = block + j / 4 * 64 + j % 2 * 32, *high = block + 128 + j / 4 * 32;
  g.scale = half_at(block + 208), g.minimum = 0.0f;
  for (int half = 0; half < 2; half++) g.codes[half] = int8_t(block[192 + 2 * j + half]);
  for (int i = 0; i < kGroup; i++)
    g.quants[i] = uint8_t((j % 4 < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (j % 4 * 2) & 3) << 4);
}

struct GgufType {
  int number, format, elements, bytes;
  void (*read)(const uint8_t* block, int part, Group& g);
};

const GgufType kGgufTypes[] = {
    {2, RL_Q4_H, 32, 18, [](const uint8_t* b, int, Group& g) {
       g.scale = half_at(b), g.minimum = -8.0f * g.scale;
       split_nibbles(b + 2, g.quants);
     }},
    {3, RL_Q4_HM, 32, 20, [](const uint8_t* b, int, Group& g) {
       g.scale = half_at(b), g.minimum = half_at(b + 2);
       split_nibbles(b + 4, g.quants);
     }},
    {6, RL_Q8_FM, 32, 22, [](const uint8_t* b, int, Group& g) {
       g.scale = half_at(b), g.minimum = -16.0f * g.scale;
       split_nibbles(b + 6, g.quants);
       add_fifth_bits(b + 2, g.quants);
     }},
    {7, RL_Q8_FM, 32, 24, [](const uint8_t* b, int, Group& g) {
       g.scale = half_at(b), g.minimum = half_at(b + 2);
       split_nibbles(b + 8, g.quants);
       add_fifth_bits(b + 4, g.quants);
     }},
    {8, RL_Q8_H, 32, 34, [](const uint8_t* b, int, Group& g) {
       g.scale = half_at(b), g.minimum = -128.0f * g.scale;
       for (int i = 0; i < kGroup; i++) g.quants[i] = uint8_t(b[2 + i] ^ 0x80);
     }},
    {12, RL_Q4_K, 256, 144, [](const uint8_t* b, int part, Group& g) { read_k_block(b, part, false, g); }},
    {13, RL_Q8_FM, 256, 176, [](const uint8_t* b, int part, Group& g) { read_k_block(b, part, true, g); }},
    {14, RL_Q6_K, 256, 210, [](const uint8_t* b, int part, Group& g) { read_q6_block(b, part, g); }},
};

const GgufType* find_gguf_type(int number) {
  for (const GgufType& type : kGgufTypes)
    if (type.number == number) return &type;
  return nullptr;
}

bool valid_shape(int n, int k) { return n > 0 && k > 0 && k <= (1 << 24); }

float unpacked(const rl_matrix& m, int row, int column) {
  const uint8_t* panel = m.data + size_t(row / kPanel) * panel_bytes(m.format, m.k);
  const int o = row % kPanel;
  if (m.format == RL_F32) return reinterpret_cast<const float*>(panel)[size_t(column) * kPanel + o];
  if (m.format == RL_BF16)
    return from_bf16(reinterpret_cast<const uint16_t*>(panel)[(size_t(column / 2) * kPanel + o) * 2 + column % 2]);
  if (m.format == RL_F8)
    return from_e4m3(panel[quants_offset(m.format, m.k) + f8_byte(o, column)]) *
           reinterpret_cast<const float*>(panel)[column / kF8Inputs * kPanel + o];
  const bool nibbles = has_nibbles(m.format);
  const uint8_t* quants = panel + quants_offset(m.format, m.k) + size_t(column / kGroup) * group_quant_bytes(m.format);
  const uint8_t byte = quants[quant_byte(nibbles, o, column % kGroup)];
  const int quant = !nibbles ? byte : column / 4 % 2 ? byte >> 4 : byte & 15;
  if (const size_t bytes = super_bytes(m.format)) {
    auto unit = [&](const uint8_t* at) { return from_half(reinterpret_cast<const uint16_t*>(at)[o]); };
    const uint8_t *super = panel + size_t(column / kSuper) * bytes, *minima = super + minima_offset(m.format, m.k);
    if (m.format == RL_Q6_K) {
      const float scale = unit(super) * float(int8_t(super[(2 + column % kSuper / 16) * kPanel + o]));
      return scale * float((quant | (quants[upper_byte(o, column % kGroup)] >> (column / 4 % 4 * 2) & 3) << 4) - 32);
    }
    const int code = (2 + column % kSuper / kGroup) * kPanel + o;
    return std::fma(unit(super) * float(super[code]), float(quant), -unit(minima) * float(minima[code]));
  }
  const int index = m.format == RL_Q8_C ? o : column / kGroup * kPanel + o;
  auto section = [&](const uint8_t* at) {
    return has_float_scales(m.format) || m.format == RL_Q8_C ? reinterpret_cast<const float*>(at)[index]
                                                            : from_half(reinterpret_cast<const uint16_t*>(at)[index]);
  };
  const float scale = section(panel);
  const uint8_t* minima = panel + minima_offset(m.format, m.k);
  const float minimum = has_minima(m.format)  ? section(minima)
                        : has_zeros(m.format) ? -scale * float(minima[index])
                                              : zero_point(m.format) * scale;
  return std::fma(scale, float(quant), minimum);
}

}  // namespace
}  // namespace ridgeline

using namespace ridgeline;

extern "C" int64_t rl_packed_bytes(int32_t format, int32_t n, int32_t k) {
  if (!known_format(format) || !valid_shape(n, k)) {
    fail("no packed form for format " + std::to_string(format) + " and shape [" + std::to_string(n) + ", " +
         std::to_string(k) + "]");
    return -1;
  }
  return int64_t(num_panels(n)) * int64_t(panel_bytes(format, k));
}

extern "C" int rl_pack_float(int32_t format, int32_t n, int32_t k, const float* source, uint8_t* out) {
  const int64_t bytes = rl_packed_bytes(format, n, k);
  if (bytes < 0) return -1;
  std::memset(out, 0, size_t(bytes));
  for (int row = 0; row < n; row++) {
    const float* values = source + size_t(row) * k;
    for (int i = 0; i < k; i++)
      if (!std::isfinite(values[i]))
        return fail("row " + std::to_string(row) + ", column " + std::to_string(i) + " is not finite");
      else if (std::fabs(values[i]) > largest_weight(format))
        return fail("row " + std::to_string(row) + ", column " + std::to_string(i) + ": " + std::to_string(values[i]) +
                    " is too large for format " + std::to_string(format));
    pack_float_row(format, row, k, values, out);
  }
  return 0;
}

extern "C" int rl_pack_gguf(int32_t number, int32_t format, int32_t n, int32_t k, const uint8_t* source,
                            int32_t source_rows, const int32_t* row_map, uint8_t* out) {
  const GgufType* type = find_gguf_type(number);
  if (!type || type->format != format)
    return fail("GGUF type " + std::to_string(number) + " is not packed into format " + std::to_string(format));
  const int64_t bytes = rl_packed_bytes(format, n, k);
  if (bytes < 0) return -1;
  if (k % type->elements)
    return fail("rows of " + std::to_string(k) + " weights are not whole blocks of " + std::to_string(type->elements));
  std::memset(out, 0, size_t(bytes));
  PanelWriter writer(format, k, out);
  const size_t row_bytes = size_t(k / type->elements) * type->bytes;
  const int parts = type->elements / kGroup;
  for (int row = 0; row < n; row++) {
    const int from = row_map ? row_map[row] : row;
    if (from == -1) continue;
    if (from < 0 || from >= source_rows)
      return fail("row " + std::to_string(from) + " of a source of " + std::to_string(source_rows));
    for (int group = 0; group < k / kGroup; group++) {
      const uint8_t* block = source + size_t(from) * row_bytes + size_t(group / parts) * type->bytes;
      Group g;
      type->read(block, group % parts, g);
      if (!std::isfinite(g.scale) || !std::isfinite(g.minimum))
        return fail("row " + std::to_string(from) + ", group " + std::to_string(group) + ": a scale is not finite");
      writer.write(row, group, g);
    }
  }
  return 0;
}

extern "C" int rl_pack_codes(int32_t format, int32_t n, int32_t k, const uint8_t* codes, const float* scales,
                             const uint8_t* zeros, uint8_t* out) {
  if ((format != RL_F8 && format != RL_Q4_Z) || (format == RL_Q4_Z) != (zeros != nullptr))
    return fail("codes are not packed into format " + std::to_string(format) + (zeros ? " with" : " without") + " zero points");
  const int64_t bytes = rl_packed_bytes(format, n, k);
  if (bytes < 0) return -1;
  std::memset(out, 0, size_t(bytes));
  const int wide = format == RL_F8 ? kF8Inputs : kGroup, groups = (k + wide - 1) / wide;
  PanelWriter writer(format, k, out);
  for (int row = 0; row < n; row++)
    for (int group = 0; group < groups; group++) {
      const size_t index = size_t(row) * groups + group;
      const float scale = scales[index];
      auto refuse = [&](const char* what) {
        return fail("row " + std::to_string(row) + ", group " + std::to_string(group) + ": " + what);
      };
      if (!(std::fabs(scale) <= (format == RL_F8 ? 0x1p118f : 65504.0f))) return refuse("a scale is not finite, or too large");
      const int first = group * wide, count = std::min(wide, k - first);
      const uint8_t* from = codes + size_t(row) * k + first;
      if (format == RL_F8) {
        uint8_t* panel = out + size_t(row / kPanel) * panel_bytes(format, k);
        reinterpret_cast<float*>(panel)[group * kPanel + row % kPanel] = scale;
        for (int i = 0; i < count; i++) {
          if ((from[i] & 0x7f) == 0x7f) return refuse("a code is NaN");
          panel[quants_offset(format, k) + f8_byte(row % kPanel, first + i)] = from[i];
        }
      } else {
        if (zeros[index] > 15) return refuse("a zero point above 15");
        Group g{};
        g.scale = scale, g.zero = zeros[index];
        for (int i = 0; i < kGroup; i++) {
          g.quants[i] = i < count ? from[i] : g.zero;
          if (g.quants[i] > 15) return refuse("a code above 15");
        }
        writer.write(row, group, g);
      }
    }
  return 0;
}

extern "C" int rl_unpack(const rl_matrix* matrix, int32_t first, int32_t count, float* out) {
  if (!known_format(matrix->format) || !valid_shape(matrix->n, matrix->k) || !matrix->data)
    return fail("not a packed matrix");
  if (first < 0 || count < 0 || first > matrix->n - count)
    return fail("rows " + std::to_string(first) + " to " + std::to_string(int64_t(first) + count) + " of a matrix of " +
                std::to_string(matrix->n));
  for (int row = 0; row < count; row++)
    for (int column = 0; column < matrix->k; column++)
      out[size_t(row) * matrix->k + column] = unpacked(*matrix, first + row, column);
  return 0;
}
