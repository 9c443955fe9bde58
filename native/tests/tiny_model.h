// Random decoders of tiny, uneven shapes, and sequences that run through them in steps of any make-up.
#pragma once
#include <algorithm>
#include <deque>
#include <iterator>
#include <string>
#include <vector>

#include "packed.h"

constexpr int kAnyFormat = -1;

inline int round_to(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// A decoder's table and weights. Everything a family may or may not have is drawn by lot from the seed.
class TinyModel {
 public:
  // all_experts: every token uses every expert, for comparisons in which rounding may change a close choice.
  TinyModel(uint64_t seed_, int format, int kv_format, bool deterministic, bool all_experts = false)
      : seed(seed_), random_(seed_), format_(format), all_experts_(all_experts) {
    decoder = {};
    decoder.hidden = random_.integer(9, 100), decoder.vocab = random_.integer(20, 90);
    decoder.kv_heads = random_.integer(1, 3), decoder.heads = decoder.kv_heads * random_.integer(1, 4);
    decoder.head_dim = 2 * random_.integer(2, 20);
    decoder.num_layers = random_.integer(1, 3), decoder.max_context = 200, decoder.num_blocks = 60;
    decoder.max_step_tokens = 64, decoder.kv_format = kv_format, decoder.deterministic = deterministic;
    decoder.norm_kind = one_in(3) ? RL_LAYER_NORM : RL_RMS_NORM, norm_biases_ = decoder.norm_kind == RL_LAYER_NORM && one_in(2);
    decoder.norm_eps = 1e-5f, decoder.embedding_scale = one_in(3) ? 1.5f : 1.0f;
    decoder.residual_scale = one_in(3) ? 0.7f : 1.0f, decoder.logit_scale = one_in(3) ? 0.5f : 1.0f;
    decoder.logit_softcap = one_in(3) ? 4.0f : 0.0f;
    decoder.embedding = matrix(decoder.vocab, decoder.hidden, false);
    if (one_in(3)) decoder.positions = matrix(decoder.max_context + random_.integer(0, 9), decoder.hidden, false);
    decoder.lm_head = one_in(2) ? decoder.embedding : matrix(decoder.vocab, decoder.hidden, one_in(3));
    decoder.final_norm = norm();
    for (int i = 0; i < decoder.num_layers; i++) layers_.push_back(make_layer());
    decoder.layers = layers_.data();
  }
  TinyModel(const TinyModel&) = delete;

  std::string name() const {
    return std::string(format_ == kAnyFormat ? "any format" : format_name(format_)) + ", KV " + kKvNames[decoder.kv_format] +
           (decoder.deterministic ? ", deterministic" : "") + ", seed " + std::to_string(seed);
  }
  std::vector<int32_t> random_tokens(int count) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = random_.integer(0, decoder.vocab - 1);
    return tokens;
  }
  rl_layer& layer(int index) {  // to change before a model is made of it
    return layers_[size_t(index)];
  }

  rl_decoder decoder;
  const uint64_t seed;

 private:
  bool one_in(int count) { return random_.integer(1, count) == 1; }

  // Weights that keep the size of what they are multiplied with; rows that are not used are zero.
  rl_matrix matrix(int n, int k, bool bias) {
    return packed_matrix(n, k, bias, [](int) { return true; });
  }
  template <class Used>
  rl_matrix packed_matrix(int n, int k, bool bias, Used used) {
    std::vector<float> weights = random_floats(random_, size_t(n) * k, 1.0f / std::sqrt(float(k)));
    std::vector<float> offsets = random_floats(random_, n, 0.3f);
    for (int row = 0; row < n; row++)
      if (!used(row)) std::fill_n(&weights[size_t(row) * k], k, 0.0f), offsets[row] = 0.0f;
    packed_.emplace_back(format_ == kAnyFormat ? kFormats[random_.integer(0, int(std::size(kFormats)) - 1)] : format_, n, k, weights);
    if (bias) packed_.back().matrix.bias = keep(std::move(offsets));
    return packed_.back().matrix;
  }
  const float* keep(std::vector<float> values) {
    floats_.push_back(std::move(values));
    return floats_.back().data();
  }
  const float* norm_weights(int n) {
    std::vector<float> weights = random_floats(random_, n, 0.2f);
    for (float& weight : weights) weight += 1.0f;
    return keep(std::move(weights));
  }
  rl_norm norm() {
    return {norm_weights(decoder.hidden), norm_biases_ ? keep(random_floats(random_, decoder.hidden, 0.2f)) : nullptr};
  }
  // Panels of 16 gate and 16 up rows alternate; rows beyond the size are zero.
  rl_matrix gate_up(int size, int count, bool bias) {
    const int each = 2 * round_to(size, 16);
    return packed_matrix(count * each, decoder.hidden, bias, [&](int row) { return row % each / 32 * 16 + row % 16 < size; });
  }

  rl_layer make_layer() {
    const rl_decoder& d = decoder;
    const bool biases = one_in(2);
    rl_layer l{};
    l.qkv = matrix((d.heads + 2 * d.kv_heads) * d.head_dim, d.hidden, biases);
    l.output = matrix(d.hidden, d.heads * d.head_dim, biases && one_in(2));
    l.parallel = one_in(4);
    const bool before = !one_in(5);
    if (before) l.attn_norm = norm(), l.ffn_norm = l.parallel && one_in(2) ? l.attn_norm : norm();
    if (!before || one_in(2)) l.post_attn_norm = norm(), l.post_ffn_norm = norm();
    l.qk_norm = random_.integer(RL_QK_PLAIN, RL_QK_SCALED);
    const bool whole = l.qk_norm != RL_QK_NORM_HEAD;
    if (l.qk_norm == RL_QK_SCALED) l.q_norm = norm_weights(d.max_context);
    else if (l.qk_norm != RL_QK_PLAIN && l.qk_norm != RL_QK_NORM_UNIT)
      l.q_norm = norm_weights(d.head_dim * (whole ? d.heads : 1)), l.k_norm = norm_weights(d.head_dim * (whole ? d.kv_heads : 1));
    if (one_in(3)) l.sinks = keep(random_floats(random_, d.heads, 1.0f));
    l.attention_scale = 1.0f / std::sqrt(float(d.head_dim)), l.attention_softcap = one_in(3) ? 5.0f : 0.0f;
    l.rotary_dim = one_in(3) ? 2 * random_.integer(0, d.head_dim / 2) : d.head_dim;
    l.window = one_in(3) ? random_.integer(1, 40) : 0, l.chunked = l.window && one_in(2);
    std::vector<float> cosine, sine;
    for (int position = 0; position < d.max_context; position++)
      for (int i = 0; i < l.rotary_dim / 2; i++) {
        const double angle = position * std::pow(100.0, -2.0 * i / l.rotary_dim);
        cosine.push_back(float(std::cos(angle))), sine.push_back(float(std::sin(angle)));
      }
    l.cosine = keep(std::move(cosine)), l.sine = keep(std::move(sine));
    l.ffn_kind = random_.integer(RL_FFN_GATED, RL_FFN_EXPERTS), l.activation = random_.integer(RL_SILU, RL_RELU);
    l.ffn = l.ffn_kind == RL_FFN_EXPERTS && one_in(2) ? 0 : random_.integer(7, 110);
    if (l.ffn) {
      const bool bias = biases && one_in(2);
      l.gate_up = l.ffn_kind == RL_FFN_PLAIN ? matrix(l.ffn, d.hidden, bias) : gate_up(l.ffn, 1, bias);
      l.down = matrix(d.hidden, l.ffn, biases && one_in(2));
    }
    if (l.ffn_kind == RL_FFN_EXPERTS) l.experts = make_experts(l.ffn && one_in(2));
    return l;
  }

  rl_experts make_experts(bool shared_gate) {
    const rl_decoder& d = decoder;
    rl_experts e{};
    e.groups = one_in(2) ? 1 : random_.integer(2, 3), e.top_groups = all_experts_ ? e.groups : random_.integer(1, e.groups);
    e.num = e.groups * random_.integer(1, 6);
    e.per_token = all_experts_ ? e.num : random_.integer(1, e.top_groups * (e.num / e.groups));
    e.size = random_.integer(7, 70), e.shared_gate = shared_gate;
    e.scores = one_in(2) ? RL_SOFTMAX : RL_SIGMOID, e.normalized = one_in(2), e.scales_input = one_in(3);
    // Its weights jump where two scores are equal, so that rounding changes them.
    if (e.groups == 1 && !all_experts_ && one_in(3)) e.scores = RL_SPARSEMIXER, e.margin = 0.8f;
    e.scale = one_in(2) ? 1.0f : 1.7f, e.clamp = one_in(3) ? 1.5f : 0.0f;
    e.router = matrix(e.num + shared_gate, d.hidden, one_in(2));
    if (e.scores != RL_SPARSEMIXER && one_in(2)) e.choice_bias = keep(random_floats(random_, e.num, 0.3f));
    e.gate_up = gate_up(e.size, e.num, one_in(2));
    const int each = round_to(d.hidden, 16);
    e.down = packed_matrix(e.num * each, e.size, one_in(2), [&](int row) { return row % each < d.hidden; });
    return e;
  }

  Random random_;
  const int format_;
  const bool all_experts_;
  bool norm_biases_ = false;
  std::deque<Packed> packed_;
  std::deque<std::vector<float>> floats_;
  std::vector<rl_layer> layers_;
};

