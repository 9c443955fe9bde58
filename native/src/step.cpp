// A step from its checks to its logits: the embedding before the layers, the LM head after them.
#include "step.h"

#include <cstring>
#include <string>

#include "errors.h"

namespace ridgeline {
namespace {

constexpr int kPhasesPerLayer = 24;

}  // namespace

Step::Step(rl_model& model, const rl_step& step, float* logits, int32_t* best)
    : m_(model), spec_(model.spec), k_(*model.kernels), step_(step), logits_(logits), best_(best),
      bests_(best ? size_t(model.pool->size()) * size_t(step.num_logits) : 0),
      deterministic_(model.spec.deterministic || step.deterministic), decodes_only_(step.num_tokens == step.num_rows), phases_(size_t(kPhasesPerLayer) * spec_.num_layers + 8) {
  plan_attention();
}

void Step::run() {
  m_.pool->run([this](int thread) {
    Place at{thread, 0, step_.num_tokens};
    embed(at);
    for (int layer = 0; layer < spec_.num_layers; layer++) decode_layer(layer, at);
    predict(at);
  });
  if (best_) merge_bests();
}

void Step::embed(Place& at) {
  each(step_.num_tokens, at, [&](int token) {
    float* row = residual_row(token);
    rl_unpack(&spec_.embedding, step_.token_ids[token], 1, row);
    if (spec_.embedding_scale != 1.0f)
      for (int i = 0; i < spec_.hidden; i++) row[i] *= spec_.embedding_scale;
    if (!spec_.positions.data) return;
    float* learned = reinterpret_cast<float*>(scratch(at) + m_.normed_offset);
    rl_unpack(&spec_.positions, step_.positions[token], 1, learned);
    k_.add_scaled(learned, 1.0f, spec_.hidden, row);
  });
}

// Final norm and LM head, for the rows that sample only.
void Step::predict(Place& at) {
  const int rows = step_.num_logits;
  if (!rows) return;
  const Source source{m_.residual.floats(), m_.hidden_stride, spec_.hidden, spec_.final_norm};
  each_run(num_panels(spec_.vocab), spec_.lm_head, source, rows, at, [&](const Inputs& in, int panel, int count, int first, int end) {
    for (int last = panel + count; panel < last; panel++) predict_panel(in, panel, first, end, at);
  });
}

// Where only the best are wanted, logits go no further than a thread's own memory.
void Step::predict_panel(const Inputs& in, int panel, int first, int end, const Place& at) {
  const int first_row = in.tiling.first(first), rows = in.tiling.first(end) - first_row;
  const int width = std::min(kPanel, spec_.vocab - panel * kPanel);  // the last panel may be wider than the vocabulary
  const bool straight = logits_ && width == kPanel;
  const size_t stride = straight ? size_t(spec_.vocab) : kPanel;
  float* out = straight ? logits_ + panel * kPanel : reinterpret_cast<float*>(scratch(at) + m_.panel_scratch);
  k_.panel_products(spec_.lm_head, panel, 1, in, first, end, out, stride, false, scratch(at));
  out += size_t(first_row) * stride;
  if (spec_.logit_scale != 1.0f)
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < width; i++) out[row * stride + i] *= spec_.logit_scale;
  if (spec_.logit_softcap > 0)
    for (int row = 0; row < rows; row++) k_.softcap(out + row * stride, width, spec_.logit_softcap);
  if (best_) k_.keep_best(out, stride, rows, width, panel * kPanel, bests_of(at.thread) + first_row);
  if (logits_ && !straight)
    for (int row = 0; row < rows; row++)
      std::memcpy(logits_ + size_t(first_row + row) * spec_.vocab + panel * kPanel, out + row * stride, size_t(width) * 4);
}

// A thread meets panels in order and so keeps the first of equal logits; of several threads' the first counts.
void Step::merge_bests() {
  for (int row = 0; row < step_.num_logits; row++) {
    Best best = bests_of(0)[row];
    for (int thread = 1; thread < m_.pool->size(); thread++) {
      const Best& other = bests_of(thread)[row];
      if (other.value > best.value || (other.value == best.value && other.index < best.index)) best = other;
    }
    best_[row] = best.index;
  }
}
namespace {

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
