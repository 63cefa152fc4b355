// The numbers of a row of K or V as they lie in memory, brought into a register a vector of products at a time:
// converted on the way, or two bfloat16 to a lane (pairs.hpp).
//
// Each type here has kStep, how many numbers one load brings; `load`; `load_some`, which reads `count` < kStep numbers
// and nothing beyond them, the others 0; and `add`, the products of two loads added to a sum.
#pragma once

#include "pairs.hpp"

namespace fa::FA_ISA {

struct StoredFloats {
  using Number = float;
  static constexpr int kStep = kLanes;
  static constexpr bool kPairs = false;

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

  FA_INLINE Vec load(const Number* p) { return fa::FA_ISA::load(reinterpret_cast<const float*>(p)); }
  FA_INLINE Vec load_some(const Number* p, int64_t count) {
    Vec v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(Number));
    return v;
  }
};

// Rows that rows.hpp has joined: floats, or pairs as they were.
template <bool kPairs>
struct JoinedOf {
  using Stored = StoredFloats;
};
template <>
struct JoinedOf<true> {
  using Stored = StoredPairs;
};
template <class Stored>
using Joined = typename JoinedOf<Stored::kPairs>::Stored;

using StoredFloat16 = StoredNarrow<HalfVec, uint16_t, widen_float16s>;
using StoredBfloat16 = StoredNarrow<HalfVec, uint16_t, widen_bfloat16s>;
using StoredInt8 = StoredNarrow<Int8Vec, int8_t, widen_int8s>;

}  // namespace fa::FA_ISA
