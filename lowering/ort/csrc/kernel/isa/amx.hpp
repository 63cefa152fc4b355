// Tile registers (Intel's AMX) for products of bfloat16. Nothing but such products is computed by this variant.
//
// The instructions are written as assembly, because a compiler's intrinsics do not say that they read and write memory.
#pragma once

#include "../../tiles.hpp"
#include "avx512bf16.hpp"

namespace fa::FA_ISA::isa {

struct amx : avx512bf16 {
  static constexpr int kMicroRows = kTileSide;
  static constexpr bool kHasTiles = true;

  FA_INLINE void enable_tiles() {
    const TileConfiguration configuration;
    asm volatile("ldtilecfg %0" ::"m"(configuration));
  }
  FA_INLINE void disable_tiles() { asm volatile("tilerelease"); }

  template <int kTile>
  FA_INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"n"(kTile));
  }
  template <int kTile>
  FA_INLINE void load_tile(const float* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"n"(kTile), "r"(from), "r"(stride * 4) : "memory");
  }
  template <int kTile>
  FA_INLINE void store_tile(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"n"(kTile), "r"(to), "r"(stride * 4) : "memory");
  }
  template <int kC, int kA, int kB>
  FA_INLINE void add_tile_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kC), "n"(kA), "n"(kB));
  }

  FA_INLINE Vec load_first(const float* p, int64_t count) {
    return (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
  }
};

}  // namespace fa::FA_ISA::isa
