// The AMX kernels on CPUs without AMX: kernels_isa.cpp compiled once more, with arrays for tiles.
//
// The tiles demand what the instructions demand, and sanitizers see what a tile load reads, which they do not on the
// hardware. The rest of those kernels needs AVX-512 with bf16, and the file a GCC that knows AMX.
#include "attention_cases.h"
#include "linear_cases.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11

namespace ridgeline {
const Kernels* emulated_amx_kernels();
}

int main() {
  const char* wanted = std::getenv("RIDGELINE_ISA");
  if ((wanted && std::strcmp(wanted, "amx")) || kUnderThreadSanitizer) return 77;
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) {
    std::printf("skipped: the AMX kernels need AVX-512 with bf16, emulated or not\n");
    return 77;
  }
  linear_cases::check_linear(*ridgeline::emulated_amx_kernels(), true);
  attention_cases::check_attention(*ridgeline::emulated_amx_kernels());
  return report();
}

// ---- the tiles ----

namespace emulated {

struct Tile {
  int rows = 0, bytes = 0;  // of a row
  uint8_t data[16][64];
};
thread_local Tile tiles[8];

void demand(bool met, const char* what) {
  if (met) return;
  std::fprintf(stderr, "an AMX instruction would fault: %s (%s)\n", what, checking);
  std::abort();
}

struct Config {  // as LDTILECFG reads it
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

void load_config(const void* at) {
  Config config;
  std::memcpy(&config, at, sizeof config);
  demand(config.palette == 1 && config.start_row == 0, "a palette other than 1, or a first row");
  for (uint8_t byte : config.reserved) demand(byte == 0, "a reserved byte of the configuration is not 0");
  for (int i = 0; i < 16; i++) {
    const int rows = config.rows[i], bytes = config.row_bytes[i];
    demand(i < 8 ? rows <= 16 && bytes <= 64 && bytes % 4 == 0 : rows == 0 && bytes == 0, "a tile's size");
    if (i < 8) tiles[i].rows = rows, tiles[i].bytes = bytes;
  }
}

Tile& configured(int index) {
  demand(index >= 0 && index < 8 && tiles[index].rows > 0 && tiles[index].bytes > 0, "a tile that is not configured");
  return tiles[index];
}
void zero(int index) { std::memset(configured(index).data, 0, sizeof tiles[0].data); }
void load(int index, const void* base, size_t stride) {
  Tile& tile = configured(index);
  std::memset(tile.data, 0, sizeof tile.data);
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(tile.data[row], static_cast<const uint8_t*>(base) + size_t(row) * stride, size_t(tile.bytes));
}
void store(int index, void* base, size_t stride) {
  const Tile& tile = configured(index);
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(static_cast<uint8_t*>(base) + size_t(row) * stride, tile.data[row], size_t(tile.bytes));
}

// sums[m][n] += Σ of dword k of row m of a times dword n of row k of b.
template <class Sum, class Multiply>
void multiply(int sums, int a, int b, const Multiply& product) {
  Tile &c = configured(sums), &x = configured(a), &w = configured(b);
  demand(sums != a && sums != b && a != b, "one tile twice");
  demand(x.bytes / 4 == w.rows && c.rows == x.rows && c.bytes == w.bytes, "tiles that do not fit each other");
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.bytes / 4; n++) {
      Sum sum;
      std::memcpy(&sum, &c.data[m][n * 4], 4);
      for (int k = 0; k < w.rows; k++) sum += product(&x.data[m][k * 4], &w.data[k][n * 4]);
      std::memcpy(&c.data[m][n * 4], &sum, 4);
    }
}

float bf16_at(const uint8_t* at) {
  const uint32_t bits = uint32_t(at[0] | at[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return std::fabs(value) < 0x1p-126f ? 0.0f : value;  // subnormal numbers count as zero
}
void multiply_bf16(int sums, int a, int b) {
  multiply<float>(sums, a, b, [](const uint8_t* x, const uint8_t* w) {
    return bf16_at(x) * bf16_at(w) + bf16_at(x + 2) * bf16_at(w + 2);
  });
}
void multiply_bytes(int sums, int a, int b) {  // signed times unsigned; UBSan sees a sum that overflows
  multiply<int32_t>(sums, a, b, [](const uint8_t* x, const uint8_t* w) {
    int32_t sum = 0;
    for (int i = 0; i < 4; i++) sum += int8_t(x[i]) * w[i];
    return sum;
  });
}

long grant(long, ...) { return 0; }

}  // namespace emulated

// ---- the kernels, from here on compiled for their instruction set ----

#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,f16c,fma,amx-tile,amx-bf16,amx-int8")
#include <immintrin.h>
// GCC's C++ reads a whole file before it heeds the pragma, so that it does not define these.
#define __AVX512F__ 1
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero emulated::zero
#define _tile_dpbf16ps emulated::multiply_bf16
#define _tile_dpbsud emulated::multiply_bytes
#define syscall emulated::grant
#define RL_ISA emulated_amx
#include "../src/kernels_isa.cpp"

#else

int main() { return 77; }

#endif
