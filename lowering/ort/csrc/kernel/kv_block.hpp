// K and V of one block as the micro-kernel reads them: in place where they lie well, else copied, a block at a time.
//
// Copied are numbers that need converting or rounding, keys with a rope part, pairs of values (two keys of a column lie side by side
// then), and rows whose distance is a multiple of 2 KB: the rows of a tile would share a few sets of the first-level
// cache. A copy costs a load and a store for 16 numbers that meet up to kBlockRows rows.
#pragma once

#include "prefetch.hpp"
#include "rows.hpp"
#include "stored.hpp"

namespace fa::FA_ISA {

// Keys of one block: a panel of scores takes 32 KB at 32 rows, and the sums are shrunk once a block.
inline constexpr int64_t kBlockKeys = 256;

FA_INLINE bool may_round(const Problem& problem) {
  return problem.rounded_products && problem.type == Type::float32;
}

// A row of floats rounded to pairs in `buffer`, which has room for a vector behind it.
FA_INLINE const float* rounded_row(const float* row, int64_t count, float* buffer) {
  if (row != buffer) __builtin_memcpy(buffer, row, static_cast<size_t>(count) * sizeof(float));
  narrow_to_pairs(buffer, count);
  return buffer;
}

// The sizes of the products. Where they are made of pairs (pairs.hpp), two bfloat16 lie in each float.
struct Shape {
  int64_t numbers;  // of a row of query or key: head size and rope part
  int64_t value_size;
  int64_t unit;   // numbers in a float: 2 for pairs
  int64_t depth;  // of the product of query and key, in floats

  explicit Shape(const Problem& problem)
      : numbers(problem.head_size + problem.rope_size), value_size(problem.value_size),
        unit(kHasPairs && (problem.type == Type::bfloat16 || may_round(problem)) ? 2 : 1), depth(blocks_of(numbers, unit)) {}

