// One broken sequence harms no other: NaN in a sequence's numbers, or left behind in blocks it once held, changes no bit
// of anybody else's logits, and shows in its own.
#include "formats.h"
#include "tiny_model.h"

namespace {

std::string isa;

// A model whose token 0 is embedded as NaN: packing refuses such weights, so that it is put into the packed matrix.
class Poisoned : public TinyModel {
 public:
  Poisoned(uint64_t seed, int kv_format, bool deterministic, float poison)
      : TinyModel(seed, kAnyFormat, kv_format, deterministic), embedding_(RL_F32, decoder.vocab, decoder.hidden, weights()) {
    float* panel = reinterpret_cast<float*>(embedding_.data.data());  // [hidden][16]: token 0 is the first of each 16
    panel[size_t(seed % uint64_t(decoder.hidden)) * ridgeline::kPanel] = poison;
    decoder.embedding = embedding_.matrix;  // separate: a head tied to it would show the poison to every sequence
  }
  std::vector<int32_t> healthy_tokens(int count) {
    std::vector<int32_t> tokens = random_tokens(count);
    for (int32_t& token : tokens) token = std::max(token, 1);
    return tokens;
  }

 private:
  std::vector<float> weights() const {
    Random random(seed);
    return random_floats(random, size_t(decoder.vocab) * decoder.hidden, 0.3f);
  }
  Packed embedding_;
};

struct Scene {
  Poisoned model;
  std::vector<Sequence> healthy, broken;

  Scene(uint64_t seed, int kv_format, bool deterministic, float poison) : model(seed, kv_format, deterministic, poison) {
    Random random(seed);
    healthy = random_sequences(model, random, {30, 47, 17, 80});
    for (Sequence& sequence : healthy) sequence.tokens = model.healthy_tokens(int(sequence.tokens.size()));
    broken = {healthy.back()}, healthy.pop_back();
    broken[0].tokens[size_t(random.integer(0, 20))] = 0;
  }
};

template <class Case>
void each_scene(Case check) {
  uint64_t seed = 1;
  for (int kv_format : {RL_KV_F32, RL_KV_BF16, RL_KV_INT8, RL_KV_INT4})
    for (bool deterministic : {true, false})
      for (float poison : {NAN, INFINITY}) {
        Scene scene(seed++, kv_format, deterministic, poison);
        about("%s, poison %g", scene.model.name().c_str(), poison);
        check(scene);
      }
}

// All sequences in the same steps: first a part of each as a prefill, then one token at a time.
std::vector<Logits> run_together(Session& session, const std::vector<Sequence>& sequences, int steps) {
  std::vector<Logits> logits(sequences.size());
  for (int i = 0; i < steps; i++) {
    std::vector<Piece> pieces;
    for (const Sequence& sequence : sequences) pieces.push_back({&sequence, i ? 8 + i : 0, i ? 1 : 9});
    const Logits rows = session.step(pieces);
    size_t row = 0;
    for (size_t s = 0; s < sequences.size(); s++)
      for (int t = 0; t < pieces[s].count; t++) logits[s].push_back(rows[row++]);
  }
  return logits;
}

void a_broken_sequence_in_the_batch_changes_no_other() {
  each_scene([](Scene& scene) {
    std::vector<Sequence> all = scene.healthy, well = scene.healthy;
    all.insert(all.begin() + 1, scene.broken[0]);
    Sequence mended = scene.broken[0];  // the same batch without the poison
    std::replace(mended.tokens.begin(), mended.tokens.end(), 0, 1);
    well.insert(well.begin() + 1, mended);
    Session with(scene.model.decoder, isa, 2), without(scene.model.decoder, isa, 2);
    const std::vector<Logits> sick = run_together(with, all, 8), fit = run_together(without, well, 8);
    for (size_t s = 0; s < all.size(); s++)
      if (s != 1) CHECK(same_bits(sick[s], fit[s]));
    for (const Logits& logits : fit)
      for (const std::vector<float>& row : logits)
        for (float value : row) CHECK(std::isfinite(value));
  });
}

void a_broken_sequence_shows_from_its_broken_token_on() {
  each_scene([](Scene& scene) {
    const Sequence& sequence = scene.broken[0];
    const int broken = int(std::find(sequence.tokens.begin(), sequence.tokens.end(), 0) - sequence.tokens.begin());
    for (int chunk : {1, 7}) {
      const Logits logits = Session(scene.model.decoder, isa, 2).run(sequence, chunk);
      for (int t = 0; t < int(logits.size()); t++) {
        if (t < broken / chunk * chunk)  // tokens of the same step before the broken one may see it in their chunk
          for (float value : logits[size_t(t)]) CHECK(std::isfinite(value));
        if (t == broken)
          for (float value : logits[size_t(t)]) CHECK(!std::isfinite(value));
      }
    }
  });
}

// Blocks go from hand to hand without being cleared.
void blocks_of_a_broken_sequence_serve_the_next_one() {
  each_scene([](Scene& scene) {
    Session used(scene.model.decoder, isa, 2), fresh(scene.model.decoder, isa, 2);
    used.run(scene.broken[0], 16);
    Sequence heir = scene.healthy[1];
    heir.table = scene.broken[0].table;
    for (int chunk : {5, 1}) {
      const Logits logits = used.run(heir, chunk);
      CHECK(same_bits(logits, fresh.run(heir, chunk)));
      for (float value : logits.back()) CHECK(std::isfinite(value));
    }
  });
}

}  // namespace

int main() {
  isa = isa_under_test();
  a_broken_sequence_in_the_batch_changes_no_other();
  a_broken_sequence_shows_from_its_broken_token_on();
  blocks_of_a_broken_sequence_serve_the_next_one();
  return report();
}
