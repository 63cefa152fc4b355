// bfloat16 products two at a time, where the processor has them: twice the numbers in each instruction and half the
// memory for packed K and V.
//
// What is computed is close to the device's own way (products of bfloat16 summed as floats, probabilities rounded to
// bfloat16 before they meet the values; the softmax and its sum stay float32). Subnormal numbers count as 0.
#pragma once

#include "convert.hpp"

namespace fa::FA_ISA {

inline constexpr bool kHasPairs = Isa::kHasPairs;

// `x` in all lanes, bits and all: arithmetic on two bfloat16 would spoil them.
FA_INLINE Vec splat_pair(float x) { return (Vec)(__builtin_bit_cast(int32_t, x) - IntVec{}); }

// sum + a b, or with kPairs sum + the products of both halves of a and b.
template <bool kPairs>
FA_INLINE Vec add_products(Vec sum, Vec a, Vec b) {
  if constexpr (!kPairs) return sum + a * b;
  return Isa::add_pair_products(sum, a, b);
}

template <bool kPairs>
FA_INLINE Vec add_products(Vec sum, float a, Vec b) {
  return add_products<kPairs>(sum, kPairs ? splat_pair(a) : splat(a), b);
}

// Two keys' numbers of the same kLanes columns, side by side: columns [0, kLanes) and [kLanes, 2 kLanes) of 2 kLanes.
FA_INLINE void interleave(Vec even, Vec odd, Vec& low, Vec& high) {
  const auto even_bits = (ShortVec)even;
  const auto odd_bits = (ShortVec)odd;
  low = (Vec)shuffle(even_bits, odd_bits, [](int i) { return i / 2 + i % 2 * 2 * kLanes; });
  high = (Vec)shuffle(even_bits, odd_bits, [](int i) { return i / 2 + kLanes + i % 2 * 2 * kLanes; });
}

// Both rounded to bfloat16, `even` in the lower halves.
FA_INLINE Vec pair_of(Vec even, Vec odd) {
  const auto both = (ShortVec)Isa::narrow_operands(even, odd);
  return (Vec)shuffle(both, both, [](int i) { return i / 2 + i % 2 * kLanes; });
}

// Rounds `count` floats to bfloat16, pairs of them in the 32 bits of each float of the first half of the same memory. An
// odd count is filled up with 0; what lies beyond up to a whole vector is written, too.
FA_INLINE void narrow_to_pairs(float* row, int64_t count) {
  row[count] = 0;
  auto* out = reinterpret_cast<char*>(row);
  for (int64_t c = 0; c <= count; c += kLanes) store_as(out + c * 2, Isa::narrow_operands(load(row + c)));
}

}  // namespace fa::FA_ISA
