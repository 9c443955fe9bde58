// The kernels of one instruction set, behind function pointers. kernels_isa.cpp is compiled once for each set.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "formats.h"

namespace ridgeline {

// The form a linear layer wants its inputs in.
enum class InputKind : int32_t {
  Float,        // float, for float weights
  Bf16,         // bf16 pairs, for bf16 weights
  Int8,         // signed bytes and a scale per group of 32
  Int8Expanded, // the same, for 4-bit weights that are first expanded to bytes with one scale per output
  Int8Coded,    // the same, for 4- and 6-bit weights whose scales are first turned into integers (AVX2)
  Int8Words,    // the same as 16-bit integers, for 8-bit weights (AVX2)
  Int16,        // 15 bits in two signed bytes ("limbs", 128 · high + low) and a scale per group of 32
  Int16PerRow,  // the same with one scale for the row, for weights with one scale per output
  Bf16Rows,     // bf16, row after row, for AMX tiles
  Int16Rows,    // two limbs and one scale for the row, row after row, for AMX tiles
};
constexpr bool has_row_scale(InputKind kind) { return kind == InputKind::Int16PerRow || kind == InputKind::Int16Rows; }
// The offset of weights as they are multiplied with such inputs; see Inputs.
constexpr int32_t multiplied_offset(InputKind kind, int format) {
  return kind == InputKind::Int8Expanded ? -128 : group_offset(format);
}
// Q6_K has a scale per 16 weights, so that its kernels need the sums of both halves of a group.
constexpr int sums_per_group(InputKind kind, int format) { return format == RL_Q6_K && kind != InputKind::Int8Expanded ? 2 : 1; }
constexpr bool has_two_limbs(InputKind kind) { return kind == InputKind::Int16 || has_row_scale(kind); }

constexpr int kRowsForExpanding = 96;  // to bytes; fewer rows do not pay for it

// Of an input in Inputs::high.
constexpr int high_bytes(InputKind kind) {
  const bool two = kind == InputKind::Bf16 || kind == InputKind::Bf16Rows || kind == InputKind::Int8Words;
  return kind == InputKind::Float ? 4 : two ? 2 : 1;
}
constexpr int bytes_per_input(InputKind kind) { return high_bytes(kind) + has_two_limbs(kind); }

// How the rows of a step are cut into tiles for the linear kernels: as even as possible, none above `most`.
struct Tiling {
  int rows, count, least, longer;  // the first `longer` tiles have one row more than `least`

  Tiling(int rows_, int most)
      : rows(rows_), count((rows_ + most - 1) / most), least(count ? rows_ / count : 0), longer(count ? rows_ % count : 0) {}
  int first(int tile) const { return tile * least + std::min(tile, longer); }
  int size(int tile) const { return least + (tile < longer); }
  int tile_of(int row) const {
    const int boundary = longer * (least + 1);
    return row < boundary ? row / (least + 1) : longer + (row - boundary) / least;
  }
};

// Inputs of a linear layer. All but the …Rows kinds are made of dwords (a float, two bf16, four bytes), interleaved by tile:
// [tile][dword of the row][row of the tile], so that a kernel finds the same inputs of its rows side by side.
struct Inputs {
  InputKind kind;
  Tiling tiling;
  int k;           // padded
  uint8_t* high;   // the values, or their high limbs
  uint8_t* low;    // low limbs
  float* scales;   // [tile][group][row of the tile]
  float* sums;     // [tile][group][part][row]: sum of the part's inputs; with an offset: of their integers, times it.
                   // Int8Coded with an offset, and Int8 for six bits on AVX2: two 16-bit sums, of the first and the second two inputs of all quads
  int32_t offset;  // weights are scale · (q + offset) as they are multiplied; 0: they have separate minima
  int parts;       // of a group, with a sum each: 1 or 2
};

// What the attention of one KV head of one sequence reads. Blocks hold 16 tokens:
//   F32   keys [head_dim][16], values [16][head_dim]
//   BF16  keys [head_dim / 2][16][2], values [8][head_dim][2]
//   INT8  keys [head_dim / 4][16][4], values [4][head_dim][4], offset by 128; a scale per token: [16] floats
//   INT4  two elements a byte, both of one token: of 8 neighbours of a key the first 4 in the low halves, of 16 of a value
//         the first 8. keys [head_dim / 8][16][4], values [4][head_dim / 16][8][4]; per token a minimum (low half) and a
//         scale (high half) in bfloat16: [16] words
// head_dim is padded to a multiple of 16.
struct KvHead {
  int format, head_dim;
  const uint8_t *keys, *values;                  // of this head in block 0
  const float *key_scales, *value_scales;        // INT8, INT4
  size_t block_bytes, scale_stride;              // from one block to the next: bytes, floats
  const int32_t* block_table;
};

// Bytes of the keys, or of the values, of one head in one block.
constexpr size_t kv_bytes(int format, int head_dim) {
  const size_t bits = format == RL_KV_F32 ? 32 : format == RL_KV_BF16 ? 16 : format == RL_KV_INT8 ? 8 : 4;
  return size_t(head_dim) * kBlock * bits / 8;
}

struct AttentionRow {
  const float* query;
  float* out;
  int32_t first, last;  // attends to positions first … last
  float sink = -std::numeric_limits<float>::infinity();  // a score without a value; -infinity: none
};
constexpr int kRowsForWords = 24;   // bf16 attention in 16-bit integers (AVX2); 10 would pay for rounding keys and values
constexpr int kAttentionRows = 48;  // rows one call computes, at most: query heads of one KV head for a few tokens

// The first largest of a row of logits, as far as it was looked at. An index of -1: nothing above -infinity yet or, with a
// value of infinity, which nothing exceeds, a row that is broken.
struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int32_t index = -1;
};

