// One step: the decoder, top to bottom. Every thread runs this same text, phase by phase; inside a phase they take pieces
// of work (rows, panels, attention units) from a shared counter. What a thread reads outside of a piece it holds may be
// overwritten by others that are phases ahead.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "errors.h"
#include "model.h"

namespace ridgeline {
namespace {

constexpr int kPhasesPerLayer = 12;

// Panels 0 … count - 1 in runs of neighbours, each as long as half of what is left for every thread: the first ones long,
// so that weights stream from memory; the last ones short, so that the threads end together even if one lost its CPU.
struct Runs {
  static constexpr int kMost = 4096;
  int count = 0, begin[kMost + 1];

  Runs(int panels, int threads) {
    begin[0] = 0;
    for (int at = 0; at < panels; count++) {
      const int left = panels - at;
      at += count == kMost - 1 ? left : (left + 2 * threads - 1) / (2 * threads);
      begin[count + 1] = at;
    }
  }
};

class Step {
 public:
  Step(rl_model& model, const rl_step& step, float* logits, int32_t* best)
      : m_(model), spec_(model.spec), k_(*model.kernels), step_(step), logits_(logits), best_(best),
        bests_(best ? size_t(model.pool->size()) * size_t(step.num_logits) : 0),
        decodes_only_(step.num_tokens == step.num_rows), phases_(size_t(kPhasesPerLayer) * spec_.num_layers + 8) {
    plan_attention();
  }

  void run() {
    m_.pool->run([this](int thread) {
      Place at{thread, 0, step_.num_tokens};
      embed(at);
      for (int layer = 0; layer < spec_.num_layers; layer++) decode_layer(layer, at);
      predict(at);
    });
    if (best_) merge_bests();
  }

 private:
  // Where a thread is: which one, how many shared phases it has passed, and how many rows there still are.
  struct Place {
    int thread;
    size_t phase;
    int rows;
  };
  // Rows of floats, `stride` apart; normed on the way where `norm` is set.
  struct Source {
    const float* rows;
    int stride, width;
    const float* norm;
  };

  void decode_layer(int index, Place& at) {
    const rl_layer& layer = m_.layers[size_t(index)];
    linear(layer.qkv, residual_rows(layer.attn_norm), m_.qkv.floats(), m_.qkv_stride, false, at);
    attention(index, at);
    if (is_last(index)) keep_what_samples(at);
    if (!at.rows) return;
    project(layer.output, {m_.attention.floats(), m_.attention_stride, spec_.heads * spec_.head_dim, nullptr},
            layer.post_attn_norm, at);
    gated_mlp(layer.gate_up, residual_rows(layer.ffn_norm), at);
    project(layer.down, {m_.gated.floats(), m_.ffn_stride, spec_.ffn, nullptr}, layer.post_ffn_norm, at);
  }

  // ---- the parts of a layer; each is one phase or several ----

  void embed(Place& at) {
    each(step_.num_tokens, at, [&](int token) {
      float* row = m_.residual.floats() + size_t(token) * m_.hidden_stride;
      rl_unpack(&spec_.embedding, step_.token_ids[token], 1, row);
      if (spec_.embedding_scale != 1.0f)
        for (int i = 0; i < spec_.hidden; i++) row[i] *= spec_.embedding_scale;
    });
  }

  void linear(const rl_matrix& w, const Source& source, float* out, int stride, bool add, Place& at) {
    each_run(num_panels(w.n), w, source, at.rows, at, [&](const Inputs& in, int panel, int count, int first, int end) {
      k_.panel_products(w, panel, count, in, first, end, out + panel * kPanel, size_t(stride), add, scratch(at));
    });
  }

  // residual += w · source, with a norm in between where the family has one.
  void project(const rl_matrix& w, const Source& source, const float* post_norm, Place& at) {
    if (!post_norm) return linear(w, source, m_.residual.floats(), m_.hidden_stride, true, at);
    linear(w, source, m_.branch.floats(), m_.hidden_stride, false, at);
    each(at.rows, at, [&](int token) {
      float* branch = m_.branch.floats() + size_t(token) * m_.hidden_stride;
      k_.rms_norm(branch, post_norm, spec_.norm_eps, spec_.hidden, branch);
      k_.add_rows(branch, spec_.hidden, m_.residual.floats() + size_t(token) * m_.hidden_stride);
    });
  }

