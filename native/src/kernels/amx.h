// AMX: permission, the shape of the tiles, and what the linear and attention kernels share.
//
// Tiles 0–3 hold sums (16 × 16 floats), 6 and 7 inputs and weights (16 rows × 64 bytes). 4 and 5 are two more of those for
// linear layers; for attention they are half as deep, for the 16 tokens of a KV block: 16 rows × 32 bytes and 8 × 64.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

namespace {

constexpr int kTile = 16;     // rows of a tile

enum class TilesFor : uint8_t { Nothing, Linear, Attention };

// Palette 1. The palette is a constant: the CPUID leaf that describes it may be hidden.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Shapes this thread's tiles; they lose what they held.
inline void shape_tiles(TilesFor wanted) {
  static thread_local TilesFor shaped = TilesFor::Nothing;
  if (shaped == wanted) return;
  TileConfig config;
  if (wanted == TilesFor::Attention) config.row_bytes[4] = 32, config.rows[5] = 8;
  // GCC 12 does not see that loadconfig reads the structure; without this the stores may come after it.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  shaped = wanted;
}

inline void start_thread() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) _exit(1);  // only ever in the trial: see isa.cpp
  shape_tiles(TilesFor::Linear);
}

}  // namespace
