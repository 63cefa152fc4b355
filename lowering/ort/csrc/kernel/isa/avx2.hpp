// AVX2 with FMA and the conversions of F16C.
#pragma once

#include <immintrin.h>

namespace fa::FA_ISA {
inline constexpr int kLanes = 8;
}

#include "portable.hpp"

namespace fa::FA_ISA::isa {

struct avx2 : Portable {
  static constexpr int kRegisters = 16;
  static constexpr int kMicroRows = 6;  // 6 x 2 sums, 2 vectors of B and 1 broadcast number fit 16 registers

  FA_INLINE bool all(IntVec holds) { return _mm256_movemask_ps((__m256)holds) == 0xff; }

  FA_INLINE Vec widen_float16s(HalfVec x) { return (Vec)_mm256_cvtph_ps((__m128i)x); }
  FA_INLINE HalfVec narrow_float16s(Vec x) { return (HalfVec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }

  FA_INLINE Vec widen_int8s(Int8Vec x) {
    const __m128i bytes = _mm_cvtsi64_si128(__builtin_bit_cast(long long, x));
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
};

}  // namespace fa::FA_ISA::isa
