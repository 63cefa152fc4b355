// Decoding with an int8 query: both products are those of integers. The rounding of the exponentials depends on the
// largest score of all, so a row has all its scores before it reads a value.
#pragma once

#include "../online_softmax.hpp"
#include "output.hpp"

namespace fa::FA_ISA {

// The memory of one row: `length` scores, as many weights, sums of values and the result.
struct IntegerScratch {
  float* scores;
  float* row;
  int64_t* sums;
  int32_t* part;  // of kPartTokens tokens

  static size_t bytes(int64_t length, int64_t size) {
    return static_cast<size_t>(length + kLanes + 2 * size) * sizeof(float) + static_cast<size_t>(size + 1) * sizeof(int64_t);
  }
  IntegerScratch(void* memory, int64_t length, int64_t size) {
    scores = static_cast<float*>(memory);
    row = scores + length + kLanes;
    part = reinterpret_cast<int32_t*>(row + size);
    sums = reinterpret_cast<int64_t*>((reinterpret_cast<uintptr_t>(part + size) + 7) / 8 * 8);
  }
};

// So many products of two int8 always fit 32 bits.
inline constexpr int64_t kPartTokens = 1 << 16;

FA_INLINE int32_t dot(const int8_t* a, const int8_t* b, int64_t size) {
  int32_t sum = 0;
  for (int64_t d = 0; d < size; ++d) sum += int32_t{a[d]} * b[d];
  return sum;
}

static float score_of(const Decode& d, const DecodeEntry& entry, const int8_t* query, int64_t head, int64_t token) {
  if (entry.mask != nullptr && entry.mask[token] != 0) return kMaskedScore;
  const int64_t at = row_of(d, entry, token) + head / d.group() * entry.head_stride;
  const float product = static_cast<float>(dot(query, static_cast<const int8_t*>(entry.key) + at, d.size));
  const float score = d.scale * (product * d.dequant_scale1);
  if (d.pse == nullptr) return score;
  float bias;
  return score + *as_floats(d.pse, entry.pse + head * d.pse_head + token, 1, type_of(d.pse_cell), &bias);
}

static void attend_integers(const Decode& d, int64_t index, int64_t head, void* memory) {
  const DecodeEntry& entry = d.entries[index];
  const IntegerScratch s(memory, entry.length, d.size);
  const int64_t at = (index * d.heads + head) * d.size;
  const int8_t* query = static_cast<const int8_t*>(d.query) + at;
  float top = -kInfinity;
  for (int64_t j = 0; j < entry.length; ++j) {
    s.scores[j] = score_of(d, entry, query, head, j);
    top = s.scores[j] > top ? s.scores[j] : top;
  }
  const float total = exponentials(s.scores, entry.length, 1.0f, exp_origin(top));
  for (int64_t i = 0; i < d.size; ++i) s.sums[i] = 0;
  for (int64_t first = 0; first < entry.length; first += kPartTokens) {
    for (int64_t i = 0; i < d.size; ++i) s.part[i] = 0;
    for (int64_t j = first; j < smaller(first + kPartTokens, entry.length); ++j) {
      const int32_t weight = to_int8(s.scores[j] * d.quant_scale1);
      if (weight == 0) continue;
      const int8_t* value = static_cast<const int8_t*>(entry.value) + row_of(d, entry, j) +
                            head / d.group() * entry.head_stride;
      for (int64_t i = 0; i < d.size; ++i) s.part[i] += weight * value[i];
    }
    for (int64_t i = 0; i < d.size; ++i) s.sums[i] += s.part[i];
  }
  for (int64_t i = 0; i < d.size; ++i) s.row[i] = static_cast<float>(s.sums[i]) * d.dequant_scale2 / total;
  write_result(d, at, head, s.row);
}

}  // namespace fa::FA_ISA
