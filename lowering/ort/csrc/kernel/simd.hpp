// One vector of floats, as wide as the instruction set this file is being compiled for, by GCC's vector
// extensions: the arithmetic operators, comparisons and ?: work on whole vectors.
//
// Every kernel header is included once by each kernel_<isa>.cc, which defines FA_ISA, the namespace that
// keeps the copies apart. No standard header with inline functions may be included here: the linker
// could keep the copy compiled for the widest instruction set and run it on any machine.
#pragma once

#include "../attention.hpp"

#define FA_QUOTED(text) #text
#define FA_HEADER_OF(name) FA_QUOTED(isa/name.hpp)
#include FA_HEADER_OF(FA_ISA)

namespace fa::FA_ISA {

using Isa = isa::FA_ISA;

inline constexpr int kRegisters = Isa::kRegisters;
inline constexpr int kMicroRows = Isa::kMicroRows;
inline constexpr int kPanel = 2 * kLanes;  // columns of a packed panel: two vectors

FA_INLINE Vec greater(Vec a, Vec b) { return Isa::maximum(a, b); }
FA_INLINE Vec lesser(Vec a, Vec b) { return Isa::minimum(a, b); }

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
