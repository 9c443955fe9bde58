// Whole steps: how a sequence's tokens are cut into steps, what shares those steps and on how many threads changes nothing.
//
// In deterministic mode bit for bit, whatever the steps look like. In the default mode the number of rows chooses the
// arithmetic (the regime), and inside a regime the same holds.
#include <map>

#include "isa.h"
#include "tiny_model.h"

namespace {

std::string isa;

// Every weight format once, and mixtures; KV formats in turn.
struct Kind {
  uint64_t seed;
  int format, kv_format;
};
std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (int format : kFormats) all.push_back({all.size() + 1, format, int(all.size()) % 3});
  for (int i = 0; i < 6; i++) all.push_back({all.size() + 1, kAnyFormat, i % 3});
  return all;
}

// Runs the sequences together, each step at random: its sequences, their tokens and their order. Returns each one's
// logits, as computed by the steps.
std::vector<Logits> run_by_lot(Session& session, const std::vector<Sequence>& sequences, Random& random, int budget) {
  std::vector<Logits> logits(sequences.size());
  std::vector<int> done(sequences.size());
  while (true) {
    std::vector<size_t> waiting;
    for (size_t i = 0; i < sequences.size(); i++)
      if (done[i] < int(sequences[i].tokens.size())) waiting.push_back(i);
    if (waiting.empty()) return logits;
    for (size_t i = waiting.size() - 1; i > 0; i--) std::swap(waiting[i], waiting[size_t(random.integer(0, int(i)))]);
    waiting.resize(size_t(random.integer(1, int(waiting.size()))));
    std::vector<Piece> pieces;
    int left = budget;
    for (size_t i : waiting) {
      const int remaining = int(sequences[i].tokens.size()) - done[i];
      const int count = random.integer(0, 2) ? random.integer(1, std::min(remaining, left)) : 1;
      pieces.push_back({&sequences[i], done[i], count});
      if ((left -= count) < 1) break;
    }
    const Logits rows = session.step(pieces);
    size_t row = 0;
    for (const Piece& piece : pieces)
      for (int i = 0; i < piece.count; i++, row++) {
        const size_t sequence = size_t(piece.sequence - sequences.data());
        logits[sequence].push_back(rows[row]), done[sequence]++;
      }
  }
}

void alone_is_batched_is_chunked_bit_for_bit() {
  for (const Kind& kind : kinds()) {
    TinyModel tiny(kind.seed, kind.format, kind.kv_format, true);
    Random random(kind.seed);
    const std::vector<Sequence> sequences = random_sequences(tiny, random, {37, 1, 50, 18});
    std::vector<Logits> alone;
    Session single(tiny.decoder, isa, 1);
    for (const Sequence& sequence : sequences) alone.push_back(single.run(sequence, 64));

    about("%s, one token at a time", tiny.name().c_str());
    CHECK(same_bits(Session(tiny.decoder, isa, 2).run(sequences[0], 1), alone[0]));
    for (int threads = 1; threads <= 4; threads++) {
      Session together(tiny.decoder, isa, threads);
      const std::vector<Logits> batched = run_by_lot(together, sequences, random, 64);
      for (size_t i = 0; i < sequences.size(); i++) {
        about("%s, sequence %zu batched by lot on %d threads", tiny.name().c_str(), i, threads);
        CHECK(same_bits(batched[i], alone[i]));
      }
    }
  }
}

// Logits are computed for the rows that ask, and asking for fewer changes none.
void only_the_rows_asked_for_get_logits() {
  for (const Kind& kind : kinds()) {
    TinyModel tiny(kind.seed, kind.format, kind.kv_format, true);
    Random random(kind.seed);
    const std::vector<Sequence> sequences = random_sequences(tiny, random, {20, 9});
    Session session(tiny.decoder, isa, 2);
    StepArrays arrays({{&sequences[0], 0, 20}, {&sequences[1], 0, 9}});
    const Logits all = session.step(arrays);
    for (const std::vector<int32_t>& asked : {std::vector<int32_t>{19, 28}, {0}, {3, 4, 11}, {28}, {}}) {
      about("%s, %zu rows of logits", tiny.name().c_str(), asked.size());
      arrays.logit_rows = asked;
      const Logits some = session.step(arrays);
      for (size_t i = 0; i < asked.size(); i++) CHECK(same_bits(some[i], all[size_t(asked[i])]));
    }
  }
}

