// Linear layers on AMX tiles: 16 rows times 16 outputs at once, for enough rows to pay for it.
//
// A panel of bf16 weights is made of tiles as it lies in memory; quantized weights are first expanded to such tiles,
// scale and minimum applied, once per panel for all rows. Two panels meet 32 rows in four tiles of sums, so that every
// tile that is loaded is multiplied twice. Weights with one scale per output stay bytes and are
// multiplied with both limbs of the inputs.
#pragma once
#include "amx.h"
#include "linear_f8.h"

namespace {

constexpr int kOwnRows = kTile;
constexpr size_t kInputBlockBytes = 2 << 20;  // large: every block of rows expands the weights again
static_assert(kLinearRows <= kOwnRows);

// Below this many rows the vector kernels are faster: a tile costs the same for one row as for sixteen, and expanding a
// panel costs about as much as multiplying it with sixteen rows.
constexpr int kRowsForExpandedTiles = 48;
constexpr int kRowsForTiles = 6;

inline bool amx_pays(int format, int rows) {
  if (format == RL_F32 || format == RL_Q6_K) return false;
  return rows >= (format == RL_BF16 || format == RL_Q8_C ? kRowsForTiles : kRowsForExpandedTiles);
}

inline size_t bf16_panel_bytes(int k) { return size_t(k) * kPanel * 2; }
inline size_t panel_scratch_bytes(int k) { return std::max(2 * bf16_panel_bytes(k) + 4 * kTile * kPanel * 4, f8_scratch_bytes()); }

inline I bf16_pair(F even, F odd) {
  const I half = set_int(0x8000);  // to nearest; a tie's direction does not matter here
  const I low = _mm512_srli_epi32(add_int(_mm512_castps_si512(even), half), 16);
  const I high = add_int(_mm512_castps_si512(odd), half);
  return _mm512_or_si512(low, _mm512_and_si512(high, set_int(int32_t(0xffff0000))));
}

// Four inputs of 16 outputs (bytes q) become two rows of bf16 pairs.
inline void expand_quad(I quads, F scale, F minimum, uint8_t* out) {
  const I byte = set_int(255);
  const F a = fma(to_float(_mm512_and_si512(quads, byte)), scale, minimum);
  const F b = fma(to_float(_mm512_and_si512(_mm512_srli_epi32(quads, 8), byte)), scale, minimum);
  const F c = fma(to_float(_mm512_and_si512(_mm512_srli_epi32(quads, 16), byte)), scale, minimum);
  const F d = fma(to_float(_mm512_srli_epi32(quads, 24)), scale, minimum);
  _mm512_store_si512(out, bf16_pair(a, b));
  _mm512_store_si512(out + 64, bf16_pair(c, d));
}

// GCC 12 drops the call for Q4_Z where it analyses this function beside its callers (found by test_amx_emulated).
#if defined(__GNUC__) && !defined(__clang__)
#define RL_NOT_ANALYSED __attribute__((noipa))
#else
#define RL_NOT_ANALYSED __attribute__((noinline))
#endif
template <int kFormat>
RL_NOT_ANALYSED void expand_panel(const uint8_t* panel, int k, uint8_t* out) {
  constexpr bool kFourBit = is_four_bit(kFormat);
  const size_t minima = ridgeline::minima_offset(kFormat, k);
  const uint8_t* quants = panel + ridgeline::quants_offset(kFormat, k);
  for (int g = 0; g < k / kGroup; g++) {
    F scale, minimum;
    load_scale<kFormat>(panel, minima, g * kPanel, &scale, &minimum);
    for (int quad = 0; quad < 8; quad++, out += 128) {
      const Bytes w = load_bytes(quants + (kFourBit ? quad / 2 : quad) * kPanel * 4);
      expand_quad(!kFourBit ? w : quad % 2 ? high_nibbles(w) : low_nibbles(w), scale, minimum, out);
    }
    quants += ridgeline::group_quant_bytes(kFormat);
  }
}

// static: RL_NOT_ANALYSED keeps it out of line.
RL_NOT_ANALYSED static void expand_f8_panel(const uint8_t* panel, int k, uint8_t* out) {
  const uint8_t* codes = panel + ridgeline::quants_offset(RL_F8, k);
  for (int i = 0; i < k; i += 2, codes += 2 * kPanel, out += 64) {
    const F scale = mul(load(reinterpret_cast<const float*>(panel) + i / kF8Inputs * kPanel), set(kF8Factor));
    F even[1], odd[1];
    decode_floats(codes, even, odd);
    _mm512_store_si512(out, bf16_pair(mul(even[0], scale), mul(odd[0], scale)));
  }
}

// A panel as bf16 tiles: where it lies, or expanded into `scratch`.
inline const uint8_t* bf16_panel(const rl_matrix& m, int index, int k, uint8_t* scratch) {
  const uint8_t* panel = m.data + size_t(index) * ridgeline::panel_bytes(m.format, m.k);
  switch (m.format) {
    case RL_BF16: return panel;
    case RL_Q4_H: expand_panel<RL_Q4_H>(panel, k, scratch); break;
    case RL_Q4_HM: expand_panel<RL_Q4_HM>(panel, k, scratch); break;
    case RL_Q4_Z: expand_panel<RL_Q4_Z>(panel, k, scratch); break;
    case RL_Q4_K: expand_panel<RL_Q4_K>(panel, k, scratch); break;
    case RL_F8: expand_f8_panel(panel, k, scratch); break;
    case RL_Q8_H: expand_panel<RL_Q8_H>(panel, k, scratch); break;
    default: expand_panel<RL_Q8_FM>(panel, k, scratch); break;
  }
  asm volatile("" ::: "memory");  // _tile_loadd does not say that it reads memory: the stores stay before it
  return scratch;
}

// 16 · T rows of k inputs times P panels, into sums [T][P][16 rows][16 outputs].
template <int T, int P>
void bf16_tiles(const uint8_t* const (&panels)[2], int k, const uint8_t* rows, float* sums) {
  const size_t stride = size_t(k) * 2;
  const uint8_t *left = panels[0], *right = panels[P - 1], *more = rows + (T - 1) * kTile * stride;
  _tile_zero(0);
  if constexpr (P > 1) _tile_zero(1);
  if constexpr (T > 1) _tile_zero(2);
  if constexpr (T > 1 && P > 1) _tile_zero(3);
  for (int i = 0; i < k / kGroup; i++, left += 1024, right += 1024, rows += 64, more += 64) {
    _tile_loadd(6, left, 64);
    _tile_loadd(4, rows, stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (P > 1) {
      _tile_loadd(7, right, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (T > 1) {
      _tile_loadd(5, more, stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (T > 1 && P > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  if constexpr (P > 1) _tile_stored(1, sums + kTile * kPanel, 64);
  if constexpr (T > 1) _tile_stored(2, sums + P * kTile * kPanel, 64);
  if constexpr (T > 1 && P > 1) _tile_stored(3, sums + 3 * kTile * kPanel, 64);
}

// Both limbs of 16 rows of bytes times a panel of bytes. 64 inputs a tile; a last half tile is padded with zeros.
inline void byte_tiles(const uint8_t* weights, int k, const uint8_t* high, const uint8_t* low, int32_t* sums, uint8_t* padded) {
  const size_t stride = size_t(k);
  _tile_zero(0);
  _tile_zero(1);
  for (int i = 0; i + 64 <= k; i += 64, weights += 1024) {
    _tile_loadd(7, weights, 64);
    _tile_loadd(6, high + i, stride);
    _tile_dpbsud(0, 6, 7);
    _tile_loadd(6, low + i, stride);
    _tile_dpbsud(1, 6, 7);
  }
  if (k % 64) {  // inputs beyond the row are the next row's: they meet zero weights
    std::memcpy(padded, weights, 512);
    std::memset(padded + 512, 0, 512);
    asm volatile("" ::: "memory");
    _tile_loadd(7, padded, 64);
    _tile_loadd(6, high + k - 32, stride);
    _tile_dpbsud(0, 6, 7);
    _tile_loadd(6, low + k - 32, stride);
    _tile_dpbsud(1, 6, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTile * kPanel, 64);
}

inline void channel_panel_product(const rl_matrix& m, int index, const Inputs& in, int first_row, int end_row, float* out,
                                  size_t stride, bool add_to, uint8_t* scratch) {
  const uint8_t* panel = m.data + size_t(index) * ridgeline::panel_bytes(m.format, m.k);
  const float* bias = m.bias ? m.bias + index * kPanel : nullptr;
  int32_t* sums = reinterpret_cast<int32_t*>(scratch);
  const F scale = load(reinterpret_cast<const float*>(panel));
  for (int first = first_row; first < end_row; first += kTile) {
    byte_tiles(panel + ridgeline::quants_offset(m.format, in.k), in.k, in.high + size_t(first) * in.k,
               in.low + size_t(first) * in.k, sums, scratch + 2048);
    for (int r = 0; r < std::min(kTile, end_row - first); r++) {
      const F high = to_float(_mm512_loadu_si512(sums + r * kPanel)), low = to_float(_mm512_loadu_si512(sums + (kTile + r) * kPanel));
      F value = mul(fma(high, set(128.0f), low), set(in.scales[first + r]));
      const F acc[1] = {mul(scale, fma(set(in.sums[first + r]), set(-128.0f), value))};
      finish<1>(acc, bias, 0, out + size_t(first + r) * stride, stride, add_to);
    }
  }
}

// P neighbouring panels times rows [first_row, end_row).
template <int P>
void bf16_panel_products(const rl_matrix& m, int panel, const Inputs& in, int first_row, int end_row, float* out, size_t stride,
                         bool add_to, uint8_t* scratch) {
  float* sums = reinterpret_cast<float*>(scratch + 2 * bf16_panel_bytes(in.k));
  const uint8_t* const panels[2] = {bf16_panel(m, panel, in.k, scratch),
                                    P > 1 ? bf16_panel(m, panel + 1, in.k, scratch + bf16_panel_bytes(in.k)) : nullptr};
  const float* bias = m.bias ? m.bias + panel * kPanel : nullptr;
  for (int first = first_row; first < end_row; first += 2 * kTile) {
    const int rows = std::min(2 * kTile, end_row - first);
    (rows > kTile ? bf16_tiles<2, P> : bf16_tiles<1, P>)(panels, in.k, in.high + size_t(first) * in.k * 2, sums);
    for (int r = 0; r < rows; r++)
      for (int p = 0; p < P; p++) {
        const F acc[1] = {load(sums + ((r / kTile * P + p) * kTile + r % kTile) * kPanel)};
        finish<1>(acc, bias, p * kPanel, out + size_t(first + r) * stride, stride, add_to);
      }
  }
}

inline void amx_panel_products(const rl_matrix& m, int panel, int count, const Inputs& in, int first_row, int end_row, float* out,
                               size_t stride, bool add_to, uint8_t* scratch) {
  shape_tiles(TilesFor::Linear);
  if (in.kind == InputKind::Int16Rows) {
    for (int p = 0; p < count; p++)
      channel_panel_product(m, panel + p, in, first_row, end_row, out + p * kPanel, stride, add_to, scratch);
    return;
  }
  int p = 0;
  for (; p + 2 <= count; p += 2)
    bf16_panel_products<2>(m, panel + p, in, first_row, end_row, out + p * kPanel, stride, add_to, scratch);
  if (p < count) bf16_panel_products<1>(m, panel + p, in, first_row, end_row, out + p * kPanel, stride, add_to, scratch);
}

}  // namespace
