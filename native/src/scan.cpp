// Exact vector search. One pass over the rows as bytes leaves the rows that may be among the best k, by bounds on the rounding's
// error; these are compared as floats.
//
// With q^ and r^ what the bytes stand for: |q·r - q^·r^| ≤ |q - q^| · |r| + |q^| · |r - r^|, where |r| ≤ 1. A row's product lies
// between its lower and upper bound. The k-th largest lower bound is a limit: a row whose upper bound is below it is not among
// the best. The limit grows during the pass, and the threads share it.
#include "scan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <string>

#include "../include/ridgeline_native.h"
#include "errors.h"
#include "isa.h"
#include "threads.h"

using namespace ridgeline;

struct rl_scanner {
  const char* isa;
  const ScanKernels* kernels;
  ThreadPool pool;
  std::mutex one_at_a_time;
};

namespace ridgeline {
namespace {

constexpr int kBlockPanels = 8;     // panels whose products are made together: 128 rows
constexpr int kPiecePanels = 64;    // panels of a piece: they stay in the second-level cache while groups of queries pass
constexpr int kGroup = 40;          // queries of a group: they and their products stay in the first-level cache
constexpr float kSlack = 2e-5f;     // of lengths above 1 and of the bounds' own arithmetic in single precision
constexpr size_t kLeastKept = 256;  // candidates before the first look at the limit

int padded(int dimensions) { return (dimensions + 3) / 4 * 4; }

struct Exact {
  double score;
  int32_t row;
};

struct Query : ScanBound {
  std::atomic<float> limit{-std::numeric_limits<float>::infinity()};

  void raise(float to) {
    float now = limit.load(std::memory_order_relaxed);
    while (now < to && !limit.compare_exchange_weak(now, to, std::memory_order_relaxed)) {
    }
  }
};

class Search {
 public:
  Search(rl_scanner& scanner, const rl_scan_rows& rows, const uint16_t* mask, const float* queries, int count, int k)
      : s_(scanner), rows_(rows), mask_(mask), floats_(queries), count_(count), k_(k), padded_(padded(rows.dimensions)),
        bytes_(size_t(count) * size_t(padded_)), sums_(size_t(count)), queries_(size_t(count)),
        kept_(size_t(scanner.pool.size()) * size_t(count)), room_(kept_.size(), std::max(kLeastKept, size_t(k) * 4)) {
    for (int q = 0; q < count; q++) prepare(q);
  }

  int64_t run(int32_t* found, float* scores) {
    const int panels = int(rows_.capacity / kPanel), pieces = (panels + kPiecePanels - 1) / kPiecePanels;
    std::atomic<int64_t> rescored{0};
    Phase scan, decide;
    s_.pool.run([&](int thread) {
      std::vector<int32_t> products(size_t(kGroup) * kBlockPanels * kPanel);
      scan.share(pieces, [] {}, [&](int piece) {
        const int end = std::min(panels, (piece + 1) * kPiecePanels);
        for (int first = 0; first < count_; first += kGroup)
          for (int panel = piece * kPiecePanels; panel < end; panel += kBlockPanels)
            scan_block(thread, first, panel, std::min(kBlockPanels, end - panel), products.data());
      });
      decide.share(count_, [] {}, [&](int q) { rescored += best_of(q, found + size_t(q) * size_t(k_), scores + size_t(q) * size_t(k_)); });
    });
    return rescored;
  }

 private:
  void prepare(int q) {
    int8_t* bytes = bytes_.data() + size_t(q) * size_t(padded_);
    const ByteVector made = to_bytes(floats_ + size_t(q) * size_t(rows_.dimensions), rows_.dimensions, padded_, bytes);
    double square = 0;
    for (int i = 0; i < padded_; i++) sums_[size_t(q)] += bytes[i], square += double(bytes[i]) * bytes[i];
    Query& query = queries_[size_t(q)];
    query.factor = made.scale;
    query.length = float(std::sqrt(square) * made.scale);
    query.slack = made.residual + kSlack;
  }

  void scan_block(int thread, int first, int panel, int panels, int32_t* products) {
    uint32_t any = 0;
    for (int p = 0; p < panels; p++) any |= mask_[panel + p];
    if (!any) return;
    const int num = std::min(kGroup, count_ - first), rows = panels * kPanel;
    const ScanQueries group{bytes_.data() + size_t(first) * size_t(padded_), sums_.data() + first, num, padded_ / 4};
    s_.kernels->products(rows_.panels + size_t(panel) * kPanel * size_t(padded_), panels, group, products, size_t(rows));
    const int row = panel * kPanel;
    const ScanPart part{row, rows, rows_.scales + row, rows_.residuals + row, mask_ + panel};
    for (int i = 0; i < num; i++) {
      Query& query = queries_[size_t(first + i)];
      Candidate found[kBlockPanels * kPanel];
      const int count = s_.kernels->select(products + i * rows, part, query, query.limit.load(std::memory_order_relaxed), found);
      if (count) keep(thread, first + i, found, count);
    }
  }

