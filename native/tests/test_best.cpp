// The best token of each row, found while the logits are made: what a plain search in the logits finds, on every number of
// rows and threads, with or without the logits being written; and none where the logits are broken.
#include <algorithm>
#include <numeric>

#include "isa.h"
#include "tiny_model.h"

namespace {

std::string isa;
constexpr int kMostRows = 40;

// The first largest, or -1 where that is not finite or anything is not a number.
int32_t plain_best(const std::vector<float>& row) {
  size_t best = 0;
  for (size_t i = 0; i < row.size(); i++) {
    if (std::isnan(row[i])) return -1;
    if (row[i] > row[best]) best = i;
  }
  return std::isfinite(row[best]) ? int32_t(best) : -1;
}

// A model with this vocabulary; row i of its head is row i % distinct of random ones, so that logits repeat from there on.
class Worded : public TinyModel {
 public:
  Worded(uint64_t seed, int format, int vocab, int distinct, float softcap)
      : TinyModel(seed, format, RL_KV_BF16, false), embedding_(RL_F32, vocab, decoder.hidden, weights(seed, vocab, vocab)),
        head_(format, vocab, decoder.hidden, weights(seed + 1, vocab, distinct)), bias(size_t(vocab)) {
    decoder.vocab = vocab, decoder.embedding = embedding_.matrix, decoder.lm_head = head_.matrix;
    decoder.lm_head.bias = bias.data(), decoder.logit_softcap = softcap;
  }
  void poison_token_0() {  // packing refuses what is not finite; [hidden][16] floats: token 0 is the first of each 16
    *reinterpret_cast<float*>(embedding_.data.data()) = NAN;
  }
  // Sequences of one token each, which is not token 0 where there are others.
  std::vector<Sequence> first_tokens(int rows) {
    std::vector<Sequence> sequences;
    for (int i = 0; i < rows; i++)
      sequences.push_back({{std::max(random_tokens(1)[0], std::min(1, decoder.vocab - 1))}, {i}});
    return sequences;
  }

 private:
  std::vector<float> weights(uint64_t seed, int rows, int distinct) const {
    Random random(seed);
    std::vector<float> values = random_floats(random, size_t(distinct) * decoder.hidden);
    values.resize(size_t(rows) * decoder.hidden);
    for (size_t i = size_t(distinct) * decoder.hidden; i < values.size(); i++)
      values[i] = values[i - size_t(distinct) * decoder.hidden];
    return values;
  }
  Packed embedding_, head_;

