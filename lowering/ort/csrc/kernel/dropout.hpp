// Dropout of probabilities by a mask of bits, least significant bit first, 1 where the probability stays.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Bit number `at` and the following ones, `count` of at most 25, from bit 0 of the result on; no byte beyond is read.
FA_INLINE uint32_t bits_from(const uint8_t* mask, int64_t at, int64_t count) {
  uint32_t word = 0;
  for (int64_t n = (at + count - 1) / 8; n >= at / 8; --n) word = word << 8 | mask[n];
  return word >> (at % 8);
}

// Where row i of a head begins.
FA_INLINE int64_t drop_bit(const Sequence& sequence, int64_t head, int64_t i) {
  return sequence.drop + (head * sequence.query_length + i) * sequence.key_length;
}

// Clears `count` probabilities whose bit is 0. Whole vectors are read and written.
FA_INLINE void drop(float* probabilities, int64_t count, const uint8_t* mask, int64_t at) {
  BitVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = 1u << i;
  for (int64_t c = 0; c < count; c += kLanes) {
    const uint32_t word = bits_from(mask, at + c, smaller(kLanes, count - c));
    const IntVec dropped = (IntVec)((word - BitVec{}) & lane) == 0;
    store(probabilities + c, clear_where(dropped, load(probabilities + c)));
  }
}

}  // namespace fa::FA_ISA