  // Panels of gate and up alternate in the packed matrix, so that both halves of an output meet in one place.
  void gated_mlp(const rl_matrix& w, const Source& source, Place& at) {
    float* both = reinterpret_cast<float*>(scratch(at) + m_.panel_scratch);
    each_run(num_panels(w.n) / 2, w, source, at.rows, at, [&](const Inputs& in, int pair, int count, int first, int end) {
      for (int last = pair + count; pair < last; pair++) {
        k_.panel_products(w, 2 * pair, 2, in, first, end, both, 2 * kPanel, false, scratch(at));
        for (int token = in.tiling.first(first); token < in.tiling.first(end); token++)
          k_.gate(spec_.activation, both + token * 2 * kPanel, both + token * 2 * kPanel + kPanel, kPanel,
                  m_.gated.floats() + size_t(token) * m_.ffn_stride + pair * kPanel);
      }
    });
  }

  // A decode reads keys of earlier steps and its own, so that one thread can turn, store and attend without meeting
  // the others; the tokens of a prefill read each other's.
  void attention(int layer, Place& at) {
    // A unit's tokens are neighbours in the cache: two threads would write to the same lines.
    auto store = [&](const AttentionUnit& unit) {
      for (int token = unit.first_token; token < unit.first_token + unit.num_tokens; token++)
        rotate_and_store(layer, token, unit.kv_head);
    };
    if (!decodes_only_) each(int(m_.units.size()), at, [&](int index) { store(m_.units[size_t(index)]); });
    each(int(m_.units.size()), at, [&](int index) {
      const AttentionUnit& unit = m_.units[size_t(index)];
      if (decodes_only_) store(unit);
      attend(layer, unit);
    });
  }

  // Norm, rotary embedding and cache for one KV head of a token, and the query heads that share it.
  void rotate_and_store(int index, int token, int head) {
    const rl_layer& layer = m_.layers[size_t(index)];
    const int dim = spec_.head_dim, group = spec_.heads / spec_.kv_heads, position = step_.positions[token];
    float* row = m_.qkv.floats() + size_t(token) * m_.qkv_stride;
    float* key = row + (spec_.heads + head) * dim;
    for (int h = head * group; h < (head + 1) * group; h++) turn(layer, row + h * dim, layer.q_norm, position);
    turn(layer, key, layer.k_norm, position);
    const int32_t* table = block_table(token);
    const KvHead kv = m_.kv_head(index, head, table);
    alignas(64) float padded[kMaxHeadDim] = {};
    std::memcpy(padded, key, size_t(dim) * 4);
    k_.store_key(kv, table[position / kBlock], position % kBlock, padded);
    std::memcpy(padded, row + (spec_.heads + spec_.kv_heads + head) * dim, size_t(dim) * 4);
    k_.store_value(kv, table[position / kBlock], position % kBlock, padded);
  }

  void turn(const rl_layer& layer, float* head, const float* norm, int position) {
    const size_t half = size_t(layer.rotary_dim) / 2;
    if (norm) k_.rms_norm(head, norm, spec_.norm_eps, spec_.head_dim, head);
    if (half) k_.rope(head, layer.cosine + position * half, layer.sine + position * half, layer.rotary_dim);
  }

  void attend(int layer, const AttentionUnit& unit) {
    const int dim = spec_.head_dim, group = spec_.heads / spec_.kv_heads, window = m_.layers[size_t(layer)].window;
    const KvHead kv = m_.kv_head(layer, unit.kv_head, step_.block_tables + size_t(unit.row) * step_.table_width);
    alignas(64) float queries[kAttentionRows][kMaxHeadDim];
    alignas(64) float outs[kAttentionRows][kMaxHeadDim];
    AttentionRow rows[kAttentionRows];
    int count = 0;
    auto flush = [&](float** targets) {
      k_.attend(kv, rows, count, spec_.attention_scale, spec_.attention_softcap, spec_.deterministic);
      for (int r = 0; r < count; r++) std::memcpy(targets[r], outs[r], size_t(dim) * 4);
      count = 0;
    };
    float* targets[kAttentionRows];
    for (int t = 0; t < unit.num_tokens; t++) {
      const int token = unit.first_token + t, last = step_.positions[token];
      if (is_last(layer) && !m_.samples[size_t(token)]) continue;
      const int first = window ? std::max(0, last - window + 1) : 0;
      for (int h = unit.kv_head * group; h < (unit.kv_head + 1) * group; h++) {
        std::memcpy(queries[count], m_.qkv.floats() + size_t(token) * m_.qkv_stride + h * dim, size_t(dim) * 4);
        std::memset(queries[count] + dim, 0, size_t(m_.padded_dim - dim) * 4);
        targets[count] = m_.attention.floats() + size_t(token) * m_.attention_stride + h * dim;
        rows[count] = {queries[count], outs[count], first, last};
        if (++count == kAttentionRows) flush(targets);
      }
    }
    if (count) flush(targets);
  }

