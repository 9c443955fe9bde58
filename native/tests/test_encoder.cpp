// The library's encoder against one written in double precision; a text's vector in any batch; invalid arguments.
#include <functional>

#include "tiny_encoder.h"

namespace {

using Texts = std::vector<std::vector<int>>;
std::string isa;

struct Model {
  rl_encoder_model* model;

  Model(const TinyEncoder& tiny, int threads) : model(rl_encoder_create(&tiny.encoder, isa.c_str(), threads)) {
    if (!CHECK(model != nullptr)) std::fprintf(stderr, "  the reason was: %s\n", rl_last_error()), std::exit(1);
  }
  ~Model() { rl_encoder_free(model); }

  std::vector<float> run(const Texts& texts, const Texts& types, int pooling, bool normalize, int hidden) const {
    std::vector<int32_t> ids, kinds, starts{0};
    for (size_t t = 0; t < texts.size(); t++) {
      ids.insert(ids.end(), texts[t].begin(), texts[t].end());
      kinds.insert(kinds.end(), types[t].begin(), types[t].end());
      starts.push_back(int32_t(ids.size()));
    }
    const size_t rows = pooling == RL_POOL_NONE ? ids.size() : texts.size();
    Aligned<float> out(rows * size_t(hidden));
    const rl_texts call{int32_t(ids.size()), int32_t(texts.size()), ids.data(), kinds.data(), starts.data()};
    CHECK_OK(rl_encoder_execute(model, &call, pooling, normalize, out.data()));
    return {out.data(), out.data() + out.size()};
  }
};

Texts random_texts(Random& random, std::initializer_list<int> lengths, int below) {
  Texts texts;
  for (int length : lengths) {
    texts.emplace_back();
    for (int i = 0; i < length; i++) texts.back().push_back(random.integer(0, below - 1));
  }
  return texts;
}

std::vector<double> pooled(const std::vector<std::vector<double>>& rows, int pooling) {
  if (pooling == RL_POOL_FIRST) return rows.front();
  if (pooling == RL_POOL_LAST) return rows.back();
  std::vector<double> out = rows[0];
  for (size_t t = 1; t < rows.size(); t++)
    for (size_t i = 0; i < out.size(); i++) out[i] = pooling == RL_POOL_MAX ? std::max(out[i], rows[t][i]) : out[i] + rows[t][i];
  const double count = double(rows.size()), divisor = pooling == RL_POOL_MEAN ? count : pooling == RL_POOL_MAX ? 1 : std::sqrt(count);
  for (double& x : out) x /= divisor;
  return out;
}

void vectors_are_those_of_the_reference(const TinyEncoder& tiny, uint64_t seed) {
  Random random(seed);
  const int hidden = tiny.encoder.hidden;
  const Texts texts = random_texts(random, {1, 7, 13, 2, 130, 25}, tiny.encoder.vocab);
  Texts types = random_texts(random, {1, 7, 13, 2, 130, 25}, std::max(1, tiny.encoder.types));
  const Model model(tiny, 2);
  // A value beside the middle of two bf16 numbers may be rounded to the other one, and the rest follows: that is rare.
  const double tolerance = tiny.format == RL_F32 ? 2e-5 : 1e-1;
  double difference = 0, count = 0;
  std::vector<std::vector<std::vector<double>>> states;
  for (size_t t = 0; t < texts.size(); t++) states.push_back(tiny.hidden_states(texts[t], types[t]));
  for (int pooling : {RL_POOL_FIRST, RL_POOL_MEAN, RL_POOL_MAX, RL_POOL_MEAN_ROOT, RL_POOL_LAST}) {
    about("%d heads, hidden %d, activation %d, pooling %d", tiny.encoder.heads, hidden, tiny.encoder.activation, pooling);
    const std::vector<float> out = model.run(texts, types, pooling, false, hidden);
    for (size_t t = 0; t < texts.size(); t++) {
      const std::vector<double> expected = pooled(states[t], pooling);
      for (size_t i = 0; i < expected.size(); i++) {
        CHECK_NEAR(out[t * size_t(hidden) + i], expected[i], tolerance * (1 + std::fabs(expected[i])));
        difference += std::fabs(out[t * size_t(hidden) + i] - expected[i]), count++;
      }
    }
  }
  CHECK(difference / count < (tiny.format == RL_F32 ? 2e-6 : 1e-3));
  const std::vector<float> tokens = model.run(texts, types, RL_POOL_NONE, true, hidden);
  size_t row = 0;
  for (const auto& text : states)
    for (const auto& state : text) {
      double squares = 0;
      for (double x : state) squares += x * x;
      for (size_t i = 0; i < state.size(); i++) CHECK_NEAR(tokens[row * size_t(hidden) + i], state[i] / std::sqrt(squares), tolerance);
      row++;
    }
}

void a_text_has_one_vector_in_any_company(const TinyEncoder& tiny, uint64_t seed) {
  Random random(seed);
  const int hidden = tiny.encoder.hidden;
  const Texts texts = random_texts(random, {5, 120, 1, 31, 60}, tiny.encoder.vocab);
  Texts types = texts;
  for (auto& each : types) std::fill(each.begin(), each.end(), 0);
  const Model two(tiny, 2), three(tiny, 3);
  const std::vector<float> together = two.run(texts, types, RL_POOL_MEAN, true, hidden);
  about("hidden %d, threads", hidden);
  CHECK(together == three.run(texts, types, RL_POOL_MEAN, true, hidden));
  for (size_t t = 0; t < texts.size(); t++) {
    about("hidden %d, text %d alone", hidden, int(t));
    const std::vector<float> alone = two.run({texts[t]}, {types[t]}, RL_POOL_MEAN, true, hidden);
    CHECK(std::equal(alone.begin(), alone.end(), together.begin() + std::ptrdiff_t(t) * hidden));
  }
}

void tables_that_do_not_fit_are_refused() {
  const std::pair<const char*, std::function<void(TinyEncoder&)>> cases[] = {
      {"size", [](TinyEncoder& t) { t.encoder.hidden = 0; }},
      {"size", [](TinyEncoder& t) { t.encoder.max_tokens = 1 << 30; }},
      {"evenly", [](TinyEncoder& t) { t.encoder.heads = 5; }},
      {"types", [](TinyEncoder& t) { t.encoder.types = 0; }},
      {"types", [](TinyEncoder& t) { t.encoder.type_rows = nullptr; }},
      {"first position", [](TinyEncoder& t) { t.encoder.first_position = 140; }},
      {"activation", [](TinyEncoder& t) { t.encoder.activation = RL_SILU; }},
      {"missing", [](TinyEncoder& t) { t.encoder.words = nullptr; }},
      {"layer 1: up is", [](TinyEncoder& t) { t.layers[1].up.n--; }},
      {"layer 0: down is not in the format", [](TinyEncoder& t) { t.layers[0].down.format = RL_BF16; }},
      {"neither float32", [](TinyEncoder& t) { t.layers[0].qkv.format = RL_Q8_H; }},
      {"layer 0: qkv has no data or no bias", [](TinyEncoder& t) { t.layers[0].qkv.bias = nullptr; }},
      {"layer 1: a norm", [](TinyEncoder& t) { t.layers[1].ffn_norm_bias = nullptr; }},
  };
  for (const auto& [words, spoil] : cases) {
    TinyEncoder tiny(3, 2, 16, 40, RL_GELU_ERF);
    spoil(tiny);
    about("a table refused with: %s", words);
    CHECK(rl_encoder_create(&tiny.encoder, isa.c_str(), 1) == nullptr);
    CHECK(std::string(rl_last_error()).find(words) != std::string::npos);
  }
}

void texts_that_do_not_fit_are_refused() {
  const TinyEncoder tiny(4, 2, 16, 40, RL_RELU);
  const Model model(tiny, 1);
  std::vector<int32_t> ids(301, 1), types(301, 0);
  std::vector<float> out(301 * 32);
  auto run = [&](std::vector<int32_t> starts, int pooling) {
    const rl_texts call{starts.back(), int32_t(starts.size()) - 1, ids.data(), types.data(), starts.data()};
    return rl_encoder_execute(model.model, &call, pooling, 1, out.data());
  };
  CHECK_REFUSED(run({0, 301}, RL_POOL_MEAN), "301 tokens");
  CHECK_REFUSED(run({0, 0}, RL_POOL_MEAN), "0 tokens");
  CHECK_REFUSED(run({0, 141}, RL_POOL_MEAN), "positions for 140");
  CHECK_REFUSED(run({0, 3, 3, 5}, RL_POOL_MEAN), "no tokens");
  CHECK_REFUSED(run({0, 9, 3, 5}, RL_POOL_MEAN), "no tokens");
  CHECK_REFUSED(run({1, 5}, RL_POOL_MEAN), "add up");
  CHECK_REFUSED(run({0, 5}, 6), "pooling");
  ids[2] = 50;
  CHECK_REFUSED(run({0, 5}, RL_POOL_MEAN), "token id 50");
  ids[2] = 1, types[3] = 2;
  CHECK_REFUSED(run({0, 5}, RL_POOL_MEAN), "type 2");
  types[3] = 1;
  CHECK_OK(run({0, 5}, RL_POOL_MEAN));
}

}  // namespace

int main() {
  isa = isa_under_test();
  const int activations[] = {RL_GELU_ERF, RL_GELU_TANH, RL_RELU};
  const int shapes[][3] = {{2, 16, 64}, {3, 7, 50}, {1, 32, 33}, {4, 24, 17}, {12, 4, 100}};
  uint64_t seed = 10;
  for (const auto& [heads, head_dim, ffn] : shapes) {
    if (seed++; kUnderThreadSanitizer && seed % 2) continue;
    for (int format : {RL_F32, RL_BF16}) {
      const int types = int(seed % 3), first = int(seed % 2);
      vectors_are_those_of_the_reference(TinyEncoder(seed, heads, head_dim, ffn, activations[seed % 3], types, first, format), seed);
      a_text_has_one_vector_in_any_company(TinyEncoder(seed, heads, head_dim, ffn, RL_GELU_ERF, 2, 0, format), seed);
    }
  }
  tables_that_do_not_fit_are_refused();
  texts_that_do_not_fit_are_refused();
  return report();
}
