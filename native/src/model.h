// A decoder: its table and packed weights (the caller's memory), its KV cache and the buffers of a step.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../include/ridgeline_native.h"
#include "kernels.h"
#include "memory.h"
#include "threads.h"

namespace ridgeline {

// A piece of attention: the query heads of one KV head, for a few neighbouring tokens of one row.
struct AttentionUnit {
  int32_t row, kv_head, first_token, num_tokens;
};

// What the experts of a layer need besides a step's other buffers. An entry is a token and one of its chosen experts; entries
// are ordered by expert, so that those of one expert are rows of a matrix.
struct ExpertBuffers {
  Memory logits;  // of the router, [tokens][stride]; then what the choice is made of, see route.h
  Memory normed;  // inputs of the experts, [tokens][hidden]
  Memory inner;   // gated, [entries][inner_stride]
  Memory outer;   // the experts' outputs, [entries][hidden]
  int logits_stride = 0, inner_stride = 0;
  std::vector<int32_t> chosen;    // [token][place]: an expert
  std::vector<float> shares;      // [token][place]: its weight
  std::vector<int32_t> entry_of;  // [token][place]
  std::vector<int32_t> token_of;  // [entry]
  std::vector<float> share_of;    // [entry]
  std::vector<int32_t> first;     // [expert]: its first entry; one more for the end
  std::vector<int32_t> active;    // experts that a token chose, those with the most tokens first
  std::vector<int64_t> tokens;    // [layer][most experts]: that chose the expert, since the model was made
  size_t most = 0;                // experts of a layer
};

// A reason why the decoder's table cannot be what it is said to be; empty if it can. Nothing is read through it before this.
std::string decoder_flaw(const rl_decoder& decoder);

}  // namespace ridgeline

struct rl_model {
  rl_decoder spec;
  const ridgeline::Kernels* kernels;
  std::unique_ptr<ridgeline::ThreadPool> pool;
  std::vector<rl_layer> layers;
  // Keys and values, [block][layer][keys, values][kv head][…], see KvHead: what belongs to a few tokens lies together, so that
  // a step touches few huge pages. With bytes also their scales, in the same order, 16 for a head.
  ridgeline::Memory cache, cache_scales;
  std::vector<std::vector<float>> biases;  // padded copies

  int padded_dim;    // head_dim, padded to 16
  int qkv_stride, hidden_stride, ffn_stride, attention_stride;
  size_t head_bytes;                 // of one head's keys in one block
  size_t block_bytes, block_scales;  // from one block to the next: bytes, floats

  // Buffers of a step, [tokens][stride].
  ridgeline::Memory residual, qkv, attention, gated, branch;
  ridgeline::ExpertBuffers experts;
  ridgeline::Memory input_high, input_low, input_scales, input_sums;  // prepared inputs of the next linear layer
  std::vector<ridgeline::Memory> scratch;                             // of each thread
  // What lies in it: a panel's working memory, gates and ups of a panel, a normed row, inputs of a single tile.
  size_t panel_scratch, normed_offset, own_inputs_offset;
  int widest;  // of the rows that enter linear layers, padded
  std::vector<ridgeline::AttentionUnit> units;
  std::vector<int32_t> row_of;   // of each token
  std::vector<bool> samples;     // of each token: does it want logits

  int64_t bytes() const;
  ridgeline::KvHead kv_head(int layer, int head, const int32_t* block_table) const;
};
