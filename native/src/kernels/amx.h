// AMX: permission, the shape of the tiles, and what the linear and attention kernels share.
//
// Tiles 0–3 hold sums (16 × 16 floats), 6 inputs (16 rows × 64 bytes), 7 weights (16 × 64 bytes); 4 and 5 are half as deep,
// for the 16 tokens of a KV block: 16 rows × 32 bytes and 8 × 64 bytes.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

namespace {

constexpr int kTile = 16;     // rows of a tile
constexpr int kTileSums = 4;  // tiles that hold sums

// Palette 1. The palette is a constant: the CPUID leaf that describes it may be hidden.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 8, 16, 16};
};

inline void start_thread() {
  static thread_local bool ready = false;
  if (ready) return;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) _exit(1);  // only ever in the trial: see isa.cpp
  const TileConfig config;
  // GCC 12 does not see that loadconfig reads the structure; without this the stores may come after it.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  ready = true;
}

}  // namespace
