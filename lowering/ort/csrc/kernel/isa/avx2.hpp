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

  // A micro-tile reads 6 columns, so each line is read for three of them, and again from the second-level cache if the rows
  // share a few sets. Measured at 3 KB: a copy saves 2 to 3 %. With the 12 columns of AVX-512 it costs 2 %.
  static constexpr int64_t kCopiedValueRows = 1024;

  // GCC makes a comparison and a selection of Portable's expressions.
  FA_INLINE Vec maximum(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
  FA_INLINE Vec minimum(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }

  // The power of -127 is 0, so that nothing has to be compared. Between -126.5 and -126 the result is subnormal.
  FA_INLINE Vec exp2_nonpositive(Vec x) {
    constexpr float kRounder = 12582912.0f;           // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Vec clamped = maximum(splat(-127.0f), x);  // keeps a NaN
    const Vec shifted = clamped + kRounder;
    const Vec n = shifted - kRounder;
    const Vec power = (Vec)(((BitVec)shifted << 23) + 0x3f800000u);
    return exp2_fraction(clamped - n) * power;
  }

  FA_INLINE void stream(float* p, Vec v) { _mm256_stream_ps(p, (__m256)v); }
  FA_INLINE void finish_streams() { _mm_sfence(); }

  FA_INLINE bool all(IntVec holds) { return _mm256_movemask_ps((__m256)holds) == 0xff; }

  FA_INLINE Vec widen_float16s(HalfVec x) { return (Vec)_mm256_cvtph_ps((__m128i)x); }
  FA_INLINE HalfVec narrow_float16s(Vec x) { return (HalfVec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }

  FA_INLINE Vec widen_int8s(Int8Vec x) {
    const __m128i bytes = _mm_cvtsi64_si128(__builtin_bit_cast(long long, x));
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
};

}  // namespace fa::FA_ISA::isa