 public:
  std::vector<float> bias;  // of the head, to change before a model is made of it
};

StepArrays step_of(const std::vector<Sequence>& sequences) {
  std::vector<Piece> pieces;
  for (const Sequence& sequence : sequences) pieces.push_back({&sequence, 0, int(sequence.tokens.size())});
  return StepArrays(pieces);
}

// The best tokens; the same, and the same logits, whichever of the two is asked for.
std::vector<int32_t> checked_best(Session& session, const StepArrays& arrays) {
  const rl_step step = arrays.step();
  const Logits logits = session.step(arrays);
  const size_t vocab = logits.empty() ? 0 : logits[0].size();
  Aligned<float> flat(logits.size() * vocab);
  Aligned<int32_t> with(logits.size()), alone(logits.size());
  CHECK_OK(rl_step_execute(session.model.get(), &step, flat.data(), with.data()));
  CHECK_OK(rl_step_execute(session.model.get(), &step, nullptr, alone.data()));
  for (size_t row = 0; row < logits.size(); row++) {
    CHECK(std::memcmp(logits[row].data(), &flat[row * vocab], vocab * 4) == 0);
    CHECK_EQUAL(with[row], plain_best(logits[row]));
    CHECK_EQUAL(alone[row], plain_best(logits[row]));
  }
  return {alone.data(), alone.data() + alone.size()};
}

std::vector<int> numbers_of_rows() {
  if (kUnderThreadSanitizer) return {1, 2, 13, kMostRows};
  // Every size of a tile, which has 12 rows at most; then two, three and four tiles.
  if (kSlowedDown) return {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 24, 25, kMostRows};
  std::vector<int> all(kMostRows);
  std::iota(all.begin(), all.end(), 1);
  return all;
}

void the_best_is_the_largest_logit_of_each_row() {
  uint64_t seed = 0;
  for (int format : {RL_F32, RL_BF16, RL_Q4_HM, RL_Q8_H})
    for (float softcap : {0.0f, 4.0f})
      for (int vocab : {1, 16, 333})
        for (int threads = 1; threads <= 3; threads++) {
          Worded model(++seed, format, vocab, vocab, softcap);
          Session session(model.decoder, isa, threads);
          const std::vector<Sequence> sequences = model.first_tokens(kMostRows);
          for (int rows : numbers_of_rows()) {
            about("%s, %d words, cap %g, %d rows on %d threads", format_name(format), vocab, softcap, rows, threads);
            checked_best(session, step_of({sequences.begin(), sequences.begin() + rows}));
          }
        }
}

// Equal logits lie in every panel, and so in every thread's share. A low cap makes large logits equal to it.
void of_equal_logits_the_first_is_best() {
  const int vocab = 777, distinct = 7;
  for (float softcap : {0.0f, 0.01f})
    for (int threads = 1; threads <= 3; threads++) {
      Worded model(5, RL_F32, vocab, distinct, softcap);
      Session session(model.decoder, isa, threads);
      const StepArrays step = step_of(model.first_tokens(kMostRows));
      for (int again = 0; again < 20; again++) {
        about("cap %g on %d threads", softcap, threads);
        for (int32_t best : checked_best(session, step)) CHECK(best >= 0 && best < distinct);
      }
    }
  Worded silent(6, RL_F32, vocab, 1, 0.0f);
  about("all logits equal");
  Session session(silent.decoder, isa, 3);
  for (int32_t best : checked_best(session, step_of(silent.first_tokens(kMostRows)))) CHECK_EQUAL(best, 0);
}

void only_the_rows_asked_for_have_a_best() {
  Worded model(7, RL_Q8_H, 100, 100, 0.0f);
  Random random(7);
  const std::vector<Sequence> sequences = random_sequences(model, random, {20, 9});
  Session session(model.decoder, isa, 2);
  StepArrays arrays = step_of(sequences);
  for (const std::vector<int32_t>& asked : {std::vector<int32_t>{19, 28}, {0}, {3, 11, 12}, {}}) {
    about("%zu rows", asked.size());
    arrays.logit_rows = asked;
    CHECK_EQUAL(checked_best(session, arrays).size(), asked.size());
  }
}

void a_row_that_is_no_number_has_no_best_and_harms_no_other() {
  for (float softcap : {0.0f, 4.0f})
    for (int threads = 1; threads <= 3; threads++) {
      Worded model(8, RL_F32, 333, 333, softcap);
      model.poison_token_0();
      Session session(model.decoder, isa, threads);
      std::vector<Sequence> sequences = model.first_tokens(kMostRows);
      const std::vector<int32_t> well = checked_best(session, step_of(sequences));
      for (int broken : {0, 17, kMostRows - 1}) {
        about("row %d broken, cap %g on %d threads", broken, softcap, threads);
        std::vector<Sequence> some = sequences;
        some[size_t(broken)].tokens[0] = 0;
        const std::vector<int32_t> best = checked_best(session, step_of(some));
        for (int row = 0; row < kMostRows; row++) CHECK_EQUAL(best[size_t(row)], row == broken ? -1 : well[size_t(row)]);
      }
    }
}

// A logit that is NaN or infinite, at any position: the row reports it. A logit of -infinity is never the best.
void one_logit_that_is_not_finite_leaves_no_best() {
  const int vocab = 333;
  for (float poison : {NAN, INFINITY, -INFINITY})
    for (int at : {0, 15, 16, 200, vocab - 1})
      for (float softcap : {0.0f, 4.0f}) {
        Worded model(9, RL_F32, vocab, vocab, softcap);
        model.bias[size_t(at)] = poison;
        Session session(model.decoder, isa, 2);
        about("logit %d is %g, cap %g", at, poison, softcap);
        for (int32_t best : checked_best(session, step_of(model.first_tokens(13)))) {
          if (std::isnan(poison)) CHECK_EQUAL(best, -1);
          if (poison > 0) CHECK(softcap > 0 ? best >= 0 && best <= at : best == -1);
          if (poison < 0) CHECK(best >= 0 && best != at);
        }
      }
  Worded none(10, RL_F32, vocab, vocab, 0.0f);
  std::fill(none.bias.begin(), none.bias.end(), -INFINITY);
  about("every logit is -infinity");
  Session session(none.decoder, isa, 2);
  for (int32_t best : checked_best(session, step_of(none.first_tokens(13)))) CHECK_EQUAL(best, -1);
}

}  // namespace

int main() {
  isa = isa_under_test();
  the_best_is_the_largest_logit_of_each_row();
  of_equal_logits_the_first_is_best();
  only_the_rows_asked_for_have_a_best();
  a_row_that_is_no_number_has_no_best_and_harms_no_other();
  one_logit_that_is_not_finite_leaves_no_best();
  return report();
}