struct Sequence {
  std::vector<int32_t> tokens, table;  // table: its blocks
};

// Sequences with separate blocks, in random order.
inline std::vector<Sequence> random_sequences(TinyModel& model, Random& random, const std::vector<int>& lengths) {
  std::vector<int32_t> blocks;
  for (int i = 0; i < model.decoder.num_blocks; i++) blocks.push_back(i);
  for (int i = int(blocks.size()) - 1; i > 0; i--) std::swap(blocks[i], blocks[random.integer(0, i)]);
  std::vector<Sequence> sequences;
  for (int length : lengths) {
    sequences.push_back({model.random_tokens(length), {}});
    for (int i = 0; i < (length + 15) / 16; i++) sequences.back().table.push_back(blocks.back()), blocks.pop_back();
  }
  return sequences;
}

// Some neighbouring tokens of a sequence: a row of a step.
struct Piece {
  const Sequence* sequence;
  int first, count;
};

// A step's arrays, each of exactly its size.
struct StepArrays {
  std::vector<int32_t> tokens, positions, starts{0}, tables, logit_rows;
  int table_width = 0;
  int32_t deterministic = 0;

  explicit StepArrays(const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) table_width = std::max(table_width, int(piece.sequence->table.size()));
    for (const Piece& piece : pieces) {
      for (int i = piece.first; i < piece.first + piece.count; i++) {
        logit_rows.push_back(int32_t(tokens.size()));
        tokens.push_back(piece.sequence->tokens[size_t(i)]), positions.push_back(i);
      }
      starts.push_back(int32_t(tokens.size()));
      const std::vector<int32_t>& table = piece.sequence->table;
      for (int i = 0; i < table_width; i++) tables.push_back(i < int(table.size()) ? table[size_t(i)] : -1);
    }
    for (std::vector<int32_t>* array : {&tokens, &positions, &starts, &tables}) array->shrink_to_fit();
  }
  rl_step step() const {
    return {int32_t(tokens.size()), int32_t(starts.size()) - 1, int32_t(logit_rows.size()), table_width, deterministic, tokens.data(),
            positions.data(), starts.data(), tables.data(), logit_rows.data()};
  }
};

