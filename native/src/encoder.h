// An encoder: its table and packed weights (the caller's memory), and the buffers of a call.
#pragma once
#include <memory>
#include <vector>

#include "../include/ridgeline_native.h"
#include "kernels.h"
#include "memory.h"
#include "threads.h"

namespace ridgeline {

// Of a text's attention: one head, for some of its queries.
struct TextUnit {
  int32_t text, head, first, end;
};

}  // namespace ridgeline

struct rl_encoder_model {
  rl_encoder spec;
  const ridgeline::Kernels* kernels;
  std::unique_ptr<ridgeline::ThreadPool> pool;
  std::vector<rl_encoder_layer> layers;
  std::vector<std::vector<float>> padded;  // biases and norms up to whole panels, which is how kernels read them

  int head_dim;
  int hidden_stride, qkv_stride, ffn_stride;
  ridgeline::Memory residual, qkv, context, ffn;  // [tokens][stride]
  bool rounded;                                   // to bfloat16: inputs of matrices, and attention
  ridgeline::InputKind input_kind;                // if rounded; for any number of tokens the same: a text's bits are its own
  ridgeline::Memory inputs;                       // if rounded
  std::vector<ridgeline::Memory> scratch;         // of each thread
  std::vector<ridgeline::TextUnit> units;

  int64_t bytes() const;
};
