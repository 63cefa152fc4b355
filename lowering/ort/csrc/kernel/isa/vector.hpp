// Vectors of kLanes numbers in GCC's vector extensions: the arithmetic operators, comparisons and ?: work on whole vectors.
// The header of an instruction set defines kLanes and then includes this file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fa::FA_ISA {

#define FA_INLINE [[gnu::always_inline]] static inline

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float LowVec __attribute__((vector_size(2 * kLanes)));  // the lower half of a Vec
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t ShortVec __attribute__((vector_size(4 * kLanes)));  // twice as many lanes
typedef uint8_t ChunkVec __attribute__((vector_size(4 * kLanes)));   // four times as many
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));   // kLanes numbers of 16 bits
typedef int8_t Int8Vec __attribute__((vector_size(kLanes)));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

FA_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
FA_INLINE void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

template <class Vector>
FA_INLINE Vector load_as(const void* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class Vector>
FA_INLINE void store_as(void* p, Vector v) {
  __builtin_memcpy(p, &v, sizeof v);
}

FA_INLINE Vec splat(float x) { return x - Vec{}; }

FA_INLINE float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
FA_INLINE uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

FA_INLINE Vec clear_where(IntVec condition, Vec v) { return (Vec)(~condition & (IntVec)v); }

// Returns x. The compiler has to compute x before it goes on, so that a product is rounded before something is added to it.
// Otherwise it would contract both to one fused multiply-add.
FA_INLINE Vec rounded(Vec x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

}  // namespace fa::FA_ISA