  void keep(int thread, int q, const Candidate* found, int count) {
    const size_t at = size_t(thread) * size_t(count_) + size_t(q);
    std::vector<Candidate>& kept = kept_[at];
    kept.insert(kept.end(), found, found + count);
    if (kept.size() >= room_[at]) {
      reduce(kept, q);
      room_[at] = std::max(room_[at], 2 * kept.size());
    }
  }

  float lower(const Candidate& c, const Query& query) const {
    return c.upper - 2 * (rows_.residuals[c.row] * query.length + query.slack);
  }

  // Raises the limit to the k-th largest lower bound, and drops what lies below it.
  void reduce(std::vector<Candidate>& kept, int q) {
    Query& query = queries_[size_t(q)];
    if (kept.size() >= size_t(k_)) {
      std::vector<float> lowers;
      lowers.reserve(kept.size());
      for (const Candidate& c : kept) lowers.push_back(lower(c, query));
      std::nth_element(lowers.begin(), lowers.begin() + (k_ - 1), lowers.end(), std::greater<float>());
      query.raise(lowers[size_t(k_ - 1)]);
    }
    const float limit = query.limit.load(std::memory_order_relaxed);
    kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Candidate& c) { return c.upper < limit; }), kept.end());
  }

  // Compares as floats, from the largest upper bound down, until none of the rest can be among the best k.
  int64_t best_of(int q, int32_t* found, float* scores) {
    std::vector<Candidate> all;
    for (int thread = 0; thread < s_.pool.size(); thread++) {
      const auto& kept = kept_[size_t(thread) * size_t(count_) + size_t(q)];
      all.insert(all.end(), kept.begin(), kept.end());
    }
    reduce(all, q);
    std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.upper > b.upper; });
    const auto better = [](const Exact& a, const Exact& b) { return a.score != b.score ? a.score > b.score : a.row < b.row; };
    std::vector<Exact> best;  // a heap whose front is the worst
    int64_t compared = 0;
    const size_t d = size_t(rows_.dimensions);
    for (size_t i = 0; i < all.size(); i++) {
      const Candidate& c = all[i];
      if (best.size() == size_t(k_) && double(c.upper) < best.front().score) break;
      if (i + 1 < all.size())  // rows lie far apart: fetch the next one meanwhile
        for (size_t at = 0; at < d; at += 16) __builtin_prefetch(rows_.vectors + size_t(all[i + 1].row) * d + at);
      compared++;
      best.push_back({exact_product(rows_.vectors + size_t(c.row) * d, floats_ + size_t(q) * d, rows_.dimensions), c.row});
      std::push_heap(best.begin(), best.end(), better);
      if (best.size() > size_t(k_)) std::pop_heap(best.begin(), best.end(), better), best.pop_back();
    }
    std::sort_heap(best.begin(), best.end(), better);
    for (int i = 0; i < k_; i++) {
      const bool there = size_t(i) < best.size();
      found[i] = there ? best[size_t(i)].row : -1;
      scores[i] = there ? float(best[size_t(i)].score) : 0.0f;
    }
    return compared;
  }

  rl_scanner& s_;
  const rl_scan_rows& rows_;
  const uint16_t* mask_;
  const float* floats_;
  const int count_, k_, padded_;
  std::vector<int8_t> bytes_;
  std::vector<int32_t> sums_;
  std::vector<Query> queries_;
  std::vector<std::vector<Candidate>> kept_;  // [thread][query]
  std::vector<size_t> room_;
};

const ScanKernels* scan_kernels(const std::string& isa) {
#if defined(RL_HAS_AMX)
  if (isa == "amx") return amx_scan_kernels();
#endif
#if defined(RL_HAS_AVX512)
  if (isa == "avx512") return avx512_scan_kernels();
#endif
#if defined(RL_HAS_AVX512VNNI)
  if (isa == "avx512vnni") return avx512vnni_scan_kernels();
#endif
#if defined(RL_HAS_AVXVNNI)
  if (isa == "avxvnni") return avxvnni_scan_kernels();
#endif
#if defined(RL_HAS_AVX2)
  if (isa == "avx2") return avx2_scan_kernels();
#endif
#if defined(RL_HAS_I8MM)
  if (isa == "i8mm") return i8mm_scan_kernels();
#endif
#if defined(RL_HAS_DOTPROD)
  if (isa == "dotprod") return dotprod_scan_kernels();
#endif
#if defined(RL_HAS_NEON)
  if (isa == "neon") return neon_scan_kernels();
#endif
  return portable_scan_kernels();
}

const char* wrong(const rl_scan_rows* rows) {
  if (!rows || rows->dimensions < 1 || rows->dimensions > 65536) return "a vector has 1 to 65536 dimensions";
  if (rows->capacity < 0 || rows->capacity % 32 || rows->capacity > (int64_t(1) << 30)) return "the capacity is not a multiple of 32 up to 2^30";
  return nullptr;
}

}  // namespace

