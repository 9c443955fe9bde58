// Paged attention against a softmax in double precision over the keys and values as the cache holds them.
//
// All memory starts as NaN: unused blocks, slots not yet written, other heads. What a row does not attend to must not
// change its result. Tolerances are derived where they are computed (`expected`), from the case's own numbers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"
#include "packed.h"
#include "quantized.h"

namespace attention_cases {

using ridgeline::AttentionRow;
using ridgeline::kAttentionRows;
using ridgeline::kBlock;
using ridgeline::Kernels;
using ridgeline::kRowsForWords;
using ridgeline::KvHead;

// AVX2 computes many rows over bf16 in 16-bit integers: what the largest key or value of a token, the largest of a query, and
// the largest weight of a chunk (times its value's scale) become.
constexpr float kWordMost = 4095.0f, kWeightMost = 8191.0f;
inline float query_most(int padded) { return padded <= 64 ? 8191.0f : float((1 << 19) / padded - 1); }
inline bool attends_in_words(const Kernels& kernels, int format, size_t rows) {
  const std::string name = kernels.name;
  return (name == "avx2" || name == "avxvnni") && format == RL_KV_BF16 && rows >= size_t(kRowsForWords);
}

// The blocks of one KV head among several: keys and values of `context` tokens in blocks of a random order.
class Cache {
 public:
  Cache(const Kernels& kernels, Random& random, int format, int head_dim, int context)
      : kernels_(kernels), dim(head_dim), padded(ridgeline::round_up(head_dim, 16)),
        keys(random_floats(random, size_t(context) * dim)), values(random_floats(random, size_t(context) * dim)) {
    const int needed = (context + kBlock - 1) / kBlock, blocks = needed + random.integer(0, 3);
    const int heads = random.integer(1, 3), head = random.integer(0, heads - 1);
    for (int i = 0; i < blocks; i++) table_.push_back(i);
    for (int i = blocks - 1; i > 0; i--) std::swap(table_[i], table_[random.integer(0, i)]);
    table_.resize(size_t(needed));
    const size_t head_bytes = ridgeline::kv_bytes(format, padded);
    key_memory_ = Aligned<uint8_t>(head_bytes * heads * blocks);
    value_memory_ = Aligned<uint8_t>(head_bytes * heads * blocks);
    key_scales_ = Aligned<float>(size_t(kBlock) * heads * blocks);
    value_scales_ = Aligned<float>(size_t(kBlock) * heads * blocks);
    for (Aligned<uint8_t>* memory : {&key_memory_, &value_memory_}) std::memset(memory->data(), 0xff, memory->size());
    for (Aligned<float>* memory : {&key_scales_, &value_scales_}) std::fill_n(memory->data(), memory->size(), NAN);
    kv = {format, padded, key_memory_.data() + head * head_bytes, value_memory_.data() + head * head_bytes,
          key_scales_.data() + head * kBlock, value_scales_.data() + head * kBlock, head_bytes * heads,
          size_t(heads) * kBlock, table_.data()};
    for (int token = 0; token < context; token++) store(token);
  }

  // Writes a token as keys and values have it.
  void store(int token) {
    Aligned<float> row(static_cast<size_t>(padded));
    std::fill_n(row.data(), padded, 0.0f);
    std::copy_n(&keys[size_t(token) * dim], dim, row.data());
    kernels_.store_key(kv, table_[token / kBlock], token % kBlock, row.data());
    std::copy_n(&values[size_t(token) * dim], dim, row.data());
    kernels_.store_value(kv, table_[token / kBlock], token % kBlock, row.data());
  }

  // A token's key or value as the cache holds it.
  void held(const std::vector<float>& rows, int token, double* out) const {
    const float* row = &rows[size_t(token) * dim];
    if (kv.format == RL_KV_INT8) return as_steps(row, dim, 127.0f, out);
    for (int i = 0; i < dim; i++) out[i] = kv.format == RL_KV_BF16 ? as_bf16(row[i]) : row[i];
    if (kv.format != RL_KV_INT4) return;
    const auto [start, step] = range(rows, token);
    for (int i = 0; i < dim; i++) out[i] = start + step * (step > 0 ? std::nearbyint(float(row[i] - float(start)) * (1.0f / float(step))) : 0);
  }

