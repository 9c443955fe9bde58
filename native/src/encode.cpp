// One forward pass of an encoder, top to bottom. As in step.cpp every thread runs this same text, phase by phase, and takes
// pieces of a phase from a shared counter.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "encoder.h"
#include "errors.h"

namespace ridgeline {
namespace {

constexpr int kPhasesPerLayer = 11;                // 7 if weights are float32
constexpr int kRowBlock = 96;                      // rows of a piece of a dense layer, about: they stay in the second-level cache
constexpr size_t kColumnBytes = size_t(384) << 10; // weights of a piece, about: so do they, for piece after piece
constexpr int kQueriesPerUnit = 96;                // at most, if there are few units; keys and values are gathered for each
constexpr int kUnitsPerThread = 8;                 // are enough
constexpr int kPiecesPerThread = 4;                // so that threads end a phase together

class Pass {
 public:
  Pass(rl_encoder_model& model, const rl_texts& texts, int pooling, bool normalize, float* out)
      : m_(model), spec_(model.spec), k_(*model.kernels), texts_(texts), pooling_(pooling), normalize_(normalize), out_(out),
        phases_(size_t(kPhasesPerLayer) * size_t(spec_.num_layers) + 2) {
    plan_attention();
  }

  void run() {
    m_.pool->run([this](int thread) {
      size_t phase = 0;
      embed(phase);
      for (const rl_encoder_layer& layer : m_.layers) encode_layer(layer, thread, phase);
      pool_texts(phase);
    });
  }

 private:
  void encode_layer(const rl_encoder_layer& layer, int thread, size_t& phase) {
    float *residual = m_.residual.floats(), *qkv = m_.qkv.floats(), *context = m_.context.floats(), *ffn = m_.ffn.floats();
    const size_t hidden = size_t(m_.hidden_stride);
    dense(layer.qkv, residual, hidden, Follow::Nothing, qkv, size_t(m_.qkv_stride), thread, phase);
    attention(thread, phase);
    dense(layer.output, context, hidden, Follow::Add, residual, hidden, thread, phase);
    norm(layer.attn_norm, layer.attn_norm_bias, phase);
    dense(layer.up, residual, hidden, activation(), ffn, size_t(m_.ffn_stride), thread, phase);
    dense(layer.down, ffn, size_t(m_.ffn_stride), Follow::Add, residual, hidden, thread, phase);
    norm(layer.ffn_norm, layer.ffn_norm_bias, phase);
  }

  // ---- the parts of a layer; each is one phase ----

  void embed(size_t& phase) {
    each(texts_.num_texts, phase, [&](int text) {
      for (int token = start(text); token < start(text + 1); token++) {
        const size_t hidden = size_t(spec_.hidden), position = size_t(spec_.first_position + token - start(text));
        const float* word = spec_.words + size_t(texts_.token_ids[token]) * hidden;
        const float* place = spec_.positions + position * hidden;
        const float* type = spec_.types ? spec_.type_rows + size_t(texts_.type_ids ? texts_.type_ids[token] : 0) * hidden : nullptr;
        float* row = m_.residual.floats() + size_t(token) * size_t(m_.hidden_stride);
        for (size_t i = 0; i < hidden; i++) row[i] = (type ? word[i] + type[i] : word[i]) + place[i];
        k_.layer_norm(row, spec_.norm, spec_.norm_bias, spec_.norm_eps, spec_.hidden, row);
      }
    });
  }

  void dense(const rl_matrix& w, const float* x, size_t x_stride, Follow follow, float* out, size_t out_stride, int thread, size_t& phase) {
    if (!m_.rounded) return float_dense(w, x, x_stride, follow, out, out_stride, phase);
    bf16_dense(w, x, x_stride, follow, out, out_stride, thread, phase);
  }

  void float_dense(const rl_matrix& w, const float* x, size_t x_stride, Follow follow, float* out, size_t out_stride, size_t& phase) {
    const int rows = texts_.num_tokens, tile = k_.dense_rows, tiles = (rows + tile - 1) / tile;
    const size_t panel_floats = size_t(padded_k(w.k)) * kPanel;
    pieces(w, sizeof(float), tiles, phase, [&](int first, int end, int panel, int panel_end) {
      const int row = first * tile, row_end = std::min(rows, end * tile);
      const size_t column = size_t(panel) * kPanel;
      float* at = out + size_t(row) * out_stride + column;
      k_.dense({x + size_t(row) * x_stride, x_stride, row_end - row, w.k, (panel_end - panel) * kPanel,
                reinterpret_cast<const float*>(w.data) + size_t(panel) * panel_floats, kPanel, panel_floats, w.bias + column, at,
                1.0f, follow, at, out_stride});
    });
  }

