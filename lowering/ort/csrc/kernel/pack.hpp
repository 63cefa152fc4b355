// Copies of K and V that the micro-kernel can stream: made once for each key head and read by all query
// rows. A block of keys holds K^T as panels [depth][kPanel] followed by V as panels [keys][kPanel].
#pragma once

#include "rows.hpp"

namespace fa::FA_ISA {

// Keys of one block. At head size 64 a block of K and V takes 256 KB and the scores of 96 rows 200 KB, half of a
// second-level cache of 1 MB. 256 keys are 4 % slower at 512 x 512, because every row pays for its reductions twice.
inline constexpr int64_t kBlockKeys = 512;

struct PackShape {
  int64_t depth;  // of the product of query and key: head size and rope part
  int64_t value_size;

  int64_t value_columns() const { return blocks_of(value_size, kPanel) * kPanel; }
  int64_t key_floats(int64_t keys) const { return blocks_of(keys, kPanel) * kPanel * depth; }
  int64_t block_floats(int64_t keys) const { return key_floats(keys) + keys * value_columns(); }
  // Where block `index` of a head begins; every block before it is full.
  int64_t block_offset(int64_t index) const { return index * block_floats(kBlockKeys); }
  int64_t head_floats(int64_t keys) const {
    const int64_t full = keys / kBlockKeys;
    const int64_t rest = keys % kBlockKeys;
    return block_offset(full) + (rest > 0 ? block_floats(rest) : 0);
  }
};

// Exchanges the lanes whose number has the bit kStep with the rows that have it: after all bits, rows are columns.
template <int kStep>
FA_INLINE void transpose_step(Vec (&rows)[kLanes]) {
  IntVec low;
  IntVec high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = (i & kStep) == 0 ? i : kLanes + i - kStep;
    high[i] = (i & kStep) == 0 ? i + kStep : kLanes + i;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if ((r & kStep) != 0) continue;
    const Vec a = rows[r];
    const Vec b = rows[r + kStep];
    rows[r] = __builtin_shuffle(a, b, low);
    rows[r + kStep] = __builtin_shuffle(a, b, high);
  }
  if constexpr (kStep > 1) transpose_step<kStep / 2>(rows);
}

// kLanes keys by kLanes numbers of each: from[j] + d to out[d * kPanel + j].
FA_INLINE void transpose_square(const float* const* from, int64_t d, float* out) {
  Vec rows[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) rows[j] = load(from[j] + d);
  transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(out + (d + i) * kPanel, rows[i]);
}

// Keys [first_key, first_key + keys) of a key head; `rows` has room for kLanes converted keys.
static void pack_keys(const Problem& problem, const Sequence& sequence, int64_t key_head, int64_t first_key,
                      int64_t keys, float* out, float* rows) {
  const int64_t depth = problem.head_size + problem.rope_size;
  const int64_t whole = depth / kLanes * kLanes;
  const float* from[kLanes];
  for (int64_t first = 0; first < blocks_of(keys, kPanel) * kPanel; first += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = smaller(first + j, keys - 1);  // what is beyond repeats the last; nobody looks at it
      from[j] = key_row(problem, sequence, key_head, first_key + key, rows + j * depth);
    }
    float* panel = out + first / kPanel * kPanel * depth + first % kPanel;
    for (int64_t d = 0; d < whole; d += kLanes) transpose_square(from, d, panel);
    for (int64_t d = whole; d < depth; ++d) {
      for (int64_t j = 0; j < kLanes; ++j) panel[d * kPanel + j] = from[j][d];
    }
  }
}

// Tells whether all values are finite: 0 * inf would poison rows that do not attend the key.
static bool pack_values(const Problem& problem, const Sequence& sequence, int64_t key_head, int64_t first_key,
                        int64_t keys, float* out, float* row) {
  const int64_t size = problem.value_size;
  float check = 0;  // inf * 0 and NaN * 0 are NaN
  Vec checks{};
  for (int64_t j = 0; j < keys; ++j) {
    const float* v = value_row(problem, sequence, key_head, first_key + j, row);
    for (int64_t first = 0; first < size; first += kPanel) {
      float* panel = out + first * keys + j * kPanel;
      if (size - first >= kPanel) {
        const Vec a = load(v + first);
        const Vec b = load(v + first + kLanes);
        store(panel, a);
        store(panel + kLanes, b);
        checks += (a + b) * 0.0f;
        continue;
      }
      for (int64_t d = 0; d < kPanel; ++d) {
        panel[d] = d < size - first ? v[first + d] : 0;
        check += panel[d] * 0.0f;
      }
    }
  }
  return check + sum_lanes(checks) == 0;
}

}  // namespace fa::FA_ISA
