// One step: what its parts share. Every thread runs the same text, phase by phase; inside a phase they take pieces of work
// (rows, panels, attention units) from a shared counter. What a thread reads outside of a piece it holds may be overwritten by
// others that are phases ahead: the number of a phase's pieces follows from the step and the model alone.
#pragma once
#include <algorithm>
#include <vector>

#include "model.h"

namespace ridgeline {

// Panels 0 … count - 1 in runs of neighbours, each as long as half of what is left for every thread: the first ones long,
// so that weights stream from memory; the last ones short, so that the threads end together even if one lost its CPU.
struct Runs {
  static constexpr int kMost = 4096;
  int count = 0, begin[kMost + 1];

  // longest: of a run, where some panels cost more than others.
  Runs(int panels, int threads, int longest = 1 << 30) {
    begin[0] = 0;
    for (int at = 0; at < panels; count++) {
      const int left = panels - at;
      at += count == kMost - 1 ? left : std::min(longest, (left + 2 * threads - 1) / (2 * threads));
      begin[count + 1] = at;
    }
  }
};

class Step {
 public:
  Step(rl_model& model, const rl_step& step, float* logits, int32_t* best);
  void run();

 private:
  // Where a thread is: which one, how many shared phases it has passed, and how many rows there still are.
  struct Place {
    int thread;
    size_t phase;
    int rows;
  };
  // Rows of floats, `stride` apart; normed on the way where `norm` has a weight.
  struct Source {
    const float* rows;
    int stride, width;
    rl_norm norm;
  };

  // ---- step.cpp: before and after the layers ----

  void embed(Place& at);
  void predict(Place& at);
  void predict_panel(const Inputs& in, int panel, int first, int end, const Place& at);
  void merge_bests();
  Best* bests_of(int thread) { return bests_.data() + size_t(thread) * size_t(step_.num_logits); }

  // ---- step_layers.cpp: a layer, of any kind; each part is one phase or several ----

  void decode_layer(int index, Place& at);
  void norm_projections(const rl_layer& layer, Place& at);
  void keep_what_samples(Place& at);
  void linear(const rl_matrix& w, const Source& source, float* out, int stride, bool add, Place& at);
  void project(const rl_matrix& w, const Source& source, const rl_norm& post_norm, Place& at);
  void add_branch(int row, const rl_norm& post_norm);
  void begin_ffn(const rl_layer& layer, Place& at);
  void end_ffn(const rl_layer& layer, Place& at);
  void gated_mlp(const rl_layer& layer, const Source& source, Place& at);
  void plain_mlp(const rl_layer& layer, const Source& source, Place& at);

  // ---- step_experts.cpp ----

  void begin_experts(const rl_layer& layer, Place& at);
  void end_experts(const rl_layer& layer, Place& at);
  void choose_experts(const rl_layer& layer, int row);
  void order_by_expert(const rl_layer& layer, int rows);
  template <typename Fill, typename Work>
  void each_expert_run(const rl_experts& e, const rl_matrix& w, int units, Place& at, const Fill& fill, const Work& work);

  // ---- step_attention.cpp ----

  void plan_attention();
  void attention(int layer, Place& at);
  void rotate_and_store(int index, int token, int head);
  void turn(const rl_layer& layer, float* head, const float* norm, int position);
  void attend(int layer, const AttentionUnit& unit);

  // ---- inputs of linear layers ----

  Source residual_rows(const rl_norm& norm) const { return {m_.residual.floats(), m_.hidden_stride, spec_.hidden, norm}; }

  // The form of `count` rows for these weights, in the memory that all threads share.
  Inputs shared_inputs(const rl_matrix& w, int count) const {
    return shared_inputs(w, count, k_.input_kind(w.format, count, deterministic_));
  }
  Inputs shared_inputs(const rl_matrix& w, int count, InputKind kind) const {
    return {kind, Tiling(count, k_.tile_rows), padded_k(w.k), m_.input_high.data(), m_.input_low.data(),
            m_.input_scales.floats(), m_.input_sums.floats(), multiplied_offset(kind, w.format),
            sums_per_group(kind, w.format)};
  }