  // Inputs are rounded to bf16 in a phase of their own, then multiplied as a decoder's are: on AMX in tiles. Follow::Add adds to `out`.
  void bf16_dense(const rl_matrix& w, const float* x, size_t x_stride, Follow follow, float* out, size_t out_stride, int thread,
                  size_t& phase) {
    const Inputs in{m_.input_kind, Tiling(texts_.num_tokens, k_.tile_rows), padded_k(w.k), m_.inputs.data(), nullptr, nullptr, nullptr, 0, 1};
    each(in.tiling.count, phase, [&](int tile) {
      for (int row = in.tiling.first(tile); row < in.tiling.first(tile + 1); row++) k_.prepare_row(x + size_t(row) * x_stride, w.k, in, row);
    });
    pieces(w, sizeof(uint16_t), in.tiling.count, phase, [&](int first, int end, int panel, int panel_end) {
      for (int count; panel < panel_end; panel += count) {
        count = std::min(2, panel_end - panel);
        float* at = out + size_t(panel) * kPanel;
        k_.panel_products(w, panel, count, in, first, end, at, out_stride, follow == Follow::Add, m_.scratch[size_t(thread)].data());
        if (follow == Follow::Nothing || follow == Follow::Add) continue;
        for (int row = in.tiling.first(first); row < in.tiling.first(end); row++)
          k_.activate(spec_.activation, at + size_t(row) * out_stride, count * kPanel);
      }
    });
  }

  // Pieces are blocks of rows (whole tiles) times runs of panels. Of the two the larger stays in the second-level cache from
  // piece to piece: a run's weights, with one block after the other; or a block of long rows, all panels passing over it.
  template <typename Work>
  void pieces(const rl_matrix& w, size_t element_bytes, int tiles, size_t& phase, const Work& work) {
    const int rows = texts_.num_tokens, threads = m_.pool->size(), pairs = (num_panels(w.n) + 1) / 2;
    const bool rows_stay = size_t(w.k) * kRowBlock * element_bytes > kColumnBytes;
    int blocks = std::min(tiles, (rows + kRowBlock - 1) / kRowBlock), runs;
    if (rows_stay) {
      blocks = std::min(tiles, round_up(blocks, threads));  // pieces are few: as many for each thread
      runs = (2 * threads + blocks - 1) / blocks;
    } else {
      const int fitting = std::max(1, int(kColumnBytes / (2 * size_t(padded_k(w.k)) * kPanel * element_bytes)));
      runs = std::max((pairs + fitting - 1) / fitting, (kPiecesPerThread * threads + blocks - 1) / blocks);
    }
    runs = std::min(pairs, runs);
    each(blocks * runs, phase, [&](int piece) {
      const int run = rows_stay ? piece % runs : piece / blocks, block = rows_stay ? piece / runs : piece % blocks;
      work(tiles * block / blocks, tiles * (block + 1) / blocks, 2 * (pairs * run / runs),
           std::min(num_panels(w.n), 2 * (pairs * (run + 1) / runs)));
    });
  }

  void attention(int thread, size_t& phase) {
    const float* qkv = m_.qkv.floats();
    float* scratch = m_.scratch[size_t(thread)].floats();
    each(int(m_.units.size()), phase, [&](int index) {
      const TextUnit& unit = m_.units[size_t(index)];
      const size_t first = size_t(start(unit.text)), hidden = size_t(spec_.hidden);
      const float* queries = qkv + first * size_t(m_.qkv_stride) + size_t(unit.head) * size_t(m_.head_dim);
      float* out = m_.context.floats() + first * size_t(m_.hidden_stride) + size_t(unit.head) * size_t(m_.head_dim);
      (m_.rounded ? k_.attend_text_bf16 : k_.attend_text)({queries, queries + hidden, queries + 2 * hidden, size_t(m_.qkv_stride), start(unit.text + 1) - start(unit.text),
                      m_.head_dim, unit.first, unit.end, 1.0f / std::sqrt(float(m_.head_dim)), out, size_t(m_.hidden_stride)},
                     scratch);
    });
  }

  void norm(const float* weight, const float* bias, size_t& phase) {
    const int block = 16, blocks = (texts_.num_tokens + block - 1) / block;
    each(blocks, phase, [&](int piece) {
      for (int token = piece * block; token < std::min(texts_.num_tokens, (piece + 1) * block); token++) {
        float* row = m_.residual.floats() + size_t(token) * size_t(m_.hidden_stride);
        k_.layer_norm(row, weight, bias, spec_.norm_eps, spec_.hidden, row);
      }
    });
  }

  // ---- from token vectors to what was asked for ----

  void pool_texts(size_t& phase) {
    each(texts_.num_texts, phase, [&](int text) {
      const int first = start(text), end = start(text + 1);
      const size_t hidden = size_t(spec_.hidden);
      if (pooling_ == RL_POOL_NONE) {
        for (int token = first; token < end; token++) finish(row(token), out_ + size_t(token) * hidden);
        return;
      }
      float* out = out_ + size_t(text) * hidden;
      if (pooling_ == RL_POOL_FIRST || pooling_ == RL_POOL_LAST) return finish(row(pooling_ == RL_POOL_FIRST ? first : end - 1), out);
      std::memcpy(out, row(first), hidden * sizeof(float));
      for (int token = first + 1; token < end; token++)
        for (size_t i = 0; i < hidden; i++) out[i] = pooling_ == RL_POOL_MAX ? std::max(out[i], row(token)[i]) : out[i] + row(token)[i];
      const float count = float(end - first), divisor = pooling_ == RL_POOL_MEAN ? count : pooling_ == RL_POOL_MAX ? 1.0f : std::sqrt(count);
      for (size_t i = 0; i < hidden; i++) out[i] /= divisor;
      finish(out, out);
    });
  }