void a_prefix_another_sequence_computed_gives_the_same_bits() {
  for (const Kind& kind : kinds()) {
    TinyModel tiny(kind.seed, kind.format, kind.kv_format, true);
    Random random(kind.seed);
    std::vector<Sequence> sequences = random_sequences(tiny, random, {44, 50});
    std::copy_n(sequences[0].tokens.begin(), 32, sequences[1].tokens.begin());  // two whole blocks in common
    const Logits cold = Session(tiny.decoder, isa, 1).run(sequences[1], 64);
    std::copy_n(sequences[0].table.begin(), 2, sequences[1].table.begin());
    Session session(tiny.decoder, isa, 2);
    session.run(sequences[0], 64);
    const Logits hit = session.run(sequences[1], 64, 32);
    about("%s", tiny.name().c_str());
    CHECK(same_bits(hit, Logits(cold.begin() + 32, cold.end())));
  }
}

// Which of a format's arithmetics a number of rows gets; numbers with equal answers are one regime.
std::vector<int> regime(const TinyModel& tiny, int rows) {
  const ridgeline::Kernels& kernels = *ridgeline::find_kernels(isa);
  std::vector<int> inputs;
  auto add = [&](int each) {
    for (int format : kFormats) inputs.push_back(int(kernels.input_kind(format, each, tiny.decoder.deterministic)));
  };
  add(rows);
  for (int i = 0; i < tiny.decoder.num_layers; i++) {
    const rl_layer& layer = tiny.decoder.layers[i];
    const rl_experts& e = layer.experts;
    if (layer.ffn_kind == RL_FFN_EXPERTS) add(rows == 1 ? 1 : std::max(2, rows * e.per_token / e.num));
  }
  return inputs;
}

void each_regime_of_the_default_mode_is_invariant_by_itself() {
  for (const Kind& kind : kinds()) {
    // AMX attention switches kernels by the number of rows that share a KV head in a part of a step.
    if (isa == "amx" && kind.kv_format == RL_KV_BF16) continue;
    TinyModel tiny(kind.seed, kind.format, kind.kv_format, false);
    Random random(kind.seed);
    const std::vector<Sequence> sequences = random_sequences(tiny, random, {48, 48, 48});
    std::map<std::vector<int>, std::vector<int>> regimes;  // the sizes of steps of each
    for (int chunk : {1, 2, 3, 6, 12, 16, 24, 48}) regimes[regime(tiny, chunk)].push_back(chunk);
    for (const auto& [same, chunks] : regimes) {
      const Logits whole = Session(tiny.decoder, isa, 1).run(sequences[0], chunks[0]);
      for (int chunk : chunks) {
        about("%s, steps of %d and of %d rows", tiny.name().c_str(), chunk, chunks[0]);
        if (chunk != chunks[0]) CHECK(same_bits(Session(tiny.decoder, isa, 2).run(sequences[0], chunk), whole));
        if (3 * chunk > tiny.decoder.max_step_tokens || regime(tiny, 3 * chunk) != same) continue;
        Session together(tiny.decoder, isa, 2);
        for (int at = 0; at < 48; at += chunk) {
          const Logits batched = together.step({{&sequences[1], at, chunk}, {&sequences[0], at, chunk}, {&sequences[2], at, chunk}});
          for (int i = 0; i < chunk; i++) CHECK(same_bits(batched[size_t(chunk + i)], whole[size_t(at + i)]));
        }
      }
    }
  }
}