  // The same in this thread's own memory, for a single tile.
  void use_own_memory(Inputs& in, const Place& at) {
    const size_t values = size_t(m_.widest) * k_.own_rows;
    in.high = scratch(at) + m_.own_inputs_offset;
    in.low = in.high + values * 4;
    in.scales = reinterpret_cast<float*>(in.low + values);
    in.sums = in.scales + values / kGroup;
  }

  void prepare_tile(const Source& source, const Inputs& in, int tile, const Place& at) {
    float* normed = reinterpret_cast<float*>(scratch(at) + m_.normed_offset);
    for (int row = in.tiling.first(tile); row < in.tiling.first(tile + 1); row++) {
      const float* x = source.rows + size_t(row) * source.stride;
      if (source.norm.weight) {
        apply_norm(source.norm, x, source.width, normed);
        x = normed;
      }
      k_.prepare_row(x, source.width, in, row);
    }
  }

  // ---- sharing the work ----

  template <typename Work>
  void each(int count, Place& at, const Work& work) {
    phases_[at.phase++].share(count, [] {}, work);
  }

  // The panels of a linear layer, in runs of neighbours: weights stream from memory, and a run reads them in one go. Many
  // rows are taken in blocks that stay in cache while the run's panels pass over them.
  // work(inputs, first panel, panels, first tile, end tile)
  template <typename Work>
  void each_run(int count, const rl_matrix& w, const Source& source, int rows, Place& at, const Work& work) {
    Inputs in = shared_inputs(w, rows);
    // Rows of a tile are interleaved, so that one thread must write them all; and for a single tile it is cheaper that
    // every thread makes its own than to wait for the one.
    const bool own = in.tiling.count == 1;
    if (own)
      use_own_memory(in, at);
    else
      each(in.tiling.count, at, [&](int tile) { prepare_tile(source, in, tile, at); });
    const Runs runs(count, m_.pool->size());
    const int block = tiles_per_block(in);
    auto prepare_own = [&] {
      if (own) prepare_tile(source, in, 0, at);
    };
    phases_[at.phase++].share(runs.count, prepare_own, [&](int run) {
      for (int tile = 0; tile < in.tiling.count; tile += block)
        work(in, runs.begin[run], runs.begin[run + 1] - runs.begin[run], tile, std::min(tile + block, in.tiling.count));
    });
  }

  // Many rows are taken in blocks of this many tiles, which stay in cache while panels pass over them.
  int tiles_per_block(const Inputs& in) const {
    const size_t row_bytes = size_t(in.k) * size_t(bytes_per_input(in.kind));
    const bool expands = in.kind == InputKind::Int8Expanded || in.kind == InputKind::Int8Coded;  // each panel, once for a block
    const int least = expands ? kRowsForExpanding / k_.tile_rows : 1;
    return std::max(least, int(k_.input_block_bytes / (row_bytes * size_t(k_.tile_rows))));
  }

  void apply_norm(const rl_norm& norm, const float* x, int n, float* out) const {
    if (spec_.norm_kind == RL_RMS_NORM) k_.rms_norm(x, norm.weight, spec_.norm_eps, n, out);
    else k_.layer_norm(x, norm.weight, norm.bias, spec_.norm_eps, n, out);
  }

  bool is_last(int layer) const { return layer + 1 == spec_.num_layers; }
  const int32_t* block_table(int token) const {
    return step_.block_tables + size_t(m_.row_of[size_t(token)]) * step_.table_width;
  }
  uint8_t* scratch(const Place& at) { return m_.scratch[size_t(at.thread)].data(); }
  float* residual_row(int row) const { return m_.residual.floats() + size_t(row) * m_.hidden_stride; }
  float* branch_row(int row) const { return m_.branch.floats() + size_t(row) * m_.hidden_stride; }

  rl_model& m_;
  const rl_decoder& spec_;
  const Kernels& k_;
  const rl_step& step_;
  float* logits_;
  int32_t* best_;
  std::vector<Best> bests_;  // [thread][row of logits], if wanted
  const bool deterministic_;  // the model, or this step alone
  const bool decodes_only_;
  std::vector<Phase> phases_;
};

}  // namespace ridgeline