  bool pairs() const { return kHasPairs && unit == 2; }
  int64_t value_columns() const { return blocks_of(value_size, kPanel) * kPanel; }
  // From one copied row to the next: mostly an odd number of cache lines.
  int64_t key_row() const { return blocks_of(depth, kLanes) * kLanes + 16; }
  int64_t value_row() const { return value_columns() + 16; }
  int64_t block_floats() const { return kBlockKeys * (key_row() + value_row()); }
};

struct BlockData {
  const float* keys;
  int64_t key_row;
  const float* values;  // a row for each key, or for two of them
  int64_t value_row;
  bool keys_in_place;
  bool values_in_place;
};

FA_INLINE bool lies_well(int64_t row) { return row * static_cast<int64_t>(sizeof(float)) % 2048 != 0; }

// Where row 0 of a head begins.
FA_INLINE int64_t key_start(const Problem& problem, const Sequence& sequence, int64_t key_head) {
  return sequence.key + key_head * problem.key.head;
}
FA_INLINE int64_t value_start(const Problem& problem, const Sequence& sequence, int64_t key_head) {
  return sequence.value + key_head * problem.value.head;
}

// A row as the products take it: floats or pairs.
FA_INLINE const float* key_numbers(const Problem& problem, const Shape& shape, const Sequence& sequence,
                                   int64_t key_head, int64_t j, float* buffer) {
  if (!shape.pairs()) return key_row(problem, sequence, key_head, j, buffer);
  if (!may_round(problem)) return key_pairs(problem, sequence, key_head, j, buffer);
  return rounded_row(key_row(problem, sequence, key_head, j, buffer), shape.numbers, buffer);
}

FA_INLINE const float* query_numbers(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t head,
                                     int64_t i, float* buffer) {
  if (!shape.pairs()) return query_row(problem, sequence, head, i, buffer);
  if (!may_round(problem)) return query_pairs(problem, sequence, head, i, buffer);
  return rounded_row(query_row(problem, sequence, head, i, buffer), shape.numbers, buffer);
}

// Calls body(stored) with the way the problem's numbers are read.
template <class Body>
FA_INLINE void as_stored(const Problem& problem, Body body) {
  if (problem.type == Type::float32) {
    body(StoredFloats{});
  } else if (problem.type == Type::float16) {
    body(StoredFloat16{});
  } else if (kHasPairs) {
    body(StoredPairs{});
  } else {
    body(StoredBfloat16{});
  }
}

// Rows [first, first + count) of a head that begins at element `start`, as the products take them, `out_row` floats apart.
template <class Stored>
static void copy_rows(const Strided& rows, Type type, int64_t start, int64_t first, int64_t count, int64_t size, float* out,
                      int64_t out_row) {
  const auto* from = static_cast<const typename Stored::Number*>(rows.data) + start + first * rows.row;
  for (int64_t j = 0; j < count; ++j, from += rows.row, out += out_row) {
    ask_for_row(rows, type, start, first + j + kAhead, size);
    float* to = out;
    int64_t n = 0;
    for (; n + Stored::kStep <= size; n += Stored::kStep, to += kLanes) store(to, Stored::load(from + n));
    if (n < size) store(to, Stored::load_some(from + n, size - n));
  }
}

// `buffer` has room for a key.
static void copy_keys(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                      int64_t first, int64_t keys, float* out, float* buffer) {
  const int64_t start = key_start(problem, sequence, key_head);
  if (problem.rope_size == 0 && !may_round(problem)) {
    as_stored(problem, [&](auto stored) {
      copy_rows<decltype(stored)>(problem.key, problem.type, start, first, keys, problem.head_size, out, shape.key_row());
    });
    return;
  }
  for (int64_t j = 0; j < keys; ++j) {
    float* row = out + j * shape.key_row();
    ask_for_row(problem.key, problem.type, start, first + j + kAhead, problem.head_size);
    const float* from = key_numbers(problem, shape, sequence, key_head, first + j, buffer);
    __builtin_memcpy(row, from, static_cast<size_t>(shape.depth) * sizeof(float));
  }
}

// Two keys a row; an odd last one has 0 beside it.
static void copy_value_pairs(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                             int64_t first, int64_t keys, float* out) {
  const int64_t size = problem.value_size;
  const int64_t start = value_start(problem, sequence, key_head);
  const auto* values = static_cast<const uint16_t*>(problem.value.data) + start + first * problem.value.row;
  for (int64_t j = 0; j < keys; j += 2) {
    const uint16_t* even = values + j * problem.value.row;
    const uint16_t* odd = even + problem.value.row;
    const bool both = j + 1 < keys;
    ask_for_row(problem.value, problem.type, start, first + j + kAhead, problem.value_size);
    ask_for_row(problem.value, problem.type, start, first + j + 1 + kAhead, problem.value_size);
    float* row = out + j / 2 * shape.value_row();
    int64_t d = 0;
    for (; d + StoredPairs::kStep <= size; d += StoredPairs::kStep) {
      Vec low;
      Vec high;
      interleave(StoredPairs::load(even + d), both ? StoredPairs::load(odd + d) : Vec{}, low, high);
      store(row + d, low);
      store(row + d + kLanes, high);
    }
    if (d < size) {
      Vec low;
      Vec high;
      interleave(StoredPairs::load_some(even + d, size - d), both ? StoredPairs::load_some(odd + d, size - d) : Vec{},
                 low, high);
      store(row + d, low);
      store(row + d + kLanes, high);
    }
  }
}

// The same of floats, which are rounded.
static void round_value_pairs(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                              int64_t first, int64_t keys, float* out) {
  const int64_t size = problem.value_size;
  const int64_t start = value_start(problem, sequence, key_head);
  const float* values = static_cast<const float*>(problem.value.data) + start + first * problem.value.row;
  const auto part = [&](const float* from, int64_t d) {
    return d + kLanes <= size ? load(from + d) : StoredFloats::load_some(from + d, size - d);
  };
  for (int64_t j = 0; j < keys; j += 2) {
    const float* even = values + j * problem.value.row;
    ask_for_row(problem.value, problem.type, start, first + j + kAhead, size);
    ask_for_row(problem.value, problem.type, start, first + j + 1 + kAhead, size);
    float* row = out + j / 2 * shape.value_row();
    for (int64_t d = 0; d < size; d += kLanes) {
      store(row + d, pair_of(part(even, d), j + 1 < keys ? part(even + problem.value.row, d) : Vec{}));
    }
  }
}

// Keys [first, first + keys) of a key head; `block` has room for a copy, `buffer` for a key.
inline BlockData block_data(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                            int64_t first, int64_t keys, float* block, float* buffer) {
  const bool floats = problem.type == Type::float32 && !shape.pairs();
  const bool whole_pairs = shape.pairs() && !may_round(problem) && problem.head_size % 2 == 0;
  const int64_t key_row = problem.key.row / shape.unit;
  const bool key_lies = problem.rope_size == 0 && (floats || whole_pairs) && lies_well(key_row);
  const bool value_lies = floats && lies_well(problem.value.row);
  BlockData data{block, shape.key_row(), block + kBlockKeys * shape.key_row(), shape.value_row(), key_lies, value_lies};
  if (key_lies) {
    const int64_t at = key_start(problem, sequence, key_head) / shape.unit + first * key_row;
    data.keys = static_cast<const float*>(problem.key.data) + at;
    data.key_row = key_row;
  } else {
    copy_keys(problem, shape, sequence, key_head, first, keys, block, buffer);
  }
  float* copies = block + kBlockKeys * shape.key_row();
  if (value_lies) {
    const int64_t at = value_start(problem, sequence, key_head) + first * problem.value.row;
    data.values = static_cast<const float*>(problem.value.data) + at;
    data.value_row = problem.value.row;
  } else if (shape.pairs() && may_round(problem)) {
    round_value_pairs(problem, shape, sequence, key_head, first, keys, copies);
  } else if (shape.pairs()) {
    copy_value_pairs(problem, shape, sequence, key_head, first, keys, copies);
  } else {
    as_stored(problem, [&](auto stored) {
      copy_rows<decltype(stored)>(problem.value, problem.type, value_start(problem, sequence, key_head), first, keys,
                                  problem.value_size, copies, shape.value_row());
    });
  }
  return data;
}

}  // namespace fa::FA_ISA
