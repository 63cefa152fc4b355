// Vectors of floats, as wide as the instruction set that this file is compiled for.
//
// kernel/*.cc are compiled once for each instruction set. FA_ISA names the instruction set, its header in isa/ and the
// namespace that keeps the copies apart. isa/portable.hpp says what a header defines; the kernels ask for it through Isa.
//
// No standard header with inline functions may be included by a kernel. The linker keeps one copy of such a function; it
// could keep the copy that was compiled for the widest instruction set, and run it on any machine.
#pragma once

#include "../attention.hpp"

#define FA_QUOTED(text) #text
#define FA_HEADER_OF(name) FA_QUOTED(isa/name.hpp)
#include FA_HEADER_OF(FA_ISA)

namespace fa::FA_ISA {

using Isa = isa::FA_ISA;

inline constexpr int kRegisters = Isa::kRegisters;
inline constexpr int kMicroRows = Isa::kMicroRows;
inline constexpr int kPanel = 2 * kLanes;  // rows of a packed panel (NR of BLIS): two vectors

FA_INLINE Vec maximum(Vec a, Vec b) { return Isa::maximum(a, b); }
FA_INLINE Vec minimum(Vec a, Vec b) { return Isa::minimum(a, b); }

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
template <class From>
FA_INLINE ChunkVec shuffle(ChunkVec a, ChunkVec b, From) {
  return shuffled<From, ChunkVec, ChunkVec>(a, b, typename CountLanes<4 * kLanes>::List{});
}

// Lane i of the result is lane i ^ kStep of v.
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

// The largest lane. No lane may be NaN.
template <int kStep = kLanes / 2>
FA_INLINE float max_lanes(Vec v) {
  v = maximum(v, swapped<kStep>(v));
  if constexpr (kStep > 1) return max_lanes<kStep / 2>(v);
  return v[0];
}

inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kLargest = 3.40282347e+38f;

FA_INLINE bool is_nan(float x) { return x != x; }

FA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FA_INLINE int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace fa::FA_ISA