// What a dense layer does with a sum, bias included, before it is stored.
enum class Follow : int32_t { Nothing, Add, GeluErf, GeluTanh, Relu };

// out[row][column] = follow(scale · Σ x[row][i] · weights[i][column] + bias[column]), for whole vectors of columns. The weights
// of 16 neighbouring columns lie side by side, `weight_step` floats from one i to the next; `panel_floats` lead to the next 16.
struct DenseTask {
  const float* x;
  size_t x_stride;
  int rows, k, columns;
  const float* weights;
  size_t weight_step, panel_floats;
  const float* bias;      // or null
  const float* residual;  // Follow::Add: laid out as `out`, which it may be
  float scale;
  Follow follow;
  float* out;  // rows have room for `columns` rounded up to 16
  size_t out_stride;
};

// The attention of one head of one text, everything to everything: queries, keys and values as rows of one buffer.
struct TextAttention {
  const float *queries, *keys, *values;
  size_t stride;  // from one token to the next
  int tokens, head_dim;
  int first, end;  // the queries to compute
  float scale;
  float* out;
  size_t out_stride;
};

struct Kernels {
  const char* name;
  int tile_rows;  // the most rows of a tile
  int own_rows;   // rows a kernel may read of a single tile's inputs: more than there are, where it reads whole AMX tiles
  InputKind (*input_kind)(int format, int rows, bool deterministic);
  // Converts one row of k floats; fills the padding up to inputs.k with zeros.
  void (*prepare_row)(const float* x, int k, const Inputs& inputs, int row);
  // out[row · stride + 0 … 16 · count - 1] = (add: +=) inputs times `count` neighbouring panels, with their biases, for the
  // rows of tiles [first, end).
  void (*panel_products)(const rl_matrix&, int panel, int count, const Inputs&, int first, int end, float* out, size_t stride,
                         bool add, uint8_t* scratch);
  size_t input_block_bytes;  // inputs that stay in the second-level cache while panel after panel passes over them
  size_t (*panel_scratch_bytes)(int k);

  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);  // bias: or null
  void (*add_scaled)(const float* x, float scale, int n, float* out);  // out += scale · x
  void (*gate)(int activation, const float* gate, const float* up, int n, float* out);  // n: a multiple of 16
  // min(g, limit) · sigmoid(1.702 · min(g, limit)) · (up within ±limit + 1); n: a multiple of 16
  void (*gate_clamped)(float limit, const float* gate, const float* up, int n, float* out);
  void (*activate)(int activation, float* x, int n);  // n: a multiple of 16
  void (*rope)(float* head, const float* cosine, const float* sine, int rotary_dim);
  void (*softcap)(float* x, int n, float cap);
  // Takes a panel of some rows' logits, number `first` and up, into each row's best. All 16 are read, n of them count.
  void (*keep_best)(const float* x, size_t stride, int rows, int n, int first, Best* best);

  // value (head_dim floats, padded with zeros) into its slot of a block of this head; see KvHead.
  void (*store_key)(const KvHead&, int block, int slot, const float* value);
  void (*store_value)(const KvHead&, int block, int slot, const float* value);
  // Online softmax over the blocks that any of the rows (at most kAttentionRows) attends to. Deterministic: a row's result
  // does not depend on how many it is computed with.
  void (*attend)(const KvHead&, const AttentionRow* rows, int count, float scale, float softcap, bool deterministic);
  int attention_tokens;  // steps of fewer tokens attend as deterministic ones do

  // ---- encoders ----
  int dense_rows;  // rows of a dense layer that are computed together: work is best cut at multiples of it
  void (*dense)(const DenseTask&);
  size_t (*text_scratch_floats)(int tokens, int head_dim);
  void (*attend_text)(const TextAttention&, float* scratch);
  size_t (*text_bf16_scratch_floats)(int tokens, int head_dim);
  void (*attend_text_bf16)(const TextAttention&, float* scratch);

  double (*peak_operations)(int kind, int64_t rounds);  // operations done in `rounds` rounds of registers only; 0: none
  void (*start_thread)();                               // once on each thread, before the first kernel
};

const Kernels* portable_kernels();
const Kernels* neon_kernels();
const Kernels* dotprod_kernels();
const Kernels* i8mm_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* amx_kernels();

}  // namespace ridgeline
