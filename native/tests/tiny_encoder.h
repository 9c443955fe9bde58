// A random encoder of a few kilobytes in memory of exactly its size, and the same encoder in double precision: if its weights are
// bfloat16, with the same roundings.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>

#include "packed.h"

struct TinyEncoder {
  std::deque<Packed> matrices;
  std::deque<Aligned<float>> vectors;
  std::vector<rl_encoder_layer> layers;
  rl_encoder encoder{};
  int format;

  TinyEncoder(uint64_t seed, int heads, int head_dim, int ffn, int activation, int types = 2, int first_position = 0, int format = RL_F32)
      : format(format) {
    Random random(seed);
    const int hidden = heads * head_dim;
    encoder.hidden = hidden, encoder.heads = heads, encoder.ffn = ffn, encoder.vocab = 50, encoder.types = types;
    encoder.num_layers = 2, encoder.max_positions = 140, encoder.first_position = first_position;
    encoder.activation = activation, encoder.max_tokens = 300, encoder.norm_eps = 1e-6f;
    encoder.words = floats(random, size_t(encoder.vocab) * hidden, 1.0f);
    encoder.positions = floats(random, size_t(encoder.max_positions) * hidden, 0.5f);
    encoder.type_rows = types ? floats(random, size_t(types) * hidden, 0.5f) : nullptr;
    encoder.norm = floats(random, size_t(hidden), 1.0f), encoder.norm_bias = floats(random, size_t(hidden), 0.1f);
    for (int i = 0; i < encoder.num_layers; i++)
      layers.push_back({matrix(random, 3 * hidden, hidden), matrix(random, hidden, hidden), matrix(random, ffn, hidden),
                        matrix(random, hidden, ffn), floats(random, size_t(hidden), 1.0f), floats(random, size_t(hidden), 0.1f),
                        floats(random, size_t(hidden), 1.0f), floats(random, size_t(hidden), 0.1f)});
    encoder.layers = layers.data();
  }

  // ---- in double precision ----

  using Row = std::vector<double>;

  std::vector<Row> hidden_states(const std::vector<int>& tokens, const std::vector<int>& types) const {
    const size_t hidden = size_t(encoder.hidden);
    std::vector<Row> rows;
    for (size_t t = 0; t < tokens.size(); t++) {
      Row row(hidden);
      for (size_t i = 0; i < hidden; i++) {
        row[i] = double(encoder.words[size_t(tokens[t]) * hidden + i]) + encoder.positions[(t + size_t(encoder.first_position)) * hidden + i];
        if (encoder.types) row[i] += encoder.type_rows[size_t(types[t]) * hidden + i];
      }
      rows.push_back(normed(row, encoder.norm, encoder.norm_bias));
    }
    for (const rl_encoder_layer& layer : layers) rows = layer_of(layer, rows);
    return rows;
  }

 private:
  std::vector<Row> layer_of(const rl_encoder_layer& layer, std::vector<Row> rows) const {
    const std::vector<Row> qkv = dense(layer.qkv, rows);
    std::vector<Row> mixed(rows.size(), Row(size_t(encoder.hidden)));
    for (int head = 0; head < encoder.heads; head++) attend(qkv, head, mixed);
    rows = added(rows, dense(layer.output, mixed), layer.attn_norm, layer.attn_norm_bias);
    std::vector<Row> inner = dense(layer.up, rows);
    for (Row& row : inner)
      for (double& x : row) x = activated(x);
    return added(rows, dense(layer.down, inner), layer.ffn_norm, layer.ffn_norm_bias);
  }

  void attend(const std::vector<Row>& qkv, int head, std::vector<Row>& mixed) const {
    const size_t dim = size_t(encoder.hidden / encoder.heads), at = size_t(head) * dim, hidden = size_t(encoder.hidden);
    for (size_t q = 0; q < qkv.size(); q++) {
      Row scores;
      for (const Row& key : qkv) {
        double dot = 0;
        for (size_t i = 0; i < dim; i++) dot += rounded(qkv[q][at + i]) * rounded(key[hidden + at + i]);
        scores.push_back(dot / std::sqrt(double(dim)));
      }
      const double most = *std::max_element(scores.begin(), scores.end());
      double total = 0;
      for (double& score : scores) total += score = std::exp(score - most);
      for (size_t k = 0; k < qkv.size(); k++)
        for (size_t i = 0; i < dim; i++) mixed[q][at + i] += rounded(scores[k] / total) * rounded(qkv[k][2 * hidden + at + i]);
    }
  }

  std::vector<Row> dense(const rl_matrix& m, const std::vector<Row>& rows) const {
    std::vector<float> weights(size_t(m.n) * size_t(m.k));
    CHECK_OK(rl_unpack(&m, 0, m.n, weights.data()));
    std::vector<Row> out;
    for (const Row& row : rows) {
      Row sums(m.bias, m.bias + m.n);
      for (size_t n = 0; n < sums.size(); n++)
        for (size_t k = 0; k < row.size(); k++) sums[n] += double(weights[n * row.size() + k]) * rounded(row[k]);
      out.push_back(sums);
    }
    return out;
  }

  std::vector<Row> added(std::vector<Row> rows, const std::vector<Row>& branch, const float* norm, const float* bias) const {
    for (size_t t = 0; t < rows.size(); t++) {
      for (size_t i = 0; i < rows[t].size(); i++) rows[t][i] += branch[t][i];
      rows[t] = normed(rows[t], norm, bias);
    }
    return rows;
  }

  double rounded(double x) const {
    if (format == RL_F32) return x;
    float value = float(x);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    std::memcpy(&value, &bits, 4);
    return double(value);
  }

  Row normed(Row row, const float* norm, const float* bias) const {
    double mean = 0, squares = 0;
    for (double x : row) mean += x / double(row.size());
    for (double x : row) squares += (x - mean) * (x - mean) / double(row.size());
    for (size_t i = 0; i < row.size(); i++) row[i] = (row[i] - mean) / std::sqrt(squares + double(encoder.norm_eps)) * norm[i] + bias[i];
    return row;
  }

  double activated(double x) const {
    if (encoder.activation == RL_RELU) return std::max(x, 0.0);
    if (encoder.activation == RL_GELU_ERF) return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  }

  const float* floats(Random& random, size_t count, float size) {
    const std::vector<float> values = random_floats(random, count, size);
    vectors.emplace_back(count);
    std::copy(values.begin(), values.end(), vectors.back().data());
    return vectors.back().data();
  }

  rl_matrix matrix(Random& random, int n, int k) {
    matrices.emplace_back(format, n, k, random_floats(random, size_t(n) * size_t(k), 1.5f / std::sqrt(float(k))));
    matrices.back().matrix.bias = floats(random, size_t(n), 0.3f);
    return matrices.back().matrix;
  }
};
