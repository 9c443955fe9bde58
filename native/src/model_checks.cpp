// Every field of a decoder's table is checked here, before a kernel reads through it.
#include <string>

#include "model.h"

namespace ridgeline {
namespace {

constexpr int kMostOfAnything = 1 << 24;  // of layers, rows, tokens, …: products of two stay far inside 64 bits
constexpr int kMostBytesSummed = 1 << 16;  // byte products that fit a 32-bit sum, for one scale per output

std::string shape(int n, int k) { return "[" + std::to_string(n) + ", " + std::to_string(k) + "]"; }

// A reason why the matrix cannot be what it is said to be; empty if it can.
std::string matrix_flaw(const char* name, const rl_matrix& m, int n, int k) {
  if (!known_format(m.format)) return std::string(name) + " has no known format: " + std::to_string(m.format);
  if (!m.data) return std::string(name) + " has no data";
  if (m.format == RL_Q8_C && m.k > kMostBytesSummed)
    return std::string(name) + ": one scale per output is for rows of up to " + std::to_string(kMostBytesSummed) + " weights";
  if (m.n != n || m.k != k) return std::string(name) + " is " + shape(m.n, m.k) + ", not " + shape(n, k);
  return "";
}

std::string norm_flaw(const char* name, const rl_decoder& d, const rl_norm& norm) {
  if (norm.bias && !norm.weight) return std::string(name) + " has a bias and no weight";
  if (norm.bias && d.norm_kind == RL_RMS_NORM) return std::string(name) + " has a bias, which is for LayerNorm alone";
  return "";
}

std::string attention_flaw(const rl_decoder& d, const rl_layer& layer) {
  const int q_rows = d.heads * d.head_dim, kv_rows = d.kv_heads * d.head_dim;
  std::string flaw = matrix_flaw("qkv", layer.qkv, q_rows + 2 * kv_rows, d.hidden);
  if (flaw.empty()) flaw = matrix_flaw("output", layer.output, d.hidden, q_rows);
  if (!flaw.empty()) return flaw;
  if (layer.qk_norm < RL_QK_PLAIN || layer.qk_norm > RL_QK_SCALED)
    return "no such qk_norm: " + std::to_string(layer.qk_norm);
  const bool weighted = layer.qk_norm != RL_QK_PLAIN && layer.qk_norm != RL_QK_NORM_UNIT, scaled = layer.qk_norm == RL_QK_SCALED;
  if (scaled && (!layer.q_norm || layer.k_norm)) return "scaled queries have factors in q_norm, and no k_norm";
  if (!scaled && (!layer.q_norm == weighted || !layer.k_norm == weighted))
    return "q_norm and k_norm come together, and with a qk_norm";
  if (layer.rotary_dim < 0 || layer.rotary_dim % 2 || layer.rotary_dim > d.head_dim)
    return "a rotary size of " + std::to_string(layer.rotary_dim);
  if (layer.rotary_dim && (!layer.cosine || !layer.sine)) return "the rotary tables are missing";
  if (layer.window < 0) return "a negative window";
  if (layer.chunked && !layer.window) return "chunks without a window";
  return "";
}

std::string experts_flaw(const rl_decoder& d, const rl_experts& e) {
  for (int value : {e.num, e.per_token, e.size, e.groups, e.top_groups})
    if (value < 1 || value > kMostOfAnything) return "a size of " + std::to_string(value) + " in the table of the experts";
  if (e.per_token > e.num) return "a token cannot use " + std::to_string(e.per_token) + " of " + std::to_string(e.num) + " experts";
  if (int64_t(e.per_token) * d.max_step_tokens > kMostOfAnything) return "too many experts per token for steps of this size";
  if (int64_t(e.num) * 2 * round_up(e.size, kPanel) > (1 << 30) || int64_t(e.num) * round_up(d.hidden, kPanel) > (1 << 30))
    return "too many experts of this size";
  if (e.num % e.groups) return "the groups cannot share the experts evenly";
  if (e.top_groups > e.groups || int64_t(e.top_groups) * (e.num / e.groups) < e.per_token)
    return "the best " + std::to_string(e.top_groups) + " groups have too few experts";
  if (e.scores < RL_SOFTMAX || e.scores > RL_SPARSEMIXER) return "no such scores: " + std::to_string(e.scores);
  if (e.scores == RL_SPARSEMIXER && (e.groups > 1 || e.choice_bias || !(e.margin >= 0)))
    return "sparsemixer knows no groups and no bias of the choice, and its margin is not below 0";
  if (!(e.clamp >= 0)) return "a clamp below 0";
  if (e.size % kGroup && e.size > (1 << 14)) return "rows of " + std::to_string(e.size) + " weights are no whole groups of 32";
  std::string flaw = matrix_flaw("router", e.router, e.num + (e.shared_gate ? 1 : 0), d.hidden);
  if (flaw.empty()) flaw = matrix_flaw("the experts' gate_up", e.gate_up, e.num * 2 * round_up(e.size, kPanel), d.hidden);
  if (flaw.empty()) flaw = matrix_flaw("the experts' down", e.down, e.num * round_up(d.hidden, kPanel), e.size);
  return flaw;
}

std::string ffn_flaw(const rl_decoder& d, const rl_layer& layer) {
  const bool experts = layer.ffn_kind == RL_FFN_EXPERTS;
  if (layer.ffn_kind < RL_FFN_GATED || layer.ffn_kind > RL_FFN_EXPERTS) return "no such FFN: " + std::to_string(layer.ffn_kind);
  if (layer.activation < RL_SILU || layer.activation > RL_RELU) return "no such activation: " + std::to_string(layer.activation);
  if (layer.ffn < (experts ? 0 : 1) || layer.ffn > kMostOfAnything) return "an FFN size of " + std::to_string(layer.ffn);
  if (layer.ffn % kGroup && layer.ffn > (1 << 14)) return "rows of " + std::to_string(layer.ffn) + " weights are no whole groups of 32";
  if (experts) {
    const std::string flaw = experts_flaw(d, layer.experts);
    if (!flaw.empty()) return flaw;
    if (!layer.ffn) return layer.experts.shared_gate ? "a gate of a part that is not there" : "";
  }
  const int rows = layer.ffn_kind == RL_FFN_PLAIN ? layer.ffn : 2 * round_up(layer.ffn, kPanel);
  const std::string flaw = matrix_flaw("gate_up", layer.gate_up, rows, d.hidden);
  return flaw.empty() ? matrix_flaw("down", layer.down, d.hidden, layer.ffn) : flaw;
}

std::string layer_flaw(const rl_decoder& d, const rl_layer& layer) {
  std::string flaw = attention_flaw(d, layer);
  if (flaw.empty()) flaw = ffn_flaw(d, layer);
  if (flaw.empty()) flaw = norm_flaw("attn_norm", d, layer.attn_norm);
  if (flaw.empty()) flaw = norm_flaw("post_attn_norm", d, layer.post_attn_norm);
  if (flaw.empty()) flaw = norm_flaw("ffn_norm", d, layer.ffn_norm);
  if (flaw.empty()) flaw = norm_flaw("post_ffn_norm", d, layer.post_ffn_norm);
  return flaw;
}

}  // namespace

std::string decoder_flaw(const rl_decoder& d) {
  for (int value : {d.hidden, d.heads, d.kv_heads, d.head_dim, d.vocab, d.num_layers, d.max_context, d.num_blocks, d.max_step_tokens})
    if (value < 1 || value > kMostOfAnything)
      return "a size of " + std::to_string(value) + " in the table: it must be from 1 to " + std::to_string(kMostOfAnything);
  if (int64_t(d.heads) * d.head_dim > kMostOfAnything) return "too many heads of this size";
  if (d.head_dim % 2 || d.head_dim > kMaxHeadDim)
    return "a head size of " + std::to_string(d.head_dim) + ": it must be even and at most " + std::to_string(kMaxHeadDim);
  if (d.heads % d.kv_heads) return "the heads cannot share the KV heads evenly";
  for (int k : {d.hidden, d.heads * d.head_dim})
    if (k % kGroup && k > (1 << 14)) return "rows of " + std::to_string(k) + " weights are no whole groups of 32";
  if (d.kv_format < RL_KV_F32 || d.kv_format > RL_KV_INT4) return "no such KV format: " + std::to_string(d.kv_format);
  if (d.norm_kind != RL_RMS_NORM && d.norm_kind != RL_LAYER_NORM) return "no such norm: " + std::to_string(d.norm_kind);
  if (!d.layers || !d.final_norm.weight) return "layers or the final norm are missing";
  std::string flaw = norm_flaw("final_norm", d, d.final_norm);
  if (flaw.empty()) flaw = matrix_flaw("embedding", d.embedding, d.vocab, d.hidden);
  if (flaw.empty()) flaw = matrix_flaw("lm_head", d.lm_head, d.vocab, d.hidden);
  if (flaw.empty() && d.positions.data) {
    flaw = matrix_flaw("positions", d.positions, d.positions.n, d.hidden);
    if (flaw.empty() && d.positions.n < d.max_context) flaw = "there are positions for " + std::to_string(d.positions.n) + " tokens";
  }
  for (int i = 0; i < d.num_layers && flaw.empty(); i++) {
    flaw = layer_flaw(d, d.layers[i]);
    if (!flaw.empty()) flaw = "layer " + std::to_string(i) + ": " + flaw;
  }
  return flaw;
}

}  // namespace ridgeline
