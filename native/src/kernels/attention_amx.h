// Prefill attention on AMX tiles: 16 query rows times the 16 tokens of a block, for scores and for the sum of the values.
// The blocks of the cache are tiles as they lie in memory. The softmax between the two is the vector kernels'.
#pragma once
#include "amx.h"
#include "attention.h"

namespace {

constexpr int kRowsForAttentionTiles = 8;  // fewer leave most of a tile empty

inline bool amx_attention_pays(const KvHead& kv, int rows) {
  return kv.format == RL_KV_BF16 && kv.head_dim % 32 == 0 && rows >= kRowsForAttentionTiles;
}

// Scores of 16 rows with the chunk's 64 keys. A chunk with fewer blocks computes its first ones again, into columns that
// are not read.
inline void tile_scores(const KvHead& kv, const uint8_t* const (&keys)[kChunkBlocks], AttentionScratch& s, int row) {
  constexpr size_t kQueryStride = sizeof s.queries[0][0], kScoreStride = sizeof s.scores[0];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int dim = 0; dim < kv.head_dim; dim += 32) {
    _tile_loadd(6, s.queries[0][row] + dim * 2, kQueryStride);
    _tile_loadd(7, keys[0] + dim * 32, 64);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, keys[1] + dim * 32, 64);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(7, keys[2] + dim * 32, 64);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(7, keys[3] + dim * 32, 64);
    _tile_dpbf16ps(3, 6, 7);
  }
  _tile_stored(0, &s.scores[row][0], kScoreStride);
  _tile_stored(1, &s.scores[row][16], kScoreStride);
  _tile_stored(2, &s.scores[row][32], kScoreStride);
  _tile_stored(3, &s.scores[row][48], kScoreStride);
}

// out += weights · values, for 16 rows and T · 16 elements of the head, over the chunk's blocks.
template <int T>
inline void tile_values(const KvHead& kv, const uint8_t* const* values, int blocks, AttentionScratch& s, int row, int at) {
  constexpr size_t kOutStride = sizeof s.out[0], kWeightStride = sizeof s.weights[0][0];
  const size_t next = size_t(kv.head_dim) * 4;
  _tile_loadd(0, &s.out[row][at], kOutStride);
  if constexpr (T > 1) _tile_loadd(1, &s.out[row][at + 16], kOutStride);
  if constexpr (T > 2) { _tile_loadd(2, &s.out[row][at + 32], kOutStride); _tile_loadd(3, &s.out[row][at + 48], kOutStride); }
  for (int b = 0; b < blocks; b++) {
    const uint8_t* block = values[b] + size_t(at) * 4;
    _tile_loadd(4, s.weights[0][row] + b * kBlock * 2, kWeightStride);
    _tile_loadd(5, block, next);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (T > 1) { _tile_loadd(5, block + 64, next); _tile_dpbf16ps(1, 4, 5); }
    if constexpr (T > 2) {
      _tile_loadd(5, block + 128, next);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, block + 192, next);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, &s.out[row][at], kOutStride);
  if constexpr (T > 1) _tile_stored(1, &s.out[row][at + 16], kOutStride);
  if constexpr (T > 2) { _tile_stored(2, &s.out[row][at + 32], kOutStride); _tile_stored(3, &s.out[row][at + 48], kOutStride); }
}

inline void correct_row(const KvHead& kv, AttentionScratch& s, int r) {
  if (s.correction[r] == 1.0f) return;
  for (int i = 0; i < kv.head_dim; i += kLanes) store(&s.out[r][i], mul(load(&s.out[r][i]), set(s.correction[r])));
}

// A block of values whose last tokens may hold anything, as a copy with zeros there.
inline const uint8_t* without_the_rest(const uint8_t* block, int tokens, int head_dim, uint8_t* copy) {
  const size_t pair_bytes = size_t(head_dim) * 4;
  std::memcpy(copy, block, size_t(tokens / 2) * pair_bytes);
  std::memset(copy + size_t(tokens / 2) * pair_bytes, 0, size_t(kBlock / 2 - tokens / 2) * pair_bytes);
  if (tokens % 2)
    for (int i = 0; i < head_dim; i++) std::memcpy(copy + size_t(tokens / 2) * pair_bytes + i * 4, block + size_t(tokens / 2) * pair_bytes + i * 4, 2);
  return copy;
}

inline void amx_attend(const KvHead& kv, const AttentionRow* rows, int count, float scale, float cap) {
  static_assert(kAttentionRows % kTile == 0 && kChunkBlocks == 4);
  shape_tiles(TilesFor::Attention);
  AttentionScratch& s = attention_scratch();
  alignas(64) static thread_local uint8_t last_values[kBlock * kMaxHeadDim * 2];
  int first, last;
  begin_rows(kv, rows, count, s, &first, &last, [&](int r) { prepare_query<RL_KV_BF16>(rows[r].query, kv.head_dim, s, r); });
  for (int base = first / kChunk * kChunk; base <= last; base += kChunk) {
    const int valid = std::min(kChunk, last + 1 - base), blocks = blocks_of(valid);
    const uint8_t *keys[kChunkBlocks], *values[kChunkBlocks];
    for (int b = 0; b < kChunkBlocks; b++) {
      const size_t at = size_t(kv.block_table[base / kBlock + (b < blocks ? b : 0)]) * kv.block_bytes;
      keys[b] = kv.keys + at, values[b] = kv.values + at;
    }
    if (valid % kBlock) values[blocks - 1] = without_the_rest(values[blocks - 1], valid % kBlock, kv.head_dim, last_values);
    for (int row = 0; row < count; row += kTile) tile_scores(kv, keys, s, row);
    for (int r = 0; r < count; r++) {
      chunk_softmax<RL_KV_BF16>(kv, nullptr, rows[r], s, r, base, blocks, scale, cap);
      correct_row(kv, s, r);
    }
    for (int row = 0; row < count; row += kTile) {
      int at = 0;
      for (; at + 64 <= kv.head_dim; at += 64) tile_values<4>(kv, values, blocks, s, row, at);
      if (at < kv.head_dim) tile_values<2>(kv, values, blocks, s, row, at);
    }
  }
  end_rows(kv, rows, count, s);
}

}  // namespace