  // INT4: a token's minimum, not above any of its values, and its step, both as bfloat16. Padding counts as zeros.
  std::pair<double, double> range(const std::vector<float>& rows, int token) const {
    const float* row = &rows[size_t(token) * dim];
    float low = *std::min_element(row, row + dim), high = *std::max_element(row, row + dim);
    if (padded > dim) low = std::min(low, 0.0f), high = std::max(high, 0.0f);
    float start = float(as_bf16(low));
    if (start > low) {  // the next one below
      uint32_t bits;
      std::memcpy(&bits, &start, 4);
      bits = start > 0 ? bits - 0x10000 : start < 0 ? bits + 0x10000 : 0x80010000;
      std::memcpy(&start, &bits, 4);
    }
    return {start, as_bf16((high - start) / 15.0f)};
  }

 private:
  const Kernels& kernels_;
  std::vector<int32_t> table_;
  Aligned<uint8_t> key_memory_{0}, value_memory_{0};
  Aligned<float> key_scales_{0}, value_scales_{0};

 public:
  const int dim, padded;
  std::vector<float> keys, values;
  KvHead kv;
};

struct Row {
  std::vector<float> query;
  int first, last;
};

// Deterministic unless said otherwise: an instruction set may have a second way for many rows.
inline std::vector<std::vector<float>> attend(const Kernels& kernels, const Cache& cache, const std::vector<Row>& rows,
                                              float scale, float cap, bool deterministic = true) {
  std::vector<Aligned<float>> queries, outs;
  std::vector<AttentionRow> asked;
  for (const Row& row : rows) {
    queries.emplace_back(static_cast<size_t>(cache.padded)), outs.emplace_back(static_cast<size_t>(cache.padded));
    std::fill_n(queries.back().data(), cache.padded, 0.0f);
    std::copy(row.query.begin(), row.query.end(), queries.back().data());
  }
  for (size_t r = 0; r < rows.size(); r++) asked.push_back({queries[r].data(), outs[r].data(), rows[r].first, rows[r].last});
  kernels.attend(cache.kv, asked.data(), int(asked.size()), scale, cap, deterministic);
  std::vector<std::vector<float>> results;
  for (const Aligned<float>& out : outs) results.emplace_back(out.data(), out.data() + cache.dim);
  return results;
}

struct Expected {
  std::vector<double> out, tolerance;
};

// A token's key or value, whole steps of its largest one's share.
inline void in_words(double* row, int dim) {
  const std::vector<float> held(row, row + dim);
  as_steps(held.data(), dim, kWordMost, row);
}

// words: as attends_in_words() says of the call.
inline Expected expected(const Cache& cache, const Row& row, float scale, float cap, bool words = false) {
  const int dim = cache.dim, tokens = row.last - row.first + 1;
  const bool int4 = cache.kv.format == RL_KV_INT4, bytes = cache.kv.format == RL_KV_INT8 || int4;
  const bool bf16 = cache.kv.format == RL_KV_BF16;
  std::vector<double> query(static_cast<size_t>(dim)), key(query), weight(static_cast<size_t>(tokens));
  std::vector<double> values(size_t(tokens) * dim), value_step(static_cast<size_t>(tokens));
  std::vector<double> start(value_step), span(value_step);  // of the numbers that are multiplied: their zero, their range
  if (bytes) as_steps(row.query.data(), dim, 16256.0f, query.data());
  if (words) as_steps(row.query.data(), dim, query_most(cache.padded), query.data());
  for (int i = 0; i < dim && !bytes && !words; i++) query[i] = bf16 ? as_bf16(row.query[i]) : row.query[i];

  double most = -INFINITY, score_error = 0, total = 0;
  for (int t = 0; t < tokens; t++) {
    cache.held(cache.keys, row.first + t, key.data());
    cache.held(cache.values, row.first + t, &values[size_t(t) * dim]);
    if (words) in_words(key.data(), dim), in_words(&values[size_t(t) * dim], dim);
    double score = 0, sizes = 0, key_most = 0, query_sizes = 0;
    for (int i = 0; i < dim; i++) {
      score += query[i] * key[i], sizes += std::fabs(query[i] * key[i]);
      key_most = std::max(key_most, std::fabs(key[i])), query_sizes += std::fabs(query[i]);
      value_step[t] = std::max(value_step[t], std::fabs(values[size_t(t) * dim + i]) / (words ? kWordMost : 127));
    }
    span[t] = 255 * value_step[t];
    if (int4) {
      std::tie(start[t], value_step[t]) = cache.range(cache.values, row.first + t);
      span[t] = 15 * value_step[t] + std::fabs(start[t]);
    }
    // A float sum rounds twice per term. Bytes are summed exactly, but offset by 128, which is as much as they can be.
    const double error = bytes ? 8 * kUnit * query_sizes * 2 * key_most : (2 * dim + 2) * kUnit * sizes;
    score_error = std::max(score_error, std::fabs(scale) * (error + 2 * kUnit * std::fabs(score)));
    score *= scale;
    if (cap > 0) score = cap * std::tanh(score / cap);
    weight[t] = score, most = std::max(most, score);
  }
  if (cap > 0) score_error += 5e-7 * cap;
  for (double& w : weight) total += w = std::exp(w - most);
  // Each weight: its score's error as a factor, above and below the fraction line; the exponential; a sum with the others
  // and two corrections per chunk of 64 keys.
  const double share = 2 * std::expm1(2 * score_error + kUnit * 2 * std::fabs(most)) + 4e-7 + (2 * tokens + 20) * kUnit;
  Expected e{std::vector<double>(size_t(dim)), std::vector<double>(size_t(dim))};
  double largest_weight = 0, offset = 0;
  for (int t = 0; t < tokens; t++) {
    largest_weight = std::max(largest_weight, weight[t] / total * value_step[t]);
    offset += weight[t] / total * span[t];
  }
  for (int i = 0; i < dim; i++) {
    double sizes = 0, steps = 0;
    for (int t = 0; t < tokens; t++) {
      const double v = values[size_t(t) * dim + i];
      e.out[i] += weight[t] / total * v, sizes += weight[t] / total * std::fabs(v);
      steps += value_step[t] > 0 ? std::fabs(v - start[t]) / value_step[t] : 0;
    }
    e.tolerance[i] = share * sizes + 1e-30;
    // Weights are rounded to bf16; or times the values' scales to steps of the largest of their chunk's.
    if (bf16 && !words) e.tolerance[i] += 0x1p-8 * 1.01 * sizes;
    if (words) e.tolerance[i] += 0.51 / kWeightMost * largest_weight * steps + (tokens / 8 + 20) * kUnit * sizes;
    if (bytes) e.tolerance[i] += 0.51 / 16256 * largest_weight * steps + (tokens / 8 + 20) * kUnit * offset;
  }
  return e;
}

struct Case {
  int format, dim, context, group, tokens, window;
  float cap;
  uint64_t seed;
};

inline std::vector<Row> random_rows(Random& random, const Case& c) {  // the query heads of one KV head, for the last tokens
  std::vector<Row> rows;
  for (int t = c.context - c.tokens; t < c.context; t++)
    for (int head = 0; head < c.group; head++)
      rows.push_back({random_floats(random, c.dim, random.integer(0, 3) ? 1.0f : 4.0f),
                      c.window ? std::max(0, t - c.window + 1) : 0, t});
  return rows;
}

inline void check_case(const Kernels& kernels, const Case& c) {
  Random random(c.seed);
  const Cache cache(kernels, random, c.format, c.dim, c.context);
  const std::vector<Row> rows = random_rows(random, c);
  const float scale = 1.0f / std::sqrt(float(c.dim));
  const std::vector<std::vector<float>> out = attend(kernels, cache, rows, scale, c.cap);
  const std::vector<std::vector<float>> other = attend(kernels, cache, rows, scale, c.cap, false);
  auto about_row = [&](size_t r, int i) {
    about("%s, head of %d, %d keys, row %zu of %d x %d, window %d, cap %g, value %d, seed %llu", kKvNames[c.format], c.dim,
          c.context, r, c.tokens, c.group, c.window, c.cap, i, static_cast<unsigned long long>(c.seed));
  };
  const bool words = attends_in_words(kernels, c.format, rows.size());
  for (size_t r = 0; r < rows.size(); r++) {
    const Expected e = expected(cache, rows[r], scale, c.cap), o = expected(cache, rows[r], scale, c.cap, words);
    for (int i = 0; i < c.dim; i++) {
      about_row(r, i);
      CHECK_NEAR(out[r][i], e.out[i], e.tolerance[i]);
      CHECK_NEAR(other[r][i], o.out[i], o.tolerance[i]);
    }
  }
  // A row's bits do not depend on the rows it is computed with.
  const size_t r = size_t(random.integer(0, int(rows.size()) - 1));
  about_row(r, 0);
  CHECK(attend(kernels, cache, {rows[r]}, scale, c.cap)[0] == out[r]);
}

inline void attention_is_right_for_every_shape(const Kernels& kernels) {
  const int borders[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 79, 81, 127, 128, 129, 193, 260};
  uint64_t seed = 1;
  for (int format : {RL_KV_F32, RL_KV_BF16, RL_KV_INT8, RL_KV_INT4}) {
    for (int dim : {8, 10, 16, 18, 32, 40, 64, 80, 96, 128, 192, 256})
      for (int round = 0; round < (kUnderThreadSanitizer ? 1 : 5); round++, seed++) {
        Random random(seed);
        const int context = borders[random.integer(0, 16)], group = random.integer(1, 9);
        const int tokens = random.integer(1, std::min(context, kAttentionRows / group));
        const int window = random.integer(0, 1) ? 0 : random.integer(1, context + 4);
        check_case(kernels, {format, dim, context, group, tokens, window, random.integer(0, 2) ? 0.0f : 20.0f, seed});
      }
    for (int context : borders)  // every border, decoding and as the end of a prefill
      for (int tokens : {1, std::min(context, kAttentionRows)})
        check_case(kernels, {format, 32, context, tokens == 1 ? 3 : 1, tokens, context % 2 ? 0 : context / 2, 0.0f, seed++});
  }
}

// Many rows at once: a row's bits depend neither on their number nor on their order, and the largest sums there can be fit.
inline void many_rows_are_computed_as_few_are(const Kernels& kernels) {
  for (int dim : {16, 64, 80, 128, 256})
    for (int context : {49, 64, 130}) {
      Random random(uint64_t(dim + context));
      const Cache cache(kernels, random, RL_KV_BF16, dim, context);
      const std::vector<Row> rows = random_rows(random, {RL_KV_BF16, dim, context, 2, 24, context % 2 ? 30 : 0, 0.0f, 0});
      const std::vector<Row> some(rows.rbegin() + 5, rows.rbegin() + 5 + kRowsForWords);
      const auto all = attend(kernels, cache, rows, 0.2f, 0.0f, false), few = attend(kernels, cache, some, 0.2f, 0.0f, false);
      about("heads of %d, %d keys", dim, context);
      for (size_t r = 0; r < some.size(); r++) CHECK(few[r] == all[rows.size() - 6 - r]);
    }
  for (int dim : {16, 64, 80, 128, 256})
    for (float sign : {1.0f, -1.0f}) {
      Random random(1);
      Cache cache(kernels, random, RL_KV_BF16, dim, 128);
      std::fill(cache.keys.begin(), cache.keys.end(), sign), std::fill(cache.values.begin(), cache.values.end(), sign);
      for (int token = 0; token < 128; token++) cache.store(token);
      const std::vector<Row> rows(kAttentionRows, {std::vector<float>(size_t(dim), 1.0f), 0, 127});
      about("heads of %d, keys and values of %g", dim, double(sign));
      for (const auto& out : attend(kernels, cache, rows, 1.0f, 0.0f, false))
        for (float value : out) CHECK_NEAR(value, sign, 1e-6);
    }
}

// Memory a row attends to that holds NaN must show in its result.
inline void what_is_broken_and_attended_to_shows(const Kernels& kernels) {
  const int dim = 32, context = 130;
  for (int format : {RL_KV_F32, RL_KV_BF16, RL_KV_INT8, RL_KV_INT4})
    for (float cap : {0.0f, 20.0f})
      for (int token = 0; token < context; token += kUnderThreadSanitizer ? 9 : 1) {
        Random random{uint64_t(token)};
        Cache cache(kernels, random, format, dim, context);
        const int heads = token % 3 == 0 ? 2 : token % 3 == 1 ? 9 : kRowsForWords;  // few and many rows
        const std::vector<Row> rows = random_rows(random, {format, dim, context, heads, 1, 0, cap, 0});
        const int at = random.integer(0, dim - 1);
        auto results = [&](const char* what) {
          about("%s, cap %g, token %d of %d, %s %d is NaN", kKvNames[format], cap, token, context, what, at);
          return attend(kernels, cache, rows, 0.2f, cap, false);
        };
        float& key = cache.keys[size_t(token) * dim + at];
        const float before = std::exchange(key, NAN);
        cache.store(token);
        for (const auto& out : results("key"))
          for (float value : out) CHECK(std::isnan(value));
        key = before;
        cache.values[size_t(token) * dim + at] = NAN;
        cache.store(token);
        for (const auto& out : results("value")) CHECK(std::isnan(out[at]));
      }
}

inline void many_broken_keys_show_as_one_does(const Kernels& kernels) {
  const int dim = 16, context = 200;
  for (int format : {RL_KV_F32, RL_KV_BF16, RL_KV_INT8, RL_KV_INT4})
    for (int round = 0; round < 24; round++) {
      Random random{uint64_t(round)};
      Cache cache(kernels, random, format, dim, context);
      const int first = round / 4 * 16, count = 16 << round % 4;  // up to whole chunks and more
      for (int token = first; token < std::min(first + count, context); token++) {
        cache.keys[size_t(token) * dim] = NAN;
        cache.store(token);
      }
      about("%s, keys %d to %d of %d are NaN", kKvNames[format], first, first + count, context);
      for (int heads : {1, kRowsForWords})
        for (const auto& out : attend(kernels, cache, random_rows(random, {format, dim, context, heads, 1, 0, 0.0f, 0}), 0.2f, 0.0f, false))
          for (float value : out) CHECK(std::isnan(value));
    }
}

inline void a_broken_query_breaks_its_own_row_alone(const Kernels& kernels) {
  const int dim = 24, context = 70;
  for (int format : {RL_KV_F32, RL_KV_BF16, RL_KV_INT8, RL_KV_INT4})
    for (int at = 0; at < dim; at++) {
      Random random{uint64_t(at)};
      const Cache cache(kernels, random, format, dim, context);
      const bool many = at % 2;
      std::vector<Row> rows = random_rows(random, {format, dim, context, 3, many ? 9 : 4, 0, 0.0f, 0});
      const std::vector<std::vector<float>> good = attend(kernels, cache, rows, 0.2f, 0.0f, !many);
      const size_t broken = size_t(random.integer(0, int(rows.size()) - 1));
      rows[broken].query[at] = NAN;
      const std::vector<std::vector<float>> bad = attend(kernels, cache, rows, 0.2f, 0.0f, !many);
      about("%s, value %d of query %zu is NaN", kKvNames[format], at, broken);
      for (size_t r = 0; r < rows.size(); r++)
        for (int i = 0; i < dim; i++) CHECK(r == broken ? std::isnan(bad[r][i]) : bad[r][i] == good[r][i]);
    }
}

// Scores far apart, ties, and zeros: where an online softmax overflows, divides by nothing or loses its maximum.
inline void steep_and_flat_scores_are_right(const Kernels& kernels) {
  for (int format : {RL_KV_F32, RL_KV_BF16, RL_KV_INT8, RL_KV_INT4})
    for (float size : {0.0f, 1e-20f, 30.0f, 300.0f})
      for (int round = 0; round < 4; round++) {
        Random random{uint64_t(round)};
        const int dim = 32, context = 150;
        Cache cache(kernels, random, format, dim, context);
        const bool many = round % 2;
        std::vector<Row> rows = random_rows(random, {format, dim, context, 2, many ? 16 : 2, 0, 0.0f, 0});
        for (Row& row : rows)
          for (float& value : row.query) value *= size;
        if (round == 3) std::fill(cache.values.begin(), cache.values.end(), 0.0f);
        for (int token = 0; token < context && round == 3; token++) cache.store(token);
        const bool words = many && attends_in_words(kernels, format, rows.size());
        const std::vector<std::vector<float>> out = attend(kernels, cache, rows, 0.2f, 0.0f, !many);
        for (size_t r = 0; r < rows.size(); r++) {
          const Expected e = expected(cache, rows[r], 0.2f, 0.0f, words);
          about("%s, queries of size %g, row %zu, seed %d", kKvNames[format], size, r, round);
          for (int i = 0; i < dim; i++) CHECK_NEAR(out[r][i], e.out[i], e.tolerance[i]);
        }
      }
}

inline void check_attention(const Kernels& kernels) {
  kernels.start_thread();
  attention_is_right_for_every_shape(kernels);
  many_rows_are_computed_as_few_are(kernels);
  what_is_broken_and_attended_to_shows(kernels);
  many_broken_keys_show_as_one_does(kernels);
  a_broken_query_breaks_its_own_row_alone(kernels);
  steep_and_flat_scores_are_right(kernels);
}

}  // namespace attention_cases