// The deterministic mode is there for a reason: without it one row and two rows differ, by little.
void the_default_mode_is_not_invariant_across_regimes() {
  for (int format : {RL_Q4_H, RL_Q4_HM, RL_Q8_H}) {
    TinyModel tiny(7, format, RL_KV_BF16, false, true);
    Random random(7);
    const std::vector<Sequence> sequences = random_sequences(tiny, random, {32});
    const Logits single = Session(tiny.decoder, isa, 1).run(sequences[0], 1);
    const Logits chunked = Session(tiny.decoder, isa, 1).run(sequences[0], 16);
    about("%s", tiny.name().c_str());
    CHECK(!same_bits(single, chunked));
    double most = 0, difference = 0;
    for (size_t i = 0; i < single.size(); i++)
      for (size_t j = 0; j < single[i].size(); j++) {
        most = std::max(most, std::fabs(double(single[i][j])));
        difference = std::max(difference, std::fabs(double(single[i][j]) - chunked[i][j]));
      }
    CHECK_NEAR(difference, 0.0, 0.05 * most);  // inputs of 8 bits instead of 15
  }
}

void a_copied_block_serves_as_its_source() {
  for (const Kind& kind : kinds()) {
    TinyModel tiny(kind.seed, kind.format, kind.kv_format, true);
    Random random(kind.seed);
    const std::vector<Sequence> sequences = random_sequences(tiny, random, {45, 45});
    Session session(tiny.decoder, isa, 2);
    const Logits straight = session.run(sequences[0], 64);

    Sequence fork = sequences[0];  // the same tokens up to 40, in blocks that are copies; then others
    fork.table = sequences[1].table;
    for (int i = 40; i < 45; i++) fork.tokens[size_t(i)] = (fork.tokens[size_t(i)] + 1) % tiny.decoder.vocab;
    for (int i = 0; i < 3; i++)
      CHECK_OK(rl_copy_block(session.model.get(), sequences[0].table[size_t(i)], fork.table[size_t(i)]));
    const Logits forked = session.run(fork, 64, 40);
    about("%s", tiny.name().c_str());
    CHECK(same_bits(forked, [&] {
      const Logits whole = Session(tiny.decoder, isa, 1).run(fork, 64);
      return Logits(whole.begin() + 40, whole.end());
    }()));
    // The source was not touched by what the copy went on with.
    CHECK(same_bits(session.run(sequences[0], 64, 44), Logits(straight.begin() + 44, straight.end())));
  }
}

// Guesses are verified several at a time: in a model of the default mode a deterministic step of any number of tokens of
// one sequence has the bits of steps of one token.
void a_deterministic_step_is_a_row_of_single_tokens() {
  for (const Kind& kind : kinds()) {
    TinyModel tiny(kind.seed, kind.format, kind.kv_format, false);
    Random random(kind.seed);
    const std::vector<Sequence> sequences = random_sequences(tiny, random, {45});
    const Logits single = Session(tiny.decoder, isa, 1).run(sequences[0], 1);
    for (int threads : {1, 3}) {
      Session verifying(tiny.decoder, isa, threads);
      Logits rows;
      for (int at = 0, count = 1; at < 45; at += count, count = std::min(random.integer(1, 16), 45 - at)) {
        StepArrays arrays({{&sequences[0], at, count}});
        arrays.deterministic = 1;
        for (auto& row : verifying.step(arrays)) rows.push_back(std::move(row));
      }
      about("%s, verified, %d threads", tiny.name().c_str(), threads);
      CHECK(same_bits(rows, single));
    }
  }
}

}  // namespace

int main() {
  isa = isa_under_test();
  alone_is_batched_is_chunked_bit_for_bit();
  only_the_rows_asked_for_get_logits();
  a_prefix_another_sequence_computed_gives_the_same_bits();
  each_regime_of_the_default_mode_is_invariant_by_itself();
  the_default_mode_is_not_invariant_across_regimes();
  a_copied_block_serves_as_its_source();
  a_deterministic_step_is_a_row_of_single_tokens();
  return report();
}
