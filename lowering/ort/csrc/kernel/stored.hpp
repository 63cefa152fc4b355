// The numbers of a row of K or V as they lie in memory, brought into a register a vector of products at a time:
// converted on the way, or two bfloat16 to a lane (pairs.hpp).
//
// Each type here has kStep, how many numbers one load brings; `load`; and `load_some`, which reads `count` < kStep numbers
// and nothing beyond them, the others 0. What is loaded is a vector of products' operands, but for kApart, where it is
// two (apart below).
#pragma once

#include "pairs.hpp"

namespace fa::FA_ISA {

struct StoredFloats {
  using Number = float;
  static constexpr int kStep = kLanes;
  static constexpr bool kPairs = false;
  static constexpr bool kApart = false;

  FA_INLINE Vec load(const Number* p) { return fa::FA_ISA::load(p); }
  FA_INLINE Vec load_some(const Number* p, int64_t count) {
    Vec v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(Number));
    return v;
  }
};

// Numbers of 8 or 16 bits, kLanes of them in a `Bits`, widened to floats.
template <class Bits, class Stored, Vec (*kWiden)(Bits)>
struct StoredNarrow {
  using Number = Stored;
  static constexpr int kStep = kLanes;
  static constexpr bool kPairs = false;
  static constexpr bool kApart = false;

  FA_INLINE Vec load(const Number* p) { return kWiden(load_as<Bits>(p)); }
  FA_INLINE Vec load_some(const Number* p, int64_t count) {
    Bits v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(Number));
    return kWiden(v);
  }
};

struct StoredPairs {
  using Number = uint16_t;
  static constexpr int kStep = 2 * kLanes;
  static constexpr bool kPairs = true;
  static constexpr bool kApart = false;

  FA_INLINE Vec load(const Number* p) { return load_as<Vec>(p); }
  FA_INLINE Vec load_some(const Number* p, int64_t count) {
    Vec v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(Number));
    return v;
  }
};

// bfloat16 values two to a lane, which become two vectors of floats by a shift and by a mask: half the instructions of
// widening each half of a load. The sums of even and odd numbers stay apart while values go by.
struct StoredApart : StoredPairs {
  static constexpr bool kPairs = false;
  static constexpr bool kApart = true;

  FA_INLINE Vec even(Vec v) { return (Vec)((BitVec)v << 16); }
  FA_INLINE Vec odd(Vec v) { return (Vec)((BitVec)v & 0xffff0000u); }
};

// The sums of one load's columns.
template <class Stored>
inline constexpr int kSumsOf = Stored::kStep / kLanes;

template <class Stored>
FA_INLINE void load_sums(const float* from, Vec (&sums)[kSumsOf<Stored>]) {
#pragma GCC unroll 2
  for (int u = 0; u < kSumsOf<Stored>; ++u) sums[u] = load(from + u * kLanes);
  if constexpr (Stored::kApart) {
    const Vec low = sums[0];
    const Vec high = sums[1];
    sums[0] = shuffle(low, high, [](int lane) { return 2 * lane; });
    sums[1] = shuffle(low, high, [](int lane) { return 2 * lane + 1; });
  }
}

template <class Stored>
FA_INLINE void store_sums(float* to, const Vec (&sums)[kSumsOf<Stored>]) {
  if constexpr (Stored::kApart) {
    store(to, shuffle(sums[0], sums[1], [](int lane) { return lane / 2 + lane % 2 * kLanes; }));
    store(to + kLanes, shuffle(sums[0], sums[1], [](int lane) { return (lane + kLanes) / 2 + lane % 2 * kLanes; }));
    return;
  }
#pragma GCC unroll 2
  for (int u = 0; u < kSumsOf<Stored>; ++u) store(to + u * kLanes, sums[u]);
}

// Pairs where kPairs, else another way.
template <bool kPairs, class Other>
struct PairsOrOf {
  using Stored = Other;
};
template <class Other>
struct PairsOrOf<true, Other> {
  using Stored = StoredPairs;
};
template <bool kPairs, class Other>
using PairsOr = typename PairsOrOf<kPairs, Other>::Stored;

// Rows that rows.hpp has joined: floats, or pairs as they were.
template <class Stored>
using Joined = PairsOr<Stored::kPairs, StoredFloats>;

using StoredFloat16 = StoredNarrow<HalfVec, uint16_t, widen_float16s>;
using StoredBfloat16 = StoredNarrow<HalfVec, uint16_t, widen_bfloat16s>;
using StoredInt8 = StoredNarrow<Int8Vec, int8_t, widen_int8s>;

}  // namespace fa::FA_ISA
