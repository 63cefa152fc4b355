// Copies of K and V that the micro-kernel can stream: made once for each key head and read by all query
// rows. A block of keys holds K^T as panels [depth][kPanel] followed by V as panels [keys][kPanel]. Where the products are
// made of pairs (pairs.hpp), two bfloat16 lie in each float, and depth and keys are half as long.
#pragma once

#include "pairs.hpp"
#include "rows.hpp"
#include "transpose.hpp"

namespace fa::FA_ISA {

// Keys of one block. At head size 64 a block of K and V takes 256 KB and the scores of 96 rows 200 KB, half of a
// second-level cache of 1 MB. 256 keys are 4 % slower at 512 x 512, because every row pays for its reductions twice.
inline constexpr int64_t kBlockKeys = 512;

struct PackShape {
  int64_t numbers;  // of a row of query or key: head size and rope part
  int64_t value_size;
  int64_t unit;   // numbers in a float: 2 for pairs
  int64_t depth;  // of the product of query and key, in floats

  explicit PackShape(const Problem& problem)
      : numbers(problem.head_size + problem.rope_size), value_size(problem.value_size),
        unit(kHasPairs && problem.type == Type::bfloat16 ? 2 : 1), depth(blocks_of(numbers, unit)) {}

  bool pairs() const { return kHasPairs && unit == 2; }
  int64_t value_columns() const { return blocks_of(value_size, kPanel) * kPanel; }
  int64_t value_rows(int64_t keys) const { return blocks_of(keys, unit); }
  int64_t key_floats(int64_t keys) const { return blocks_of(keys, kPanel) * kPanel * depth; }
  int64_t block_floats(int64_t keys) const { return key_floats(keys) + value_rows(keys) * value_columns(); }
  // Where block `index` of a head begins; every block before it is full.
  int64_t block_offset(int64_t index) const { return index * block_floats(kBlockKeys); }
  int64_t head_floats(int64_t keys) const {
    const int64_t full = keys / kBlockKeys;
    const int64_t rest = keys % kBlockKeys;
    return block_offset(full) + (rest > 0 ? block_floats(rest) : 0);
  }
};

// Keys [first_key, first_key + keys) of a key head; `rows` has room for kLanes converted keys.
static void pack_keys(const Problem& problem, const PackShape& shape, const Sequence& sequence, int64_t key_head,
                      int64_t first_key, int64_t keys, float* out, float* rows) {
  const int64_t depth = shape.depth;
  const int64_t whole = depth / kLanes * kLanes;
  const float* from[kLanes];
  for (int64_t first = 0; first < blocks_of(keys, kPanel) * kPanel; first += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = first_key + smaller(first + j, keys - 1);  // what is beyond repeats the last, unseen
      float* buffer = rows + j * depth;
      from[j] = shape.pairs() ? key_pairs(problem, sequence, key_head, key, buffer)
                              : key_row(problem, sequence, key_head, key, buffer);
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

// Two keys a row; an odd last one has 0 beside it.
static bool pack_value_pairs(const Problem& problem, const Sequence& sequence, int64_t key_head, int64_t first_key,
                             int64_t keys, float* out) {
  const int64_t size = problem.value_size;
  const auto* values = static_cast<const uint16_t*>(problem.value.data) + sequence.value +
                       key_head * problem.value.head + first_key * problem.value.row;
  constexpr uint16_t kExponent = 0x7f80;  // all ones in infinities and NaN
  IntVec infinite{};
  uint32_t some_infinite = 0;
  for (int64_t j = 0; j < keys; j += 2) {
    const uint16_t* even = values + j * problem.value.row;
    const uint16_t* odd = even + problem.value.row;
    const bool both = j + 1 < keys;
    for (int64_t first = 0; first < size; first += kLanes) {
      // Panels lie behind each other, each with one row of kPanel floats for two keys.
      float* panel = out + first / kPanel * kPanel * blocks_of(keys, 2) + j / 2 * kPanel + first % kPanel;
      if (size - first >= kLanes) {
        const BitVec low = widen(even + first);
        const BitVec high = both ? widen(odd + first) : BitVec{};
        infinite |= ((low & kExponent) == kExponent) | ((high & kExponent) == kExponent);
        store(panel, (Vec)(low | high << 16));
        continue;
      }
      for (int64_t d = 0; d < size - first; ++d) {
        const uint32_t low = even[first + d];
        const uint32_t high = both ? odd[first + d] : 0;
        some_infinite |= (low & kExponent) == kExponent || (high & kExponent) == kExponent;
        panel[d] = from_bits(low | high << 16);
      }
      for (int64_t d = size - first; d < kLanes; ++d) panel[d] = 0;
    }
    if (blocks_of(size, kLanes) % 2 != 0) {
      store(out + size / kPanel * kPanel * blocks_of(keys, 2) + j / 2 * kPanel + kLanes, Vec{});
    }
  }
  for (int i = 0; i < kLanes; ++i) some_infinite |= infinite[i] != 0;
  return some_infinite == 0;
}

// One block, or a part of it: K at `out`, V behind it. Tells whether all values are finite.
static bool pack_block(const Problem& problem, const PackShape& shape, const Sequence& sequence, int64_t key_head,
                       int64_t first_key, int64_t keys, float* out, float* rows) {
  pack_keys(problem, shape, sequence, key_head, first_key, keys, out, rows);
  float* values = out + shape.key_floats(keys);
  if (shape.pairs()) return pack_value_pairs(problem, sequence, key_head, first_key, keys, values);
  return pack_values(problem, sequence, key_head, first_key, keys, values, rows);
}

}  // namespace fa::FA_ISA
