// Products of bfloat16 two at a time, where the processor has them (VNNI layout: two numbers in each 32-bit lane). One
// instruction then multiplies twice the numbers, and packed K and V take half the memory.
//
// The rounding is close to the device's: products of bfloat16 are summed as floats, and probabilities are rounded to
// bfloat16 before they are multiplied with the values. The softmax and its sum stay float32. Subnormal numbers count as 0.
#pragma once

#include "convert.hpp"

namespace fa::FA_ISA {

inline constexpr bool kHasPairs = Isa::kHasPairs;

// The bits of `x` in all lanes. splat() does not do: its subtraction would change two bfloat16.
FA_INLINE Vec splat_pair(float x) { return (Vec)(__builtin_bit_cast(int32_t, x) - IntVec{}); }

// sum + a b, or with kPairs sum + the products of the two bfloat16 in each lane of a and b.
template <bool kPairs>
FA_INLINE Vec add_products(Vec sum, Vec a, Vec b) {
  if constexpr (!kPairs) return sum + a * b;
  return Isa::add_pair_products(sum, a, b);
}

template <bool kPairs>
FA_INLINE Vec add_products(Vec sum, float a, Vec b) {
  return add_products<kPairs>(sum, kPairs ? splat_pair(a) : splat(a), b);
}

// The same for a number in memory that is used once. The instruction that multiplies then loads it, too.
template <bool kPairs>
FA_INLINE Vec add_products_of(Vec sum, const float& a, Vec b) {
  if constexpr (!kPairs) return sum + splat(a) * b;
  return Isa::add_products_of_pair(sum, a, b);
}

// Interleaves the bfloat16 numbers of two rows: low = even[0], odd[0], even[1], odd[1], ..., and high continues it.
FA_INLINE void interleave(Vec even, Vec odd, Vec& low, Vec& high) {
  const auto even_bits = (ShortVec)even;
  const auto odd_bits = (ShortVec)odd;
  low = (Vec)shuffle(even_bits, odd_bits, [](int i) { return i / 2 + i % 2 * 2 * kLanes; });
  high = (Vec)shuffle(even_bits, odd_bits, [](int i) { return i / 2 + kLanes + i % 2 * 2 * kLanes; });
}

// Rounds both to bfloat16. Lane l of the result holds even[l] in its lower half and odd[l] in its upper half.
FA_INLINE Vec pair_of(Vec even, Vec odd) {
  const auto both = (ShortVec)Isa::narrow_operands(even, odd);
  return (Vec)shuffle(both, both, [](int i) { return i / 2 + i % 2 * kLanes; });
}

// Rounds `count` floats to bfloat16 in place. Two numbers lie in each float of the first half of the row afterwards. An odd
// count is filled up with 0. The numbers beyond `count`, up to a whole vector, are overwritten.
FA_INLINE void narrow_to_pairs(float* row, int64_t count) {
  row[count] = 0;
  auto* out = reinterpret_cast<char*>(row);
  for (int64_t c = 0; c <= count; c += kLanes) store_as(out + c * 2, Isa::narrow_operands(load(row + c)));
}

// The same for a row of whole vectors, which has no room behind it.
FA_INLINE void narrow_vectors_to_pairs(float* row, int64_t count) {
  for (int64_t c = 0; c < count; c += 2 * kLanes) {
    const Vec second = c + kLanes < count ? load(row + c + kLanes) : Vec{};
    store(row + c / 2, (Vec)Isa::narrow_operands(load(row + c), second));
  }
}

// Rounds lines of kNumbers numbers, two lines to a line of pairs; these are `to_stride` floats apart. The last line of an odd
// number is paired with 0.
template <int64_t kNumbers = kPanel>
FA_INLINE void narrow_lines_to_pairs(const float* lines, int64_t stride, int64_t count, float* to, int64_t to_stride = kNumbers) {
  for (int64_t n = 0; n < count; n += 2, lines += 2 * stride, to += to_stride) {
#pragma GCC unroll 2
    for (int64_t v = 0; v < kNumbers; v += kLanes) {
      store(to + v, pair_of(load(lines + v), n + 1 < count ? load(lines + stride + v) : Vec{}));
    }
  }
}

}  // namespace fa::FA_ISA
