// How the numbers of a row of K or V are loaded from memory: each type below reads one storage format into registers.
//
// kPerLoad is how many numbers one load reads. load() reads kPerLoad numbers. load_partial() reads `count` < kPerLoad
// numbers and no memory beyond them; the other lanes become 0. The result is one vector of operands of a product: floats,
// or with kPairs two bfloat16 in each lane (pairs.hpp). With kEvenOdd it holds two vectors of floats, which even() and
// odd() extract. With kPaged the products prefetch what StoredRows::ahead says.
#pragma once

#include "pairs.hpp"

namespace fa::FA_ISA {

// float32 numbers.
struct StoredFloats {
  using Number = float;
  static constexpr int kPerLoad = kLanes;
  static constexpr bool kPairs = false;
  static constexpr bool kEvenOdd = false;
  static constexpr bool kPaged = false;

  FA_INLINE Vec load(const Number* p) { return fa::FA_ISA::load(p); }
  FA_INLINE Vec load_partial(const Number* p, int64_t count) { return Isa::load_first(p, count); }
};

// kLanes numbers of 8 or 16 bits, loaded as `Bits` and widened to floats.
template <class Bits, class Stored, Vec (*kWiden)(Bits)>
struct StoredNarrow {
  using Number = Stored;
  static constexpr int kPerLoad = kLanes;
  static constexpr bool kPairs = false;
  static constexpr bool kEvenOdd = false;
  static constexpr bool kPaged = false;

  FA_INLINE Vec load(const Number* p) { return kWiden(load_as<Bits>(p)); }
  FA_INLINE Vec load_partial(const Number* p, int64_t count) {
    Bits v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(Number));
    return kWiden(v);
  }
};

// bfloat16 numbers, two in each lane, as operands of products of pairs.
struct StoredPairs {
  using Number = uint16_t;
  static constexpr int kPerLoad = 2 * kLanes;
  static constexpr bool kPairs = true;
  static constexpr bool kEvenOdd = false;
  static constexpr bool kPaged = false;

  FA_INLINE Vec load(const Number* p) { return load_as<Vec>(p); }
  FA_INLINE Vec load_partial(const Number* p, int64_t count) {
    Vec v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(Number));
    return v;
  }
};

// bfloat16 numbers, two in each lane. A shift and a mask turn them into two vectors of floats, which takes half the
// instructions of widening each half of a load. Sums of even and of odd numbers are kept in vectors of their own while keys
// go by.
struct StoredEvenOdd : StoredPairs {
  static constexpr bool kPairs = false;
  static constexpr bool kEvenOdd = true;

  FA_INLINE Vec even(Vec v) { return (Vec)((BitVec)v << 16); }
  FA_INLINE Vec odd(Vec v) { return (Vec)((BitVec)v & 0xffff0000u); }
};

// The same numbers, in pages.
template <class Stored>
struct Paged : Stored {
  static constexpr bool kPaged = true;
};

// Vectors of sums for the columns of one load.
template <class Stored>
inline constexpr int kSumsPerLoad = Stored::kPerLoad / kLanes;

// Loads the sums of one load's columns; with kEvenOdd as sums of even and of odd columns.
template <class Stored>
FA_INLINE void load_sums(const float* from, Vec (&sums)[kSumsPerLoad<Stored>]) {
#pragma GCC unroll 2
  for (int u = 0; u < kSumsPerLoad<Stored>; ++u) sums[u] = load(from + u * kLanes);
  if constexpr (Stored::kEvenOdd) {
    const Vec low = sums[0];
    const Vec high = sums[1];
    sums[0] = shuffle(low, high, [](int lane) { return 2 * lane; });
    sums[1] = shuffle(low, high, [](int lane) { return 2 * lane + 1; });
  }
}

// Stores what load_sums loads.
template <class Stored>
FA_INLINE void store_sums(float* to, const Vec (&sums)[kSumsPerLoad<Stored>]) {
  if constexpr (Stored::kEvenOdd) {
    store(to, shuffle(sums[0], sums[1], [](int lane) { return lane / 2 + lane % 2 * kLanes; }));
    store(to + kLanes, shuffle(sums[0], sums[1], [](int lane) { return (lane + kLanes) / 2 + lane % 2 * kLanes; }));
    return;
  }
#pragma GCC unroll 2
  for (int u = 0; u < kSumsPerLoad<Stored>; ++u) store(to + u * kLanes, sums[u]);
}

// StoredPairs if kPairs, else `Other`.
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

// The format of rows that rows.hpp has joined: floats, or pairs as they were.
template <class Stored>
using Joined = PairsOr<Stored::kPairs, StoredFloats>;

using StoredFloat16 = StoredNarrow<HalfVec, uint16_t, widen_float16s>;
using StoredBfloat16 = StoredNarrow<HalfVec, uint16_t, widen_bfloat16s>;
using StoredInt8 = StoredNarrow<Int8Vec, int8_t, widen_int8s>;

}  // namespace fa::FA_ISA
