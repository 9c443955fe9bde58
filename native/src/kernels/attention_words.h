// Attention of many rows over bf16 keys and values, on AVX2: in 16-bit integers. A product of pairs and its addition take two
// instructions for 16 products, where floats take two as well, but on two ports instead of all, and two more to take bf16 apart.
//
// A chunk's keys and values become whole numbers within ±4,095, with a scale per token, once for all rows. Queries and the
// softmax's weights become whole numbers with a scale per row. The limits keep sums within 32 bits; inside them they are exact:
//
//   scores  head_dim · 4,095 · query_most(head_dim) < 2^31; for heads of 64 it is 8,191, for heads of 256 2,047
//   values  64 tokens · 4,095 · 8,191 < 2^31
//
// A token's numbers depend on the token alone, so that a row's arithmetic does not depend on the rows computed with it.
#pragma once
#include "attention.h"

namespace {

using ridgeline::kRowsForWords;

constexpr int kWordRows = 6;  // times two vectors of sums; 16 registers
constexpr float kWordMost = 4095.0f, kWeightMost = 8191.0f;

inline float query_most(int head_dim) { return head_dim <= 64 ? 8191.0f : float((1 << 19) / head_dim - 1); }

inline bool words_pay(const KvHead& kv, int rows) { return kv.format == RL_KV_BF16 && rows >= kRowsForWords; }

// Sizes of bf16 values compare like their bits. `bits`: the largest of each token. Stores scales; returns their inverses.
inline F token_scales(I bits, float* scales) {
  const F most = low_bf16(bits);
  store(scales, fma(most, set(1.0f / kWordMost), mul(most, zero())));  // what holds a NaN or an infinity must stay visibly broken
  return zero_up_to(div(set(kWordMost), most), most, set(1e-30f));
}

// Both values of each dword, times `first` and `second`, as words.
RL_INLINE inline I rounded_words(Bytes pairs, F first, F second) {
  const I low = round_int(mul(low_bf16(pairs), first)), high = round_int(mul(high_bf16(pairs), second));
  return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
}

inline I sizes_of(Bytes pairs) { return _mm256_and_si256(pairs, _mm256_set1_epi16(0x7fff)); }

// The keys of a block as they lie, a scale per token.
inline void key_words(const uint8_t* keys, int dwords, uint8_t* out, float* scales) {
  repeat<kHalves>([&](auto half) RL_INLINE {
    I most = zero_int();
    for (int i = 0; i < dwords; i++) most = _mm256_max_epi16(most, sizes_of(load_bytes(keys + i * kBlock * 4 + half * 32)));
    const F inverse = token_scales(_mm256_max_epi16(most, _mm256_srli_epi32(most, 16)), scales + half * kLanes);
    for (int i = 0; i < dwords; i++) {
      const size_t at = size_t(i) * kBlock * 4 + half * 32;
      _mm256_store_si256(reinterpret_cast<I*>(out + at), rounded_words(load_bytes(keys + at), inverse, inverse));
    }
  });
}

// The same of values: pairs of tokens, each side by side for all elements of the head.
inline void value_words(const uint8_t* values, int head_dim, uint8_t* out, float* scales) {
  alignas(32) uint32_t bits[kBlock / 2];
  alignas(32) float inverse[kBlock];
  for (int pair = 0; pair < kBlock / 2; pair++) {
    I most = zero_int();
    for (int i = 0; i < head_dim; i += kLanes) most = _mm256_max_epi16(most, sizes_of(load_bytes(values + (pair * head_dim + i) * 4)));
    __m128i x = _mm_max_epi16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    x = _mm_max_epi16(x, _mm_shuffle_epi32(x, 0x4e));
    bits[pair] = uint32_t(_mm_cvtsi128_si32(_mm_max_epi16(x, _mm_shuffle_epi32(x, 0xb1))));
  }
  for (int i = 0; i < kBlock; i += kLanes) {
    const __m128i some = _mm_load_si128(reinterpret_cast<const __m128i*>(reinterpret_cast<const uint16_t*>(bits) + i));
    store(inverse + i, token_scales(_mm256_cvtepu16_epi32(some), scales + i));
  }
  for (int pair = 0; pair < kBlock / 2; pair++)
    for (int i = 0; i < head_dim; i += kLanes) {
      const size_t at = size_t(pair * head_dim + i) * 4;
      _mm256_store_si256(reinterpret_cast<I*>(out + at),
                         rounded_words(load_bytes(values + at), set(inverse[2 * pair]), set(inverse[2 * pair + 1])));
    }
}

// A row of floats as words.
inline void store_words(const float* x, int n, float inverse, uint8_t* out) {
  for (int i = 0; i < n; i += kLanes) {
    const I whole = round_int(mul(load(x + i), set(inverse)));
    const I packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole, whole), 0x08);
    _mm_store_si128(reinterpret_cast<__m128i*>(out + i * 2), _mm256_castsi256_si128(packed));
  }
}

inline void prepare_word_query(const float* query, int dim, AttentionScratch& s, int row) {
  const float top = query_most(dim), most = largest_size(query, dim);
  const bool finite = is_finite(query, dim);
  const float inverse = finite && most > 1e-30f ? top / most : 0.0f;
  s.query_scale[row] = !finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0.0f ? 0.0f : most / top;
  if (finite) store_words(query, dim, inverse, s.queries[0][row]);
  else std::memset(s.queries[0][row], 0, size_t(dim) * 2);
}

