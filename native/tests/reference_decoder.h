// The decoder in double precision, as plainly as it can be said: one sequence, all tokens at once, no cache, weights as
// rl_unpack gives them. What the library's steps are compared with.
#pragma once
#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "check.h"

class ReferenceDecoder {
 public:
  explicit ReferenceDecoder(const rl_decoder& decoder) : d_(decoder) {}

  std::vector<std::vector<double>> logits(const std::vector<int32_t>& tokens) {
    Rows x;
    for (int32_t token : tokens) {
      const std::vector<float>& all = weights(d_.embedding);
      x.emplace_back(all.begin() + size_t(token) * d_.hidden, all.begin() + size_t(token + 1) * d_.hidden);
      for (double& value : x.back()) value *= d_.embedding_scale;
      if (d_.positions.data)
        for (int i = 0; i < d_.hidden; i++) x.back()[size_t(i)] += weights(d_.positions)[(x.size() - 1) * size_t(d_.hidden) + size_t(i)];
    }
    for (int i = 0; i < d_.num_layers; i++) {
      const rl_layer& layer = d_.layers[i];
      const Rows input = x;
      add(x, normed(times(layer.output, attention(layer, times(layer.qkv, normed(x, layer.attn_norm)))), layer.post_attn_norm));
      add(x, normed(ffn(layer, normed(layer.parallel ? input : x, layer.ffn_norm)), layer.post_ffn_norm));
    }
    Rows out = times(d_.lm_head, normed(x, d_.final_norm));
    for (std::vector<double>& row : out)
      for (double& value : row) value = capped(value * d_.logit_scale, d_.logit_softcap);
    return out;
  }

 private:
  using Rows = std::vector<std::vector<double>>;

  const std::vector<float>& weights(const rl_matrix& m) {
    std::vector<float>& floats = unpacked_[m.data];
    if (floats.empty()) {
      floats.resize(size_t(m.n) * m.k);
      CHECK_OK(rl_unpack(&m, 0, m.n, floats.data()));
    }
    return floats;
  }

  Rows times(const rl_matrix& m, const Rows& x) { return times(m, x, 0, m.n); }
  Rows times(const rl_matrix& m, const Rows& x, int first, int count) {
    const std::vector<float>& w = weights(m);
    Rows out(x.size(), std::vector<double>(size_t(count)));
    for (size_t row = 0; row < x.size(); row++)
      for (int o = 0; o < count; o++) {
        double sum = m.bias ? m.bias[first + o] : 0.0;
        for (int i = 0; i < m.k; i++) sum += double(w[size_t(first + o) * m.k + i]) * x[row][size_t(i)];
        out[row][size_t(o)] = sum;
      }
    return out;
  }

