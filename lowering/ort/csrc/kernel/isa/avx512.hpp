// AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

namespace fa::FA_ISA {
inline constexpr int kLanes = 16;
}

#include "portable.hpp"

namespace fa::FA_ISA::isa {

struct avx512 : Portable {
  static constexpr int kRegisters = 32;
  static constexpr int kMicroRows = 12;  // 12 x 2 sums, 2 vectors of B and 1 broadcast number fit 32 registers

  // The copies of K and V, and reading them, take a larger share of the time where the products take less. With 224 rows a call
  // with heads of 128 takes 2 to 3 % longer on Zen 4, 8 % on Sapphire Rapids, and 11 % there with tile registers. The rows, a
  // block and its scores are less than the 1 MB of a second-level cache.
  static constexpr int64_t kTileRows = 448;

  // Zen 4 computes 512 bits in two steps.
  static constexpr bool kHalvesPay = true;

  using Portable::widened;
  FA_INLINE Vec widened(LowVec low) { return (Vec)_mm512_zextps256_ps512((__m256)low); }

  // GCC makes a comparison and a selection of Portable's expressions.
  FA_INLINE Vec maximum(Vec a, Vec b) { return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }
  FA_INLINE Vec minimum(Vec a, Vec b) { return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b); }

  FA_INLINE void stream(float* p, Vec v) { _mm512_stream_ps(p, (__m512)v); }
  FA_INLINE void finish_streams() { _mm_sfence(); }

  FA_INLINE bool all(IntVec holds) { return _mm512_movepi32_mask((__m512i)holds) == 0xffff; }

  FA_INLINE Vec widen_float16s(HalfVec x) { return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x); }
  FA_INLINE HalfVec narrow_float16s(Vec x) {
    return (HalfVec)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
  }

  FA_INLINE Vec widen_int8s(Int8Vec x) {
    return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x));
  }

  // vscalefps multiplies by 2^n and underflows to 0 by itself, which spares a comparison.
  FA_INLINE Vec exp2_nonpositive(Vec x) {
    const Vec clamped = maximum(splat(-160.0f), x);  // -inf - -inf would be NaN
    const Vec n = (Vec)_mm512_maskz_roundscale_ps(0xffff, (__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)exp2_fraction(clamped - n), (__m512)n);
  }
};

}  // namespace fa::FA_ISA::isa
