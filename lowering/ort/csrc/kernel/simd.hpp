// One vector of floats, as wide as the instruction set this file is being compiled for, by GCC's vector
// extensions: the arithmetic operators, comparisons and ?: work on whole vectors.
//
// Every kernel header is included once by each kernel_<isa>.cc, which defines FA_ISA, the namespace that
// keeps the copies apart. No standard header with inline functions may be included here: the linker
// could keep the copy compiled for the widest instruction set and run it on any machine.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)  // and everything above it
#include <immintrin.h>
#endif

#include "../attention.hpp"

namespace fa::FA_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
inline constexpr int kRegisters = 32;
inline constexpr int kTileRows = 12;  // 12 x 2 accumulators, 2 of B and 1 broadcast fit 32 registers
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
inline constexpr int kRegisters = 16;
inline constexpr int kTileRows = 6;  // 6 x 2 accumulators, 2 of B and 1 broadcast fit 16 registers
#elif defined(__aarch64__)
inline constexpr int kLanes = 4;
inline constexpr int kRegisters = 32;
inline constexpr int kTileRows = 12;
#else
inline constexpr int kLanes = 4;
inline constexpr int kRegisters = 16;
inline constexpr int kTileRows = 6;
#endif

inline constexpr int kPanel = 2 * kLanes;  // columns of a packed panel: two vectors

#define FA_INLINE [[gnu::always_inline]] static inline

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float LowVec __attribute__((vector_size(2 * kLanes)));  // the lower half of a Vec
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t ShortVec __attribute__((vector_size(4 * kLanes)));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

FA_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
FA_INLINE void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

// Where a vector takes twice the time of its lower half: Zen 4 computes 512 bits in two steps.
#if defined(__AVX512F__)
inline constexpr bool kHalvesPay = true;
FA_INLINE Vec widened(LowVec low) { return (Vec)_mm512_zextps256_ps512((__m256)low); }
#else
inline constexpr bool kHalvesPay = false;
#endif
FA_INLINE Vec widened(Vec v) { return v; }

FA_INLINE Vec splat(float x) { return x - Vec{}; }

// The second operand wins when either is NaN: greater(x, m) ignores a NaN in x, greater(low, x) keeps it.
// AVX-512 has instructions that do just that; GCC makes a comparison and a selection of the expressions.
FA_INLINE Vec greater(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
FA_INLINE Vec lesser(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// `x` as a number of its own: a product is rounded before it is added to something, where the compiler would otherwise make
// one fused instruction of both.
FA_INLINE Vec rounded(Vec x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

FA_INLINE Vec clear_where(IntVec condition, Vec v) { return (Vec)(~condition & (IntVec)v); }

// All ones in the first `count` lanes.
FA_INLINE IntVec first_lanes(int64_t count) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(count);
}

// All ones where the byte is not 0.
FA_INLINE IntVec nonzero_bytes(const uint8_t* p) {
  const ByteVec bytes = *reinterpret_cast<const ByteVec*>(p);
  return __builtin_convertvector(bytes, IntVec) != 0;
}

// kLanes numbers of 16 or 8 bits.
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef int8_t Int8Vec __attribute__((vector_size(kLanes)));

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

template <int... kLane>
struct LaneList {};
template <int kCount, int... kLane>
struct CountLanes : CountLanes<kCount - 1, kCount - 1, kLane...> {};
template <int... kLane>
struct CountLanes<0, kLane...> {
  using List = LaneList<kLane...>;
};

template <class From, class Vector, class Index, int... kLane>
FA_INLINE Vector shuffled(Vector a, Vector b, LaneList<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, From{}(kLane)...);
#else
  return __builtin_shuffle(a, b, Index{From{}(kLane)...});
#endif
}

// Lane i of the result is number from(i) of the lanes of a followed by those of b; `from` captures nothing.
template <class From>
FA_INLINE Vec shuffle(Vec a, Vec b, From) {
  return shuffled<From, Vec, IntVec>(a, b, typename CountLanes<kLanes>::List{});
}
template <class From>
FA_INLINE ShortVec shuffle(ShortVec a, ShortVec b, From) {
  return shuffled<From, ShortVec, ShortVec>(a, b, typename CountLanes<2 * kLanes>::List{});
}

// The lanes, each replaced by the one whose number differs in the bit kStep.
template <int kStep>
FA_INLINE Vec swapped(Vec v) {
  return shuffle(v, v, [](int lane) { return lane ^ kStep; });
}

template <int kStep = kLanes / 2>
FA_INLINE float sum_lanes(Vec v) {
  v += swapped<kStep>(v);
  if constexpr (kStep > 1) return sum_lanes<kStep / 2>(v);
  return v[0];
}

// No lane may be NaN.
template <int kStep = kLanes / 2>
FA_INLINE float max_lanes(Vec v) {
  v = greater(v, swapped<kStep>(v));
  if constexpr (kStep > 1) return max_lanes<kStep / 2>(v);
  return v[0];
}

inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kLargest = 3.40282347e+38f;

FA_INLINE bool is_nan(float x) { return x != x; }

FA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FA_INLINE int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace fa::FA_ISA
