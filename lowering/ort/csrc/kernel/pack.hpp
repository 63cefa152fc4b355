// Copies of K and V that the micro-kernel can stream: made once for each key head and read by all query
// rows. A block of keys holds K^T as panels [head_size][kPanel] followed by V as panels [keys][kPanel].
#pragma once

#include "convert.hpp"

namespace fa::FA_ISA {

// Keys of one block. With 96 query rows its scores fill 98 KB of the second-level cache, and the sums of
// O are loaded and stored once for 256 keys.
inline constexpr int64_t kBlockKeys = 256;

struct PackShape {
  int64_t head_size;
  int64_t value_size;

  int64_t value_columns() const { return blocks_of(value_size, kPanel) * kPanel; }
  int64_t key_floats(int64_t keys) const { return blocks_of(keys, kPanel) * kPanel * head_size; }
  int64_t block_floats(int64_t keys) const { return key_floats(keys) + keys * value_columns(); }
  // Where block `index` of a head begins; every block before it is full.
  int64_t block_offset(int64_t index) const { return index * block_floats(kBlockKeys); }
  int64_t head_floats(int64_t keys) const {
    const int64_t full = keys / kBlockKeys;
    const int64_t rest = keys % kBlockKeys;
    return block_offset(full) + (rest > 0 ? block_floats(rest) : 0);
  }
};

static void pack_keys(const Problem& problem, int64_t index, int64_t keys, float* out, float* row) {
  const int64_t size = problem.head_size;
  for (int64_t first = 0; first < keys; first += kPanel) {
    for (int64_t j = 0; j < kPanel; ++j) {
      if (first + j < keys) {
        const float* k = as_floats(problem.key.data, index + (first + j) * problem.key.row, size, problem.type, row);
        for (int64_t d = 0; d < size; ++d) out[d * kPanel + j] = k[d];
      } else {
        for (int64_t d = 0; d < size; ++d) out[d * kPanel + j] = 0;
      }
    }
    out += size * kPanel;
  }
}

// Tells whether all values are finite: 0 * inf would poison rows that do not attend the key.
static bool pack_values(const Problem& problem, int64_t index, int64_t keys, float* out, float* row) {
  const int64_t size = problem.value_size;
  bool finite = true;
  for (int64_t j = 0; j < keys; ++j) {
    const float* v = as_floats(problem.value.data, index + j * problem.value.row, size, problem.type, row);
    for (int64_t first = 0; first < size; first += kPanel) {
      float* panel = out + first * keys + j * kPanel;
      const int64_t count = smaller(kPanel, size - first);
      float check = 0;
      for (int64_t d = 0; d < count; ++d) {
        panel[d] = v[first + d];
        check += v[first + d] * 0.0f;
      }
      for (int64_t d = count; d < kPanel; ++d) panel[d] = 0;
      finite = finite && check == 0;
    }
  }
  return finite;
}

}  // namespace fa::FA_ISA