using Logits = std::vector<std::vector<float>>;  // [token][vocab]

// A model that runs.
class Session {
 public:
  Session(const rl_decoder& decoder, const std::string& isa, int threads)
      : vocab_(decoder.vocab), model(rl_model_create(&decoder, isa.c_str(), threads), rl_model_free) {
    if (!model) std::fprintf(stderr, "no model: %s\n", rl_last_error());
    if (!CHECK(model != nullptr)) std::exit(report());
    CHECK(isa == rl_model_isa(model.get()));
  }

  // The logits of every token of the pieces, or of those asked for.
  Logits step(const StepArrays& arrays) {
    const rl_step step = arrays.step();
    Aligned<float> flat(size_t(step.num_logits) * vocab_);
    CHECK_OK(rl_step_execute(model.get(), &step, flat.data(), nullptr));
    Logits logits;
    for (int i = 0; i < step.num_logits; i++) logits.emplace_back(flat.data() + size_t(i) * vocab_, flat.data() + size_t(i + 1) * vocab_);
    return logits;
  }
  Logits step(const std::vector<Piece>& pieces) { return step(StepArrays(pieces)); }

  // A sequence from `first` on, in steps of `chunk` tokens.
  Logits run(const Sequence& sequence, int chunk, int first = 0) {
    Logits all;
    for (int at = first; at < int(sequence.tokens.size()); at += chunk)
      for (auto& row : step({{&sequence, at, std::min(chunk, int(sequence.tokens.size()) - at)}})) all.push_back(std::move(row));
    return all;
  }

 private:
  const int vocab_;

 public:
  const std::unique_ptr<rl_model, void (*)(rl_model*)> model;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}
inline bool same_bits(const Logits& a, const Logits& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const std::vector<float>& x, const std::vector<float>& y) { return same_bits(x, y); });
}