  void norm(double* x, const float* weight, const float* bias, int n) const {
    double mean = 0, squares = 0;
    if (d_.norm_kind == RL_LAYER_NORM)
      for (int i = 0; i < n; i++) mean += x[i] / n;
    for (int i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
    const double inverse = 1 / std::sqrt(squares / n + double(d_.norm_eps));
    for (int i = 0; i < n; i++) x[i] = (x[i] - mean) * inverse * weight[i] + (bias ? bias[i] : 0.0);
  }
  Rows normed(Rows x, const rl_norm& by) const {
    for (std::vector<double>& row : x)
      if (by.weight) norm(row.data(), by.weight, by.bias, int(row.size()));
    return x;
  }

  void add(Rows& x, const Rows& y) const {
    for (size_t row = 0; row < x.size(); row++)
      for (size_t i = 0; i < x[row].size(); i++) x[row][i] += d_.residual_scale * y[row][i];
  }
  static double capped(double value, double cap) { return cap > 0 ? cap * std::tanh(value / cap) : value; }

  static double activated(int activation, double x) {
    const double inner = std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
    switch (activation) {
      case RL_SILU: return x / (1 + std::exp(-x));
      case RL_GELU_TANH: return 0.5 * x * (1 + std::tanh(inner));
      case RL_GELU_ERF: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      default: return std::max(0.0, x);
    }
  }

  // Panels of 16 gates and 16 ups alternate.
  static std::vector<double> gated(const double* x, int size, int activation, double clamp) {
    std::vector<double> out(static_cast<size_t>(size));
    for (int i = 0; i < size; i++) {
      const double gate = x[i / 16 * 32 + i % 16], up = x[i / 16 * 32 + 16 + i % 16];
      const double g = std::min(gate, clamp), u = std::max(-clamp, std::min(up, clamp));
      out[size_t(i)] = clamp > 0 ? g / (1 + std::exp(-1.702 * g)) * (u + 1) : activated(activation, gate) * up;
    }
    return out;
  }

  Rows ffn(const rl_layer& layer, const Rows& x) {
    Rows out(x.size(), std::vector<double>(size_t(d_.hidden)));
    if (layer.ffn) {
      Rows inner = times(layer.gate_up, x);
      for (std::vector<double>& row : inner)
        if (layer.ffn_kind != RL_FFN_PLAIN) row = gated(row.data(), layer.ffn, layer.activation, 0);
        else
          for (double& value : row) value = activated(layer.activation, value);
      out = times(layer.down, inner);
    }
    if (layer.ffn_kind != RL_FFN_EXPERTS) return out;
    const Rows routed = times(layer.experts.router, x);
    for (size_t row = 0; row < x.size(); row++) add_experts(layer, x[row], routed[row], out[row]);
    return out;
  }

  void add_experts(const rl_layer& layer, const std::vector<double>& x, const std::vector<double>& routed, std::vector<double>& out) {
    const rl_experts& e = layer.experts;
    if (e.shared_gate)
      for (double& value : out) value /= 1 + std::exp(-routed[size_t(e.num)]);
    const std::vector<double> logits(routed.begin(), routed.begin() + e.num);
    std::vector<double> scores = logits;
    double sum = 0;
    for (double& score : scores) sum += std::exp(score);
    for (double& score : scores) score = e.scores == RL_SIGMOID ? 1 / (1 + std::exp(-score)) : std::exp(score) / sum;
    const std::vector<int> chosen = choice(e, scores);
    double total = 0;
    for (int expert : chosen) total += scores[size_t(expert)];
    const int gate_rows = e.gate_up.n / e.num, down_rows = e.down.n / e.num;
    std::vector<int> before;
    for (int expert : chosen) {
      const double share = e.scores == RL_SPARSEMIXER ? share_of_near(e, logits, before, expert)
                                                      : scores[size_t(expert)] / (e.normalized ? total : 1) * e.scale;
      before.push_back(expert);
      Rows row{x};
      for (double& value : row[0]) value *= e.scales_input ? share : 1;
      const std::vector<double> both = times(e.gate_up, row, expert * gate_rows, gate_rows)[0];
      row[0] = gated(both.data(), e.size, layer.activation, e.clamp);
      const std::vector<double> result = times(e.down, row, expert * down_rows, d_.hidden)[0];
      for (size_t i = 0; i < out.size(); i++) out[i] += result[i] * (e.scales_input ? 1 : share);
    }
  }

  // Of a softmax over the experts that are not among those chosen before, and near this one, which is the best of them.
  static double share_of_near(const rl_experts& e, const std::vector<double>& logits, const std::vector<int>& before, int expert) {
    const double best = logits[size_t(expert)];
    double total = 0;
    for (int i = 0; i < e.num; i++) {
      const double distance = (best - logits[size_t(i)]) / std::max(std::fabs(logits[size_t(i)]), best);
      if (std::find(before.begin(), before.end(), i) == before.end() && !(distance > e.margin)) total += std::exp(logits[size_t(i)] - best);
    }
    return 1 / total;
  }

  // The experts with the largest scores, choice bias included, of the groups whose two best experts have the largest sum.
  static std::vector<int> choice(const rl_experts& e, const std::vector<double>& scores) {
    const int size = e.num / e.groups;
    auto merit = [&](int expert) { return scores[size_t(expert)] + (e.choice_bias ? e.choice_bias[expert] : 0.0); };
    auto better = [&](int a, int b) { return merit(a) > merit(b); };
    std::vector<std::pair<double, std::vector<int>>> groups;
    for (int group = 0; group < e.groups; group++) {
      std::vector<int> members;
      for (int i = 0; i < size; i++) members.push_back(group * size + i);
      std::stable_sort(members.begin(), members.end(), better);
      groups.push_back({-merit(members[0]) - (size > 1 ? merit(members[1]) : 0), members});
    }
    if (e.groups > 1) std::sort(groups.begin(), groups.end());
    std::vector<int> all;
    for (int group = 0; group < (e.groups > 1 ? e.top_groups : 1); group++)
      all.insert(all.end(), groups[size_t(group)].second.begin(), groups[size_t(group)].second.end());
    std::sort(all.begin(), all.end(), better);
    all.resize(size_t(e.per_token));
    return all;
  }

  void turn(const rl_layer& layer, double* head, const float* weight, size_t position) const {
    if (weight && (layer.qk_norm == RL_QK_NORM_HEAD || layer.qk_norm == RL_QK_NORM_HEADS)) norm(head, weight, nullptr, d_.head_dim);
    const int half = layer.rotary_dim / 2;
    for (int i = 0; i < half; i++) {
      const double a = head[i], b = head[half + i];
      const double c = layer.cosine[position * half + i], s = layer.sine[position * half + i];
      head[i] = a * c - b * s, head[half + i] = b * c + a * s;
    }
    if (layer.qk_norm != RL_QK_NORM_UNIT) return;
    double squares = 0;
    for (int i = 0; i < d_.head_dim; i++) squares += head[i] * head[i];
    for (int i = 0; i < d_.head_dim; i++) head[i] /= std::sqrt(squares / d_.head_dim + d_.norm_eps);
  }

  Rows attention(const rl_layer& layer, Rows qkv) const {
    const int dim = d_.head_dim, group = d_.heads / d_.kv_heads, own = layer.qk_norm == RL_QK_NORM_HEADS ? dim : 0;
    Rows out(qkv.size(), std::vector<double>(size_t(d_.heads) * dim));
    for (size_t t = 0; t < qkv.size(); t++) {
      if (layer.qk_norm == RL_QK_NORM_PROJECTION) {
        norm(qkv[t].data(), layer.q_norm, nullptr, d_.heads * dim);
        norm(&qkv[t][size_t(d_.heads) * dim], layer.k_norm, nullptr, d_.kv_heads * dim);
      }
      for (int h = 0; h < d_.heads; h++) turn(layer, &qkv[t][size_t(h) * dim], layer.q_norm + h * own, t);
      if (layer.qk_norm == RL_QK_SCALED)
        for (int i = 0; i < d_.heads * dim; i++) qkv[t][size_t(i)] *= layer.q_norm[t];
      for (int h = 0; h < d_.kv_heads; h++) turn(layer, &qkv[t][size_t(d_.heads + h) * dim], layer.k_norm + h * own, t);
      size_t first = layer.window && t + 1 > size_t(layer.window) ? t + 1 - size_t(layer.window) : 0;
      if (layer.chunked) first = t / size_t(layer.window) * size_t(layer.window);
      for (int h = 0; h < d_.heads; h++) {
        const size_t key_at = size_t(d_.heads + h / group) * dim, value_at = key_at + size_t(d_.kv_heads) * dim;
        std::vector<double> p;
        double most = -INFINITY, total = 0;
        for (size_t j = first; j <= t; j++) {
          double score = 0;
          for (int i = 0; i < dim; i++) score += qkv[t][size_t(h * dim + i)] * qkv[j][key_at + i];
          p.push_back(capped(score * layer.attention_scale, layer.attention_softcap));
          most = std::max(most, p.back());
        }
        for (double& value : p) total += value = std::exp(value - most);
        if (layer.sinks) total += std::exp(layer.sinks[h] - most);
        for (size_t j = first; j <= t; j++)
          for (int i = 0; i < dim; i++) out[t][size_t(h * dim + i)] += p[j - first] / total * qkv[j][value_at + i];
      }
    }
    return out;
  }

  const rl_decoder d_;
  std::map<const uint8_t*, std::vector<float>> unpacked_;
};
