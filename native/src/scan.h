// Vector search in steps that a test can call: bytes of a vector, a query as the kernels take it, the kernels of each set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ridgeline {

// Queries of a scan as signed bytes, `dwords` · 4 of each, and the sum of each one's bytes.
struct ScanQueries {
  const int8_t* bytes;
  const int32_t* sums;
  int count, dwords;
};

// A row's upper bound is product · scale · factor + residual · length + slack.
struct ScanBound {
  float factor, length, slack;
};

struct ScanPart {
  int first, rows;  // a multiple of 16
  const float *scales, *residuals;
  const uint16_t* mask;
};

struct Candidate {
  float upper;
  int32_t row;
};

// A table of its own: scan_isa.cpp is compiled once per instruction set as kernels_isa.cpp is, and takes seconds.
struct ScanKernels {
  // out[query · stride + row] = the query's product with each row of `count` panels, an even number.
  void (*products)(const uint8_t* panels, int count, const ScanQueries&, int32_t* out, size_t stride);
  // Writes the rows of the mask whose upper bound is at least `limit`; returns their number.
  int (*select)(const int32_t* products, const ScanPart&, const ScanBound&, float limit, Candidate* out);
};

const ScanKernels* portable_scan_kernels();
const ScanKernels* neon_scan_kernels();
const ScanKernels* dotprod_scan_kernels();
const ScanKernels* i8mm_scan_kernels();
const ScanKernels* avx2_scan_kernels();
const ScanKernels* avxvnni_scan_kernels();
const ScanKernels* avx512vnni_scan_kernels();
const ScanKernels* avx512_scan_kernels();
const ScanKernels* amx_scan_kernels();

struct ByteVector {
  float scale;     // the vector is about scale · bytes
  float residual;  // at least the length of the difference
};

// Rounds to bytes within ±127; fills the padding with zeros.
ByteVector to_bytes(const float* vector, int dimensions, int padded, int8_t* bytes);

// The product in double precision, in an order that no instruction set changes.
double exact_product(const float* a, const float* b, int dimensions);

}  // namespace ridgeline