ByteVector to_bytes(const float* vector, int dimensions, int padded, int8_t* bytes) {
  float largest = 0;
  for (int i = 0; i < dimensions; i++) largest = std::max(largest, std::fabs(vector[i]));
  const float scale = largest / 127.0f;
  double square = 0;
  for (int i = 0; i < padded; i++) {
    const float x = i < dimensions ? vector[i] : 0.0f;
    const int value = scale > 0 ? int(std::lrint(double(x) / double(scale))) : 0;
    bytes[i] = int8_t(std::min(127, std::max(-127, value)));
    const double left = double(x) - double(scale) * bytes[i];
    square += left * left;
  }
  return {scale, float(std::sqrt(square) * 1.00001)};
}

double exact_product(const float* a, const float* b, int dimensions) {
  double sums[8] = {};
  int i = 0;
  for (; i + 8 <= dimensions; i += 8)
    for (int j = 0; j < 8; j++) sums[j] += double(a[i + j]) * double(b[i + j]);
  double sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  for (; i < dimensions; i++) sum += double(a[i]) * double(b[i]);
  return sum;
}

}  // namespace ridgeline

extern "C" {

rl_scanner* rl_scanner_create(const char* isa, int32_t threads) {
  const Kernels* kernels = find_kernels(isa ? isa : "");
  if (!kernels || threads < 1 || threads > 256) {
    fail(kernels ? "a scanner has 1 to 256 threads" : std::string("this machine does not run ") + isa);
    return nullptr;
  }
  try {
    return new rl_scanner{kernels->name, scan_kernels(kernels->name), {threads, [] {}}, {}};
  } catch (const std::exception& error) {
    fail(std::string("no memory or no threads for a scanner: ") + error.what());
    return nullptr;
  }
}

void rl_scanner_free(rl_scanner* scanner) { delete scanner; }

const char* rl_scanner_isa(const rl_scanner* scanner) { return scanner->isa; }

int rl_scan_store(const rl_scan_rows* rows, const float* vectors, const int32_t* at, int32_t count) {
  if (const char* reason = wrong(rows)) return fail(reason);
  const int d = rows->dimensions, padded_d = padded(d);
  std::vector<int8_t> bytes(static_cast<size_t>(padded_d));
  for (int32_t i = 0; i < count; i++) {
    const int64_t row = at[i];
    if (row < 0 || row >= rows->capacity) return fail("a row is beyond the capacity");
    const float* vector = vectors + size_t(i) * size_t(d);
    const ByteVector made = to_bytes(vector, d, padded_d, bytes.data());
    if (!std::isfinite(made.scale) || !std::isfinite(made.residual)) return fail("a vector is not finite");
    rows->scales[row] = made.scale, rows->residuals[row] = made.residual;
    std::memcpy(rows->vectors + size_t(row) * size_t(d), vector, size_t(d) * sizeof(float));
    uint8_t* panel = rows->panels + size_t(row / kPanel) * size_t(kPanel) * size_t(padded_d) + size_t(row % kPanel) * 4;
    for (int b = 0; b < padded_d; b++) panel[size_t(b / 4) * 64 + size_t(b % 4)] = uint8_t(int(bytes[size_t(b)]) + 128);
  }
  return 0;
}

int rl_scan_search(rl_scanner* scanner, const rl_scan_rows* rows, const uint16_t* mask, const float* queries, int32_t count,
                   int32_t k, int32_t* found, float* scores, int64_t* rescored) {
  if (const char* reason = wrong(rows)) return fail(reason);
  if (count < 0 || k < 1) return fail("a search has at least one result for each query");
  for (size_t i = 0; i < size_t(count) * size_t(rows->dimensions); i++)
    if (!std::isfinite(queries[i])) return fail("a query is not finite");
  try {
    std::lock_guard<std::mutex> lock(scanner->one_at_a_time);
    const int64_t compared = Search(*scanner, *rows, mask, queries, count, k).run(found, scores);
    if (rescored) *rescored = compared;
    return 0;
  } catch (const std::exception& error) {
    return fail(std::string("no memory for a search: ") + error.what());
  }
}

int rl_scan_products(rl_scanner* scanner, const rl_scan_rows* rows, const int8_t* bytes, int32_t count, int32_t* out) {
  if (const char* reason = wrong(rows)) return fail(reason);
  const int padded_d = padded(rows->dimensions);
  std::vector<int32_t> sums(static_cast<size_t>(count));
  for (int32_t q = 0; q < count; q++)
    for (int i = 0; i < padded_d; i++) sums[size_t(q)] += bytes[size_t(q) * size_t(padded_d) + size_t(i)];
  const ScanQueries queries{bytes, sums.data(), count, padded_d / 4};
  scanner->kernels->products(rows->panels, int(rows->capacity / kPanel), queries, out, size_t(rows->capacity));
  return 0;
}

}  // extern "C"