  void finish(const float* from, float* out) {
    const size_t hidden = size_t(spec_.hidden);
    double squares = 0;
    if (normalize_)
      for (size_t i = 0; i < hidden; i++) squares += double(from[i]) * double(from[i]);
    const float length = normalize_ ? float(std::max(std::sqrt(squares), 1e-12)) : 1.0f;
    for (size_t i = 0; i < hidden; i++) out[i] = from[i] / length;
  }

  // ---- sharing the work ----

  template <typename Work>
  void each(int count, size_t& phase, const Work& work) {
    phases_[phase++].share(count, [] {}, work);
  }

  void plan_attention() {
    m_.units.clear();
    const bool whole = texts_.num_texts * spec_.heads >= kUnitsPerThread * m_.pool->size();
    for (int text = 0; text < texts_.num_texts; text++) {
      const int tokens = start(text + 1) - start(text), parts = whole ? 1 : (tokens + kQueriesPerUnit - 1) / kQueriesPerUnit;
      for (int head = 0; head < spec_.heads; head++)
        for (int part = 0; part < parts; part++)
          m_.units.push_back({text, head, tokens * part / parts, tokens * (part + 1) / parts});
    }
    // Long ones first, so that the thread with the last piece does not keep the others waiting.
    std::stable_sort(m_.units.begin(), m_.units.end(), [&](const TextUnit& a, const TextUnit& b) { return cost(a) > cost(b); });
  }
  int64_t cost(const TextUnit& unit) const {
    return int64_t(unit.end - unit.first) * (start(unit.text + 1) - start(unit.text));
  }

  Follow activation() const {
    return spec_.activation == RL_GELU_ERF ? Follow::GeluErf : spec_.activation == RL_GELU_TANH ? Follow::GeluTanh : Follow::Relu;
  }
  int start(int text) const { return texts_.text_starts[text]; }
  const float* row(int token) const { return m_.residual.floats() + size_t(token) * size_t(m_.hidden_stride); }

  rl_encoder_model& m_;
  const rl_encoder& spec_;
  const Kernels& k_;
  const rl_texts& texts_;
  const int pooling_;
  const bool normalize_;
  float* out_;
  std::vector<Phase> phases_;
};

// A reason why the texts cannot be computed; empty if they can. Nothing is read through an index before this.
std::string texts_flaw(const rl_encoder& e, const rl_texts& t, int pooling) {
  if (pooling < RL_POOL_NONE || pooling > RL_POOL_LAST) return "no such pooling: " + std::to_string(pooling);
  if (t.num_tokens < 1 || t.num_tokens > e.max_tokens)
    return std::to_string(t.num_tokens) + " tokens in a call; planned for 1 to " + std::to_string(e.max_tokens);
  if (t.num_texts < 1 || t.num_texts > t.num_tokens || t.text_starts[0] != 0 || t.text_starts[t.num_texts] != t.num_tokens)
    return "the texts do not add up to the call's tokens";
  const int longest = e.max_positions - e.first_position;
  for (int text = 0; text < t.num_texts; text++) {
    const int begin = t.text_starts[text], end = t.text_starts[text + 1];
    if (begin >= end || end > t.num_tokens) return "text " + std::to_string(text) + " has no tokens";
    if (end - begin > longest)
      return "text " + std::to_string(text) + " has " + std::to_string(end - begin) + " tokens; there are positions for " + std::to_string(longest);
  }
  for (int token = 0; token < t.num_tokens; token++) {
    if (t.token_ids[token] < 0 || t.token_ids[token] >= e.vocab)
      return "token id " + std::to_string(t.token_ids[token]) + " of a vocabulary of " + std::to_string(e.vocab);
    if (t.type_ids && (t.type_ids[token] < 0 || t.type_ids[token] >= std::max(1, e.types)))
      return "type " + std::to_string(t.type_ids[token]) + " of " + std::to_string(e.types);
  }
  return "";
}

}  // namespace
}  // namespace ridgeline

extern "C" int rl_encoder_execute(rl_encoder_model* model, const rl_texts* texts, int32_t pooling, int32_t normalize, float* out) {
  const std::string flaw = ridgeline::texts_flaw(model->spec, *texts, pooling);
  if (!flaw.empty()) return ridgeline::fail(flaw);
  try {
    ridgeline::Pass(*model, *texts, pooling, normalize != 0, out).run();
  } catch (const std::bad_alloc&) {
    return ridgeline::fail("not enough memory to plan the call");
  }
  return 0;
}
