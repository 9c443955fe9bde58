// The decoder in double precision, as plainly as it can be said: one sequence, all tokens at once, no cache, weights as
// rl_unpack gives them. What the library's steps are compared with.
#pragma once
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
    }
    for (int i = 0; i < d_.num_layers; i++) {
      const rl_layer& layer = d_.layers[i];
      add(x, normed_if(times(layer.output, attention(layer, times(layer.qkv, normed(x, layer.attn_norm)))), layer.post_attn_norm));
      add(x, normed_if(times(layer.down, gated(times(layer.gate_up, normed(x, layer.ffn_norm)))), layer.post_ffn_norm));
    }
    Rows out = times(d_.lm_head, normed(x, d_.final_norm));
    for (std::vector<double>& row : out)
      for (double& value : row) value = capped(value, d_.logit_softcap);
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

  Rows times(const rl_matrix& m, const Rows& x) {
    const std::vector<float>& w = weights(m);
    Rows out(x.size(), std::vector<double>(size_t(m.n)));
    for (size_t row = 0; row < x.size(); row++)
      for (int o = 0; o < m.n; o++) {
        double sum = m.bias ? m.bias[o] : 0.0;
        for (int i = 0; i < m.k; i++) sum += double(w[size_t(o) * m.k + i]) * x[row][size_t(i)];
        out[row][size_t(o)] = sum;
      }
    return out;
  }

  void norm(double* x, const float* weight, int n) const {
    double squares = 0;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    const double inverse = 1 / std::sqrt(squares / n + double(d_.norm_eps));
    for (int i = 0; i < n; i++) x[i] *= inverse * weight[i];
  }
  Rows normed(Rows x, const float* weight) const {
    for (std::vector<double>& row : x) norm(row.data(), weight, int(row.size()));
    return x;
  }
  Rows normed_if(Rows x, const float* weight) const { return weight ? normed(std::move(x), weight) : x; }

  static void add(Rows& x, const Rows& y) {
    for (size_t row = 0; row < x.size(); row++)
      for (size_t i = 0; i < x[row].size(); i++) x[row][i] += y[row][i];
  }
  static double capped(double value, double cap) { return cap > 0 ? cap * std::tanh(value / cap) : value; }

  // Panels of 16 gates and 16 ups alternate.
  Rows gated(const Rows& x) const {
    Rows out(x.size(), std::vector<double>(size_t(d_.ffn)));
    for (size_t row = 0; row < x.size(); row++)
      for (int i = 0; i < d_.ffn; i++) {
        const double gate = x[row][size_t(i / 16 * 32 + i % 16)], up = x[row][size_t(i / 16 * 32 + 16 + i % 16)];
        const double inner = std::sqrt(2 / 3.14159265358979323846) * (gate + 0.044715 * gate * gate * gate);
        const double active = d_.activation == RL_SILU ? gate / (1 + std::exp(-gate)) : 0.5 * gate * (1 + std::tanh(inner));
        out[row][size_t(i)] = active * up;
      }
    return out;
  }

  void turn(const rl_layer& layer, double* head, const float* weight, size_t position) const {
    if (weight) norm(head, weight, d_.head_dim);
    const int half = layer.rotary_dim / 2;
    for (int i = 0; i < half; i++) {
      const double a = head[i], b = head[half + i];
      const double c = layer.cosine[position * half + i], s = layer.sine[position * half + i];
      head[i] = a * c - b * s, head[half + i] = b * c + a * s;
    }
  }

  Rows attention(const rl_layer& layer, Rows qkv) const {
    const int dim = d_.head_dim, group = d_.heads / d_.kv_heads;
    Rows out(qkv.size(), std::vector<double>(size_t(d_.heads) * dim));
    for (size_t t = 0; t < qkv.size(); t++) {
      for (int h = 0; h < d_.heads; h++) turn(layer, &qkv[t][size_t(h) * dim], layer.q_norm, t);
      for (int h = 0; h < d_.kv_heads; h++) turn(layer, &qkv[t][size_t(d_.heads + h) * dim], layer.k_norm, t);
      const size_t first = layer.window && t + 1 > size_t(layer.window) ? t + 1 - size_t(layer.window) : 0;
      for (int h = 0; h < d_.heads; h++) {
        const size_t key_at = size_t(d_.heads + h / group) * dim, value_at = key_at + size_t(d_.kv_heads) * dim;
        std::vector<double> p;
        double most = -INFINITY, total = 0;
        for (size_t j = first; j <= t; j++) {
          double score = 0;
          for (int i = 0; i < dim; i++) score += qkv[t][size_t(h * dim + i)] * qkv[j][key_at + i];
          p.push_back(capped(score * d_.attention_scale, d_.attention_softcap));
          most = std::max(most, p.back());
        }
        for (double& value : p) total += value = std::exp(value - most);
        for (size_t j = first; j <= t; j++)
          for (int i = 0; i < dim; i++) out[t][size_t(h * dim + i)] += p[j - first] / total * qkv[j][value_at + i];
      }
    }
    return out;
  }

  const rl_decoder d_;
  std::map<const uint8_t*, std::vector<float>> unpacked_;
};
