// A step's attention: norm, rotation and cache of each head, then the units of queries that share a KV head.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "step.h"

namespace ridgeline {
namespace {

// An RMSNorm without weights.
void to_unit(float* head, int dim, float eps) {
  float squares = 0.0f;
  for (int i = 0; i < dim; i++) squares += head[i] * head[i];
  const float scale = 1.0f / std::sqrt(squares / float(dim) + eps);
  for (int i = 0; i < dim; i++) head[i] *= scale;
}

}  // namespace

// A decode reads keys of earlier steps and its own, so that one thread can turn, store and attend without meeting
// the others; the tokens of a prefill read each other's.
void Step::attention(int layer, Place& at) {
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
void Step::rotate_and_store(int index, int token, int head) {
  const rl_layer& layer = m_.layers[size_t(index)];
  const int dim = spec_.head_dim, group = spec_.heads / spec_.kv_heads, position = step_.positions[token];
  float* row = m_.qkv.floats() + size_t(token) * m_.qkv_stride;
  float* key = row + (spec_.heads + head) * dim;
  const bool normed = layer.qk_norm == RL_QK_NORM_HEAD || layer.qk_norm == RL_QK_NORM_HEADS;
  const int own = layer.qk_norm == RL_QK_NORM_HEADS ? dim : 0;  // weights from one head to the next
  for (int h = head * group; h < (head + 1) * group; h++) {
    turn(layer, row + h * dim, normed ? layer.q_norm + h * own : nullptr, position);
    if (layer.qk_norm == RL_QK_SCALED)
      for (int i = 0; i < dim; i++) row[h * dim + i] *= layer.q_norm[position];
  }
  turn(layer, key, normed ? layer.k_norm + head * own : nullptr, position);
  const int32_t* table = block_table(token);
  const KvHead kv = m_.kv_head(index, head, table);
  alignas(64) float padded[kMaxHeadDim] = {};
  std::memcpy(padded, key, size_t(dim) * 4);
  k_.store_key(kv, table[position / kBlock], position % kBlock, padded);
  std::memcpy(padded, row + (spec_.heads + spec_.kv_heads + head) * dim, size_t(dim) * 4);
  k_.store_value(kv, table[position / kBlock], position % kBlock, padded);
}

void Step::turn(const rl_layer& layer, float* head, const float* norm, int position) {
  const size_t half = size_t(layer.rotary_dim) / 2;
  if (norm) apply_norm({norm, nullptr}, head, spec_.head_dim, head);
  if (half) k_.rope(head, layer.cosine + position * half, layer.sine + position * half, layer.rotary_dim);
  if (layer.qk_norm == RL_QK_NORM_UNIT) to_unit(head, spec_.head_dim, spec_.norm_eps);
}

void Step::attend(int index, const AttentionUnit& unit) {
  const rl_layer& layer = m_.layers[size_t(index)];
  const int dim = spec_.head_dim, group = spec_.heads / spec_.kv_heads, window = layer.window;
  const KvHead kv = m_.kv_head(index, unit.kv_head, step_.block_tables + size_t(unit.row) * step_.table_width);
  alignas(64) float queries[kAttentionRows][kMaxHeadDim];
  alignas(64) float outs[kAttentionRows][kMaxHeadDim];
  AttentionRow rows[kAttentionRows];
  int count = 0;
  auto flush = [&](float** targets) {
    k_.attend(kv, rows, count, layer.attention_scale, layer.attention_softcap,
              deterministic_ || step_.num_tokens < k_.attention_tokens);
    for (int r = 0; r < count; r++) std::memcpy(targets[r], outs[r], size_t(dim) * 4);
    count = 0;
  };
  float* targets[kAttentionRows];
  for (int t = 0; t < unit.num_tokens; t++) {
    const int token = unit.first_token + t, last = step_.positions[token];
    if (is_last(index) && !m_.samples[size_t(token)]) continue;
    const int first = !window ? 0 : layer.chunked ? last / window * window : std::max(0, last - window + 1);
    for (int h = unit.kv_head * group; h < (unit.kv_head + 1) * group; h++) {
      std::memcpy(queries[count], m_.qkv.floats() + size_t(token) * m_.qkv_stride + h * dim, size_t(dim) * 4);
      std::memset(queries[count] + dim, 0, size_t(m_.padded_dim - dim) * 4);
      targets[count] = m_.attention.floats() + size_t(token) * m_.attention_stride + h * dim;
      rows[count] = {queries[count], outs[count], first, last};
        if (layer.sinks) rows[count].sink = layer.sinks[h];
      if (++count == kAttentionRows) flush(targets);
    }
  }
  if (count) flush(targets);
}

void Step::plan_attention() {
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

}  // namespace ridgeline
