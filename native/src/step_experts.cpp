// Experts of a step: the router's choice, then each chosen expert's weights read once for all tokens that chose it.
//
// Entries (a token and one of its experts) are ordered by expert. A token's sum runs over its experts in the order in
// which it chose them, and the form of an expert's inputs follows from the number of the step's rows: so a token's result does not depend
// on which experts the other tokens chose.
#include <cmath>
#include <cstring>
#include <numeric>

#include "route.h"
#include "step.h"

namespace ridgeline {

void Step::begin_experts(const rl_layer& layer, Place& at) {
  const rl_experts& e = layer.experts;
  ExpertBuffers& x = m_.experts;
  linear(e.router, residual_rows(layer.ffn_norm), x.logits.floats(), x.logits_stride, false, at);
  each(at.rows, at, [&](int row) { choose_experts(layer, row); });
  each(1, at, [&](int) { order_by_expert(layer, at.rows); });

  float* row_memory = reinterpret_cast<float*>(scratch(at) + m_.normed_offset);
  auto token_row = [&](int entry) -> const float* {
    const float* row = x.normed.floats() + size_t(x.token_of[size_t(entry)]) * m_.hidden_stride;
    if (!e.scales_input) return row;
    const float share = x.share_of[size_t(entry)];
    for (int i = 0; i < spec_.hidden; i++) row_memory[i] = row[i] * share;
    return row_memory;
  };
  const int pairs = num_panels(e.size);
  float* both = reinterpret_cast<float*>(scratch(at) + m_.panel_scratch);
  each_expert_run(e, e.gate_up, pairs, at, token_row, [&](const Inputs& in, int expert, int pair, int count, int first, int end) {
    float* inner = x.inner.floats() + size_t(x.first[size_t(expert)]) * x.inner_stride;
    for (int last = pair + count; pair < last; pair++) {
      k_.panel_products(e.gate_up, 2 * (expert * pairs + pair), 2, in, first, end, both, 2 * kPanel, false, scratch(at));
      for (int row = in.tiling.first(first); row < in.tiling.first(end); row++) {
        const float* gate = both + row * 2 * kPanel;
        float* out = inner + size_t(row) * x.inner_stride + pair * kPanel;
        if (e.clamp > 0) k_.gate_clamped(e.clamp, gate, gate + kPanel, kPanel, out);
        else k_.gate(layer.activation, gate, gate + kPanel, kPanel, out);
      }
    }
  });

  auto inner_row = [&](int entry) -> const float* { return x.inner.floats() + size_t(entry) * x.inner_stride; };
  const int panels = num_panels(spec_.hidden);
  each_expert_run(e, e.down, panels, at, inner_row, [&](const Inputs& in, int expert, int panel, int count, int first, int end) {
    float* out = x.outer.floats() + size_t(x.first[size_t(expert)]) * m_.hidden_stride + panel * kPanel;
    k_.panel_products(e.down, expert * panels + panel, count, in, first, end, out, size_t(m_.hidden_stride), false, scratch(at));
  });
}

// The part that all tokens use, then each token's experts.
void Step::end_experts(const rl_layer& layer, Place& at) {
  const rl_experts& e = layer.experts;
  ExpertBuffers& x = m_.experts;
  if (layer.ffn)
    linear(layer.down, {m_.gated.floats(), m_.ffn_stride, layer.ffn, {}}, m_.branch.floats(), m_.hidden_stride, false, at);
  each(at.rows, at, [&](int row) {
    float* sum = branch_row(row);
    if (!layer.ffn) std::memset(sum, 0, size_t(spec_.hidden) * sizeof(float));
    if (e.shared_gate) {
      const float share = 1.0f / (1.0f + std::exp(-x.logits.floats()[size_t(row) * x.logits_stride + e.num]));
      for (int i = 0; i < spec_.hidden; i++) sum[i] *= share;
    }
    for (int place = row * e.per_token; place < (row + 1) * e.per_token; place++)
      k_.add_scaled(x.outer.floats() + size_t(x.entry_of[size_t(place)]) * m_.hidden_stride,
                    e.scales_input ? 1.0f : x.shares[size_t(place)], spec_.hidden, sum);
    add_branch(row, layer.post_ffn_norm);
  });
}

void Step::choose_experts(const rl_layer& layer, int row) {
  ExpertBuffers& x = m_.experts;
  float* normed = x.normed.floats() + size_t(row) * m_.hidden_stride;
  if (layer.ffn_norm.weight) apply_norm(layer.ffn_norm, residual_row(row), spec_.hidden, normed);
  else std::memcpy(normed, residual_row(row), size_t(spec_.hidden) * sizeof(float));
  const size_t first = size_t(row) * size_t(layer.experts.per_token);
  route(layer.experts, x.logits.floats() + size_t(row) * x.logits_stride, &x.chosen[first], &x.shares[first]);
}

void Step::order_by_expert(const rl_layer& layer, int rows) {
  const rl_experts& e = layer.experts;
  ExpertBuffers& x = m_.experts;
  const int entries = rows * e.per_token;
  std::fill_n(x.first.begin(), e.num + 1, 0);
  for (int i = 0; i < entries; i++) x.first[size_t(x.chosen[size_t(i)]) + 1]++;
  x.active.clear();
  int64_t* tokens = &x.tokens[size_t(&layer - spec_.layers) * x.most];
  for (int expert = 0; expert < e.num; expert++)
    if (const int chosen = x.first[size_t(expert) + 1]) x.active.push_back(expert), tokens[expert] += chosen;
  std::stable_sort(x.active.begin(), x.active.end(), [&](int a, int b) { return x.first[size_t(a) + 1] > x.first[size_t(b) + 1]; });
  std::partial_sum(x.first.begin(), x.first.begin() + e.num + 1, x.first.begin());
  for (int i = 0; i < entries; i++) {  // `first` moves on to each expert's end, and back below
    const int entry = x.first[size_t(x.chosen[size_t(i)])]++;
    x.entry_of[size_t(i)] = entry, x.token_of[size_t(entry)] = i / e.per_token, x.share_of[size_t(entry)] = x.shares[size_t(i)];
  }
  for (int expert = e.num; expert > 0; expert--) x.first[size_t(expert)] = x.first[size_t(expert) - 1];
  x.first[0] = 0;
}

// The `units` (panels, or pairs of them) of every chosen expert, in runs of neighbours. fill(entry): the row that enters.
// work(inputs, expert, first unit, units, first tile, end tile)
template <typename Fill, typename Work>
void Step::each_expert_run(const rl_experts& e, const rl_matrix& w, int units, Place& at, const Fill& fill, const Work& work) {
  const ExpertBuffers& x = m_.experts;
  const int most = std::min(e.num, at.rows * e.per_token);  // of experts that may be chosen
  const int expected = at.rows == 1 ? 1 : std::max(2, at.rows * e.per_token / e.num);
  const InputKind kind = k_.input_kind(w.format, expected, deterministic_);
  auto inputs_of = [&](int expert) {
    const size_t first = size_t(x.first[size_t(expert)]);
    Inputs in = shared_inputs(w, x.first[size_t(expert) + 1] - int(first), kind);
    in.high += first * size_t(in.k) * size_t(high_bytes(kind));
    in.low += first * size_t(in.k);
    in.scales += first * size_t(in.k / kGroup), in.sums += first * size_t(in.k / kGroup) * size_t(in.parts);
    return in;
  };
  auto prepare = [&](const Inputs& in, int expert, int tile) {
    for (int row = in.tiling.first(tile); row < in.tiling.first(tile + 1); row++)
      k_.prepare_row(fill(x.first[size_t(expert)] + row), w.k, in, row);
  };
  // An expert with few rows is prepared by each thread that computes a part of it: cheaper than to wait for another.
  if (at.rows > k_.tile_rows)
    each(most, at, [&](int index) {
      if (index >= int(x.active.size())) return;
      const int expert = x.active[size_t(index)];
      const Inputs in = inputs_of(expert);
      for (int tile = 0; in.tiling.count > 1 && tile < in.tiling.count; tile++) prepare(in, expert, tile);
    });
  // With many rows an expert's cost is its rows': runs are short, and the experts with the most rows come first.
  const int threads = m_.pool->size(), longest = at.rows > k_.tile_rows ? std::clamp(most * units / (8 * threads), 1, units) : most * units;
  const Runs runs(most * units, threads, longest);
  each(runs.count, at, [&](int run) {
    const int end = std::min(runs.begin[run + 1], int(x.active.size()) * units);
    for (int unit = runs.begin[run], count; unit < end; unit += count) {
      const int expert = x.active[size_t(unit / units)], first = unit % units;
      count = std::min(units - first, end - unit);
      Inputs in = inputs_of(expert);
      if (in.tiling.count == 1) {
        use_own_memory(in, at);
        prepare(in, expert, 0);
      }
      const int block = tiles_per_block(in);
      for (int tile = 0; tile < in.tiling.count; tile += block)
        work(in, expert, first, count, tile, std::min(tile + block, in.tiling.count));
    }
  });
}

}  // namespace ridgeline
