// Dropout of probabilities. The mask has one bit for each probability, least significant bit first; 1 keeps it.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Bits [at, at + count) of the mask in the lowest bits of the result. `count` is at most 25. No byte beyond them is read.
FA_INLINE uint32_t bits_from(const uint8_t* mask, int64_t at, int64_t count) {
  uint32_t bits = 0;
  for (int64_t n = (at + count - 1) / 8; n >= at / 8; --n) bits = bits << 8 | mask[n];
  return bits >> (at % 8);
}

// The bit of row i and key 0.
FA_INLINE int64_t drop_bit(const Sequence& sequence, int64_t head, int64_t i) {
  return sequence.drop + (head * sequence.query_length + i) * sequence.key_length;
}

// Sets those of `count` probabilities to 0 whose bit is 0. Whole vectors are read and written.
FA_INLINE void drop(float* probabilities, int64_t count, const uint8_t* mask, int64_t at) {
  BitVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = 1u << i;
  for (int64_t c = 0; c < count; c += kLanes) {
    const uint32_t bits = bits_from(mask, at + c, smaller(kLanes, count - c));
    const IntVec dropped = (IntVec)((bits - BitVec{}) & lane) == 0;
    store(probabilities + c, clear_where(dropped, load(probabilities + c)));
  }
}

}  // namespace fa::FA_ISA
