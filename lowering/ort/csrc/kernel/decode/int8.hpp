// Decoding with an int8 query: both products are of integers. The exponentials are rounded to integers relative to the row's
// largest score, so all scores are computed before a value is read.
#pragma once

#include "../online_softmax.hpp"
#include "../softcap.hpp"
#include "output.hpp"

namespace fa::FA_ISA {

// The memory of one row: `length` scores, which become weights, the sums of the values, and the result.
struct Int8Scratch {
  float* scores;
  float* row;
  int64_t* sums;
  int32_t* block_sums;  // the sums of kBlockTokens tokens

  static size_t bytes(int64_t length, int64_t size) {
    return static_cast<size_t>(length + kLanes + 2 * size) * sizeof(float) + static_cast<size_t>(size + 1) * sizeof(int64_t);
  }
  Int8Scratch(void* memory, int64_t length, int64_t size) {
    scores = static_cast<float*>(memory);
    row = scores + length + kLanes;
    block_sums = reinterpret_cast<int32_t*>(row + size);
    sums = reinterpret_cast<int64_t*>((reinterpret_cast<uintptr_t>(block_sums + size) + 7) / 8 * 8);
  }
};

// The sum of so many products of two int8 fits 32 bits.
inline constexpr int64_t kBlockTokens = 1 << 16;

FA_INLINE int32_t dot(const int8_t* a, const int8_t* b, int64_t size) {
  int32_t sum = 0;
  for (int64_t d = 0; d < size; ++d) sum += int32_t{a[d]} * b[d];
  return sum;
}

// The score of one token.
static float score_of(const Decode& d, const DecodeEntry& entry, const int8_t* query, int64_t head, int64_t token) {
  if (entry.mask != nullptr && entry.mask[token] != 0) return kMaskedScore;
  const int64_t at = row_of(d, entry, token) + head / d.group() * entry.head_stride;
  const float product = static_cast<float>(dot(query, static_cast<const int8_t*>(entry.key) + at, d.size));
  const float scaled = product * d.dequant_scale1;
  const float score = d.softcap == 0 ? d.scale * scaled : Softcap(d.softcap, d.scale).score(splat(scaled))[0];
  if (d.pse == nullptr) return score;
  float bias;
  return score + *as_floats(d.pse, entry.pse + head * d.pse_head + token, 1, type_of(d.pse_cell), &bias);
}

// One query head of one entry.
static void attend_int8(const Decode& d, int64_t index, int64_t head, void* memory) {
  const DecodeEntry& entry = d.entries[index];
  const Int8Scratch s(memory, entry.length, d.size);
  const int64_t at = (index * d.heads + head) * d.size;
  const int8_t* query = static_cast<const int8_t*>(d.query) + at;
  float max = -kInfinity;
  for (int64_t j = 0; j < entry.length; ++j) {
    s.scores[j] = score_of(d, entry, query, head, j);
    max = s.scores[j] > max ? s.scores[j] : max;
  }
  const float sum = exponentials(s.scores, entry.length, 1.0f, softmax_origin(max));
  for (int64_t i = 0; i < d.size; ++i) s.sums[i] = 0;
  for (int64_t first = 0; first < entry.length; first += kBlockTokens) {
    for (int64_t i = 0; i < d.size; ++i) s.block_sums[i] = 0;
    for (int64_t j = first; j < smaller(first + kBlockTokens, entry.length); ++j) {
      const int32_t weight = to_int8(s.scores[j] * d.quant_scale1);
      if (weight == 0) continue;
      const int8_t* value = static_cast<const int8_t*>(entry.value) + row_of(d, entry, j) +
                            head / d.group() * entry.head_stride;
      for (int64_t i = 0; i < d.size; ++i) s.block_sums[i] += weight * value[i];
    }
    for (int64_t i = 0; i < d.size; ++i) s.sums[i] += s.block_sums[i];
  }
  for (int64_t i = 0; i < d.size; ++i) s.row[i] = static_cast<float>(s.sums[i]) * d.dequant_scale2 / sum;
  write_result(d, at, head, s.row);
}

}  // namespace fa::FA_ISA
