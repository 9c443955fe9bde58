// Products of signed bytes for vector search: rows in panels of 16, [dword of the row][row][4 bytes], each byte biased by 128.
// The sums are exact 32-bit integers on every instruction set: bytes are within ±127.
#pragma once
#include <algorithm>
#include <limits>

#include "../formats.h"
#include "../scan.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int kScanQueries = 10;  // computed together, times two vectors of rows
#else
constexpr int kScanQueries = 4;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// maddubs adds two products in 16 bits: sizes and moved signs keep them within 2 · 127².
struct ScanBytes {
  I sizes, signs;
};
constexpr int kScanBias = 0;
inline ScanBytes load_scan(const uint8_t* p) {
  const I row = _mm256_xor_si256(load_bytes(p), _mm256_set1_epi8(int8_t(0x80)));
  return {_mm256_abs_epi8(row), row};
}
inline I scan_dot(I acc, const ScanBytes& row, const uint8_t* query) {
  const I moved = _mm256_sign_epi8(_mm256_set1_epi32(load_dword(query)), row.signs);
  return add_int(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(row.sizes, moved), _mm256_set1_epi16(1)));
}
#elif defined(RL_NEON)
using ScanBytes = int8x16_t;
constexpr int kScanBias = 0;
inline ScanBytes load_scan(const uint8_t* p) { return vreinterpretq_s8_u8(veorq_u8(load_bytes(p), vdupq_n_u8(0x80))); }
inline I scan_dot(I acc, const ScanBytes& row, const uint8_t* query) { return dot_signed(acc, row, quad_in_all(query)); }
#else
using ScanBytes = Bytes;
constexpr int kScanBias = 128;
inline ScanBytes load_scan(const uint8_t* p) { return load_bytes(p); }
inline I scan_dot(I acc, const ScanBytes& row, const uint8_t* query) { return dot(acc, row, query); }
#endif

inline void store_ints(int32_t* p, I a) { std::memcpy(p, &a, sizeof a); }

// Two vectors of rows, `next` bytes apart, times kQueries queries. The first queries of a pass fetch the next two vectors:
// the memory is read while the others are computed.
template <int kQueries, bool kFetch>
inline void scan_block(const uint8_t* rows, size_t next, const ridgeline::ScanQueries& q, int first, int32_t* out, size_t stride,
                       size_t out_next) {
  I sums[2][kQueries];
  const uint8_t* queries[kQueries];
  repeat<kQueries>([&](auto i) RL_INLINE {
    queries[i] = reinterpret_cast<const uint8_t*>(q.bytes) + size_t(first + i) * size_t(q.dwords) * 4;
    sums[0][i] = sums[1][i] = set_int(-kScanBias * q.sums[first + i]);
  });
  for (int d = 0; d < q.dwords; d++) {
    const ScanBytes a = load_scan(rows + size_t(d) * 64), b = load_scan(rows + next + size_t(d) * 64);
    if constexpr (kFetch) {
      prefetch(rows + 2 * next + size_t(d) * 64);
      prefetch(rows + 3 * next + size_t(d) * 64);
    }
    repeat<kQueries>([&](auto i) RL_INLINE {
      sums[0][i] = scan_dot(sums[0][i], a, queries[i] + size_t(d) * 4);
      sums[1][i] = scan_dot(sums[1][i], b, queries[i] + size_t(d) * 4);
    });
  }
  repeat<kQueries>([&](auto i) RL_INLINE {
    store_ints(out + size_t(first + i) * stride, sums[0][i]);
    store_ints(out + size_t(first + i) * stride + out_next, sums[1][i]);
  });
}

template <int kQueries>
inline void scan_blocks(int left, const uint8_t* rows, size_t next, const ridgeline::ScanQueries& q, int first, int32_t* out,
                        size_t stride, size_t out_next) {
  if (left == kQueries) {
    if (kHalves == 1 && first == 0) return scan_block<kQueries, kHalves == 1>(rows, next, q, first, out, stride, out_next);
    return scan_block<kQueries, false>(rows, next, q, first, out, stride, out_next);
  }
  if constexpr (kQueries > 1) scan_blocks<kQueries - 1>(left, rows, next, q, first, out, stride, out_next);
}

inline void scan_products(const uint8_t* panels, int count, const ridgeline::ScanQueries& q, int32_t* out, size_t stride) {
  const size_t panel_bytes = size_t(q.dwords) * 64;
  constexpr int kStep = kHalves == 1 ? 2 : 1;  // panels of a pair of vectors
  for (int panel = 0; panel < count; panel += kStep) {
    for (int half = 0; half < kHalves; half += 2) {
      const uint8_t* rows = panels + size_t(panel) * panel_bytes + size_t(half) * kLanes * 4;
      const size_t next = kHalves == 1 ? panel_bytes : size_t(kLanes) * 4;
      int32_t* to = out + panel * ridgeline::kPanel + half * kLanes;
      for (int first = 0; first < q.count; first += kScanQueries)
        scan_blocks<kScanQueries>(std::min(kScanQueries, q.count - first), rows, next, q, first, to, stride, size_t(kLanes));
    }
  }
}

// Which lanes of `bound` are at least `limit`, as bits.
inline uint32_t at_least(F bound, F limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(bound, limit, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(bound, limit, _CMP_GE_OQ)));
#else
  const I there = bound >= limit;
  return uint32_t((there[0] & 1) | (there[1] & 2) | (there[2] & 4) | (there[3] & 8));
#endif
}

inline int scan_select(const int32_t* products, const ridgeline::ScanPart& part, const ridgeline::ScanBound& by, float limit,
                       ridgeline::Candidate* out) {
  const F factor = set(by.factor), length = set(by.length), slack = set(by.slack), least = set(limit);
  int count = 0;
  for (int i = 0; i < part.rows; i += kLanes) {
    I product;
    std::memcpy(&product, products + i, sizeof product);
    const F bound = fma(mul(to_float(product), factor), load(part.scales + i), fma(length, load(part.residuals + i), slack));
    uint32_t kept = at_least(bound, least) & (uint32_t(part.mask[i / ridgeline::kPanel]) >> i % ridgeline::kPanel);
    if (!kept) continue;
    float bounds[kLanes];
    store(bounds, bound);
    for (; kept; kept &= kept - 1) {
      const int lane = __builtin_ctz(kept);
      out[count++] = {bounds[lane], part.first + i + lane};
    }
  }
  return count;
}

}  // namespace
