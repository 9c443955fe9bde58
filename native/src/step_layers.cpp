// A layer of a step, put together from its tags: norms before and after, attention, and a dense FFN or experts.
#include <cstring>

#include "step.h"

namespace ridgeline {
namespace {

void move_row(float* rows, int stride, int from, int to) {
  if (from != to) std::memcpy(rows + size_t(to) * stride, rows + size_t(from) * stride, size_t(stride) * sizeof(float));
}

}  // namespace

void Step::decode_layer(int index, Place& at) {
  const rl_layer& layer = m_.layers[size_t(index)];
  linear(layer.qkv, residual_rows(layer.attn_norm), m_.qkv.floats(), m_.qkv_stride, false, at);
  if (layer.qk_norm == RL_QK_NORM_PROJECTION) norm_projections(layer, at);
  attention(index, at);
  if (is_last(index)) keep_what_samples(at);
  if (!at.rows) return;
  // Side by side, both parts read the layer's input: the FFN has read it before attention's output is added.
  if (layer.parallel) begin_ffn(layer, at);
  project(layer.output, {m_.attention.floats(), m_.attention_stride, spec_.heads * spec_.head_dim, {}}, layer.post_attn_norm, at);
  if (!layer.parallel) begin_ffn(layer, at);
  end_ffn(layer, at);
}

void Step::norm_projections(const rl_layer& layer, Place& at) {
  const int q_rows = spec_.heads * spec_.head_dim, k_rows = spec_.kv_heads * spec_.head_dim;
  each(at.rows, at, [&](int token) {
    float* row = m_.qkv.floats() + size_t(token) * m_.qkv_stride;
    apply_norm({layer.q_norm, nullptr}, row, q_rows, row);
    apply_norm({layer.k_norm, nullptr}, row + q_rows, k_rows, row + q_rows);
  });
}

// After the last layer's attention nothing reads the other rows: they are left behind. Rows move to the front one after
// the other, by one thread: none is overwritten before it was moved.
void Step::keep_what_samples(Place& at) {
  const int rows = step_.num_logits;
  if (rows == at.rows) return;
  each(1, at, [&](int) {
    for (int row = 0; row < rows; row++) {
      move_row(m_.residual.floats(), m_.hidden_stride, step_.logit_rows[row], row);
      move_row(m_.attention.floats(), m_.attention_stride, step_.logit_rows[row], row);
    }
  });
  at.rows = rows;
}
void Step::linear(const rl_matrix& w, const Source& source, float* out, int stride, bool add, Place& at) {
  each_run(num_panels(w.n), w, source, at.rows, at, [&](const Inputs& in, int panel, int count, int first, int end) {
    k_.panel_products(w, panel, count, in, first, end, out + panel * kPanel, size_t(stride), add, scratch(at));
  });
}

// residual += scale · w · source, with a norm in between where the family has one.
void Step::project(const rl_matrix& w, const Source& source, const rl_norm& post_norm, Place& at) {
  if (!post_norm.weight && spec_.residual_scale == 1.0f)
    return linear(w, source, m_.residual.floats(), m_.hidden_stride, true, at);
  linear(w, source, m_.branch.floats(), m_.hidden_stride, false, at);
  each(at.rows, at, [&](int row) { add_branch(row, post_norm); });
}

void Step::add_branch(int row, const rl_norm& post_norm) {
  float* branch = branch_row(row);
  if (post_norm.weight) apply_norm(post_norm, branch, spec_.hidden, branch);
  k_.add_scaled(branch, spec_.residual_scale, spec_.hidden, residual_row(row));
}

// All that reads the FFN's input.
void Step::begin_ffn(const rl_layer& layer, Place& at) {
  const Source source = residual_rows(layer.ffn_norm);
  if (layer.ffn_kind == RL_FFN_EXPERTS) begin_experts(layer, at);
  if (layer.ffn_kind == RL_FFN_PLAIN) return plain_mlp(layer, source, at);
  if (layer.ffn) gated_mlp(layer, source, at);
}

// All that adds its output.
void Step::end_ffn(const rl_layer& layer, Place& at) {
  if (layer.ffn_kind == RL_FFN_EXPERTS) return end_experts(layer, at);
  project(layer.down, {m_.gated.floats(), m_.ffn_stride, layer.ffn, {}}, layer.post_ffn_norm, at);
}

// Panels of gate and up alternate in the packed matrix, so that both halves of an output meet in one place.
void Step::gated_mlp(const rl_layer& layer, const Source& source, Place& at) {
  const rl_matrix& w = layer.gate_up;
  float* both = reinterpret_cast<float*>(scratch(at) + m_.panel_scratch);
  each_run(num_panels(w.n) / 2, w, source, at.rows, at, [&](const Inputs& in, int pair, int count, int first, int end) {
    for (int last = pair + count; pair < last; pair++) {
      k_.panel_products(w, 2 * pair, 2, in, first, end, both, 2 * kPanel, false, scratch(at));
      for (int token = in.tiling.first(first); token < in.tiling.first(end); token++)
        k_.gate(layer.activation, both + token * 2 * kPanel, both + token * 2 * kPanel + kPanel, kPanel,
                m_.gated.floats() + size_t(token) * m_.ffn_stride + pair * kPanel);
    }
  });
}

void Step::plain_mlp(const rl_layer& layer, const Source& source, Place& at) {
  const rl_matrix& w = layer.gate_up;
  each_run(num_panels(w.n), w, source, at.rows, at, [&](const Inputs& in, int panel, int count, int first, int end) {
    float* out = m_.gated.floats() + panel * kPanel;
    k_.panel_products(w, panel, count, in, first, end, out, size_t(m_.ffn_stride), false, scratch(at));
    for (int token = in.tiling.first(first); token < in.tiling.first(end); token++)
      k_.activate(layer.activation, out + size_t(token) * m_.ffn_stride, count * kPanel);
  });
}

}  // namespace ridgeline
