// Stored numbers as vectors of floats, whatever they are stored as: nothing is converted but in registers.
#pragma once

#include "../../decode.hpp"
#include "../convert.hpp"

namespace fa::FA_ISA {

template <Cell kCell>
inline constexpr int64_t kCellBytes = kCell == Cell::float32 ? 4 : kCell == Cell::int8 ? 1 : 2;

FA_INLINE int64_t bytes_of(Cell cell) { return cell == Cell::float32 ? 4 : cell == Cell::int8 ? 1 : 2; }

FA_INLINE Type type_of(Cell cell) { return static_cast<Type>(cell); }

typedef int8_t SignedByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

// float16 by moving exponent and mantissa to their place: see widen_float16.
FA_INLINE Vec widen_halfs(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const BitVec bits = widen(p);
  const BitVec magnitude = (bits & 0x7fffu) << 13;
  const Vec scaled = (Vec)magnitude * 0x1p112f;
  const BitVec large = (BitVec)(magnitude >= (0x1fu << 23));
  return (Vec)((large & (magnitude | 0x7f800000u)) | (~large & (BitVec)scaled) | (bits & 0x8000u) << 16);
#endif
}

FA_INLINE Vec widen_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtepi32_ps(
      0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const SignedByteVec*>(p), Vec);
#endif
}

// kLanes numbers from `p` on.
template <Cell kCell>
FA_INLINE Vec cells(const char* p) {
  if constexpr (kCell == Cell::float32) return load(reinterpret_cast<const float*>(p));
  if constexpr (kCell == Cell::float16) return widen_halfs(reinterpret_cast<const uint16_t*>(p));
  if constexpr (kCell == Cell::bfloat16) return (Vec)(widen(reinterpret_cast<const uint16_t*>(p)) << 16);
  if constexpr (kCell == Cell::int8) return widen_bytes(reinterpret_cast<const int8_t*>(p));
}

// The first `count` < kLanes numbers, then zeros: what lies behind them is not touched.
template <Cell kCell>
FA_INLINE Vec first_cells(const char* p, int64_t count) {
  alignas(4 * kLanes) char whole[4 * kLanes] = {};
  __builtin_memcpy(whole, p, static_cast<size_t>(count * kCellBytes<kCell>));
  return cells<kCell>(whole);
}

}  // namespace fa::FA_ISA