// Pairs of words times pairs of words, added, for R rows and both vectors of 16 columns; `eights` times 8 dwords, `next` bytes
// apart. Sums are numbered [half · R + row].
template <int R>
RL_INLINE inline void word_products(I (&sums)[kHalves * R], const uint8_t* words, size_t next, int eights, const uint8_t* x, size_t x_stride) {
  repeat<kHalves * R>([&](auto i) RL_INLINE { sums[i] = zero_int(); });
  for (; eights > 0; eights--, words += 8 * next, x += 32)
    repeat<8>([&](auto i) RL_INLINE {
      I w[kHalves];
      repeat<kHalves>([&](auto half) RL_INLINE { w[half] = load_bytes(words + i * next + half * 32); });
      repeat<R>([&](auto r) RL_INLINE {
        const I inputs = broadcast(x + r * x_stride + i * 4);
        repeat<kHalves>([&](auto half) RL_INLINE { add_words(sums[half * R + r], w[half], inputs); });
      });
    });
}

template <int R>
void word_scores(const uint8_t* keys, int dwords, AttentionScratch& s, int row, int block) {
  I sums[kHalves * R];
  word_products<R>(sums, keys + size_t(block) * dwords * kBlock * 4, kBlock * 4, dwords / 8, s.queries[0][row], sizeof s.queries[0][0]);
  repeat<kHalves * R>([&](auto i) RL_INLINE {
    constexpr int half = i / R, r = i % R;
    const int at = block * kBlock + half * kLanes;
    store(&s.scores[row + r][at], mul(to_float(sums[i]), mul(set(s.query_scale[row + r]), load(s.key_scales + at))));
  });
}

template <int R>
void word_values(const uint8_t* values, int head_dim, AttentionScratch& s, int row, int blocks, int at) {
  I sums[kHalves * R];
  word_products<R>(sums, values + at * 4, size_t(head_dim) * 4, blocks, s.weights[0][row], sizeof s.weights[0][0]);
  repeat<kHalves * R>([&](auto i) RL_INLINE {
    constexpr int half = i / R, r = i % R;
    float* out = &s.out[row + r][at + half * kLanes];
    store(out, fma(to_float(sums[i]), set(s.weight_scale[row + r]), mul(load(out), set(s.correction[row + r]))));
  });
}

// After exponentiate(): weights times the scales of their tokens' values, as words. A token that a row does not attend to may hold
// anything, and so may its scale.
inline void weight_words(const AttentionRow& row, AttentionScratch& s, int r, int base, int keys) {
  float* weights = s.scores[r];
  const bool masked = row.first > base || row.last < base + keys - 1;
  F most = zero(), broken = zero();
  for (int i = 0; i < keys; i += kLanes) {
    F w = mul(load(weights + i), load(s.value_scales + i));
    if (masked) w = inside(w, base + i, row.first, row.last, 0.0f);
    store(weights + i, w);
    most = max(w, most), broken = fma(w, zero(), broken);
  }
  const float top = largest(most), inverse = top > 1e-30f ? kWeightMost / top : 0.0f;
  s.weight_scale[r] = (inverse == 0.0f ? 0.0f : top / kWeightMost) + sum(broken);
  store_words(weights, keys, inverse, s.weights[0][r]);
}

inline void word_attend(const KvHead& kv, const AttentionRow* rows, int count, float scale, float cap) {
  AttentionScratch& s = attention_scratch();
  const int dim = kv.head_dim, dwords = dim / 2;
  const size_t block_bytes = size_t(dim) * kBlock * 2;
  int first, last;
  begin_rows(kv, rows, count, s, &first, &last, [&](int r) { prepare_word_query(rows[r].query, dim, s, r); });
  auto tiles = [&](const auto& one) {
    for (int row = 0; row < count; row += kWordRows) tile_of<kWordRows>(std::min(count - row, kWordRows), row, one);
  };
  for (int base = first / kChunk * kChunk; base <= last; base += kChunk) {
    const int blocks = blocks_of(std::min(kChunk, last + 1 - base));
    for (int b = 0; b < blocks; b++) {
      const size_t at = size_t(kv.block_table[base / kBlock + b]) * kv.block_bytes;
      key_words(kv.keys + at, dwords, s.key_bytes + b * block_bytes, s.key_scales + b * kBlock);
      value_words(kv.values + at, dim, s.value_bytes + b * block_bytes, s.value_scales + b * kBlock);
    }
    for (int b = 0; b < blocks; b++) tiles([&](auto tile, int row) { word_scores<tile>(s.key_bytes, dwords, s, row, b); });
    for (int r = 0; r < count; r++) {
      exponentiate<RL_KV_F32>(rows[r], s, r, base, blocks, scale, cap);
      weight_words(rows[r], s, r, base, blocks * kBlock);
    }
    for (int at = 0; at < dim; at += kPanel) tiles([&](auto tile, int row) { word_values<tile>(s.value_bytes, dim, s, row, blocks, at); });
  }
  end_rows(kv, rows, count, s);
}

}  // namespace