  // After the last layer's attention nothing reads the other rows: they are left behind. Rows move to the front one after
  // the other, by one thread: none is overwritten before it was moved.
  void keep_what_samples(Place& at) {
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
  static void move_row(float* rows, int stride, int from, int to) {
    if (from != to) std::memcpy(rows + size_t(to) * stride, rows + size_t(from) * stride, size_t(stride) * sizeof(float));
  }
  bool is_last(int layer) const { return layer + 1 == spec_.num_layers; }

  // Final norm and LM head, for the rows that sample only.
  void predict(Place& at) {
    const int rows = step_.num_logits;
    if (!rows) return;
    const Source source{m_.residual.floats(), m_.hidden_stride, spec_.hidden, spec_.final_norm};
    each_run(num_panels(spec_.vocab), spec_.lm_head, source, rows, at, [&](const Inputs& in, int panel, int count, int first, int end) {
      for (int last = panel + count; panel < last; panel++) predict_panel(in, panel, first, end, at);
    });
  }

  // Where only the best are wanted, logits go no further than a thread's own memory.
  void predict_panel(const Inputs& in, int panel, int first, int end, const Place& at) {
    const int first_row = in.tiling.first(first), rows = in.tiling.first(end) - first_row;
    const int width = std::min(kPanel, spec_.vocab - panel * kPanel);  // the last panel may be wider than the vocabulary
    const bool straight = logits_ && width == kPanel;
    const size_t stride = straight ? size_t(spec_.vocab) : kPanel;
    float* out = straight ? logits_ + panel * kPanel : reinterpret_cast<float*>(scratch(at) + m_.panel_scratch);
    k_.panel_products(spec_.lm_head, panel, 1, in, first, end, out, stride, false, scratch(at));
    out += size_t(first_row) * stride;
    if (spec_.logit_softcap > 0)
      for (int row = 0; row < rows; row++) k_.softcap(out + row * stride, width, spec_.logit_softcap);
    if (best_) k_.keep_best(out, stride, rows, width, panel * kPanel, bests_of(at.thread) + first_row);
    if (logits_ && !straight)
      for (int row = 0; row < rows; row++)
        std::memcpy(logits_ + size_t(first_row + row) * spec_.vocab + panel * kPanel, out + row * stride, size_t(width) * 4);
  }

  // A thread meets panels in order and so keeps the first of equal logits; of several threads' the first counts.
  void merge_bests() {
    for (int row = 0; row < step_.num_logits; row++) {
      Best best = bests_of(0)[row];
      for (int thread = 1; thread < m_.pool->size(); thread++) {
        const Best& other = bests_of(thread)[row];
        if (other.value > best.value || (other.value == best.value && other.index < best.index)) best = other;
      }
      best_[row] = best.index;
    }
  }
  Best* bests_of(int thread) { return bests_.data() + size_t(thread) * size_t(step_.num_logits); }

  // ---- inputs of linear layers ----

  Source residual_rows(const float* norm) const { return {m_.residual.floats(), m_.hidden_stride, spec_.hidden, norm}; }

  // The form of `count` rows for these weights, in the memory that all threads share.
  Inputs shared_inputs(const rl_matrix& w, int count) const {
    const InputKind kind = k_.input_kind(w.format, count, spec_.deterministic);
    return {kind, Tiling(count, k_.tile_rows), padded_k(w.k), m_.input_high.data(), m_.input_low.data(),
            m_.input_scales.floats(), m_.input_sums.floats(), multiplied_offset(kind, w.format)};
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
      if (source.norm) {
        k_.rms_norm(x, source.norm, spec_.norm_eps, source.width, normed);
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
    const size_t row_bytes = size_t(in.k) * size_t(bytes_per_input(in.kind));
    const int least = in.kind == InputKind::Int8Expanded ? kRowsForExpanding / k_.tile_rows : 1;
    const int block = std::max(least, int(k_.input_block_bytes / (row_bytes * size_t(k_.tile_rows))));
    auto prepare_own = [&] {
      if (own) prepare_tile(source, in, 0, at);
    };
    phases_[at.phase++].share(runs.count, prepare_own, [&](int run) {
      for (int tile = 0; tile < in.tiling.count; tile += block)
        work(in, runs.begin[run], runs.begin[run + 1] - runs.begin[run], tile, std::min(tile + block, in.tiling.count));
    });
  }

  void plan_attention() {
    const int tokens_per_unit = std::max(1, kAttentionRows / (spec_.heads / spec_.kv_heads));
    m_.units.clear();
    m_.row_of.resize(size_t(step_.num_tokens));
    m_.samples.assign(size_t(step_.num_tokens), false);
    for (int i = 0; i < step_.num_logits; i++) m_.samples[size_t(step_.logit_rows[i])] = true;
    for (int row = 0; row < step_.num_rows; row++) {
      const int begin = step_.query_starts[row], end = step_.query_starts[row + 1];
      for (int token = begin; token < end; token++) m_.row_of[size_t(token)] = row;
      for (int first = begin; first < end; first += tokens_per_unit)
        for (int head = 0; head < spec_.kv_heads; head++)
          m_.units.push_back({row, head, first, std::min(tokens_per_unit, end - first)});
    }
    // Long ones first, so that the thread with the last piece does not keep the others waiting.
    std::stable_sort(m_.units.begin(), m_.units.end(), [&](const AttentionUnit& a, const AttentionUnit& b) {
      return int64_t(step_.positions[a.first_token] + 1) * a.num_tokens > int64_t(step_.positions[b.first_token] + 1) * b.num_tokens;
    });
  }

  const int32_t* block_table(int token) const {
    return step_.block_tables + size_t(m_.row_of[size_t(token)]) * step_.table_width;
  }
  uint8_t* scratch(const Place& at) { return m_.scratch[size_t(at.thread)].data(); }

  rl_model& m_;
  const rl_decoder& spec_;
  const Kernels& k_;
  const rl_step& step_;
  float* logits_;
  int32_t* best_;
  std::vector<Best> bests_;  // [thread][row of logits], if wanted
  const bool decodes_only_;
  std::vector<Phase> phases_;
};

// A reason why the step cannot be computed; empty if it can. Nothing is read through an index before this.
std::string step_flaw(const rl_decoder& d, const rl_step& s) {
  if (s.num_tokens < 1 || s.num_tokens > d.max_step_tokens)
    return "a step of " + std::to_string(s.num_tokens) + " tokens; planned for 1 to " + std::to_string(d.max_step_tokens);
  if (s.num_rows < 1 || s.num_rows > s.num_tokens || s.query_starts[0] != 0 || s.query_starts[s.num_rows] != s.num_tokens)
    return "the rows do not add up to the step's tokens";
  for (int row = 0; row < s.num_rows; row++) {
    const int begin = s.query_starts[row], end = s.query_starts[row + 1];
    if (begin >= end || end > s.num_tokens) return "row " + std::to_string(row) + " has no tokens";
    if (s.positions[begin] < 0 || s.positions[begin] >= d.max_context)
      return "position " + std::to_string(s.positions[begin]) + " of a context of " + std::to_string(d.max_context);
    for (int token = begin; token < end; token++) {
      if (s.token_ids[token] < 0 || s.token_ids[token] >= d.vocab)
        return "token id " + std::to_string(s.token_ids[token]) + " of a vocabulary of " + std::to_string(d.vocab);
      if (s.positions[token] != s.positions[begin] + token - begin)
        return "the positions of row " + std::to_string(row) + " are not consecutive";
    }
    const int last = s.positions[end - 1];
    if (last >= d.max_context)
      return "position " + std::to_string(last) + " of a context of " + std::to_string(d.max_context);
    if (last / kBlock >= s.table_width) return "the block table of row " + std::to_string(row) + " is too short";
    for (int i = 0; i <= last / kBlock; i++) {
      const int block = s.block_tables[size_t(row) * s.table_width + i];
      if (block < 0 || block >= d.num_blocks)
        return "block " + std::to_string(block) + " of a cache of " + std::to_string(d.num_blocks);
    }
  }
  for (int i = 0; i < s.num_logits; i++) {
    if (s.logit_rows[i] < 0 || s.logit_rows[i] >= s.num_tokens)
      return "logits of token " + std::to_string(s.logit_rows[i]) + " in a step of " + std::to_string(s.num_tokens);
    if (i && s.logit_rows[i] <= s.logit_rows[i - 1]) return "the tokens that want logits are not in order";
  }
  if (s.num_logits < 0 || s.num_logits > s.num_tokens) return "more logits than tokens";
  return "";
}

}  // namespace
}  // namespace ridgeline

extern "C" int rl_step_execute(rl_model* model, const rl_step* step, float* logits, int32_t* best) {
  const std::string flaw = ridgeline::step_flaw(model->spec, *step);
  if (!flaw.empty()) return ridgeline::fail(flaw);
  if (step->num_logits && !logits && !best) return ridgeline::fail("logits are asked for, with no place to put them");
  try {
    ridgeline::Step(*model, *step, logits, best).run();
  } catch (const std::bad_alloc&) {
    return ridgeline::fail("not enough memory to plan the step");
  }
  return 0;
}
