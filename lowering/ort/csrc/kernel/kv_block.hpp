// K and V of one block as the micro-kernel reads them: in place where possible, else as a copy of the block.
//
// The following are copied: numbers that need converting or rounding; keys with a rope part; pairs of values, because two
// keys' numbers of a column have to lie side by side; and rows whose distance is a multiple of 2 KB (of values, of what the
// instruction set says), because the rows of a micro-tile would share a few sets of the first-level cache. A copy costs one
// load and one store for 16 numbers, which are then multiplied with up to kTileRows rows. Keys that only one panel reads are
// copied a micro-tile at a time, so that the copy stays in the first-level cache.
#pragma once

#include "prefetch.hpp"
#include "rows.hpp"
#include "stored.hpp"
#include "transpose.hpp"

namespace fa::FA_ISA {

// Keys of one block (Bc of FlashAttention). A panel of scores takes 32 KB at 32 rows, and the accumulators are rescaled once
// a block.
inline constexpr int64_t kBlockKeys = 256;

FA_INLINE bool rounds_to_bfloat16(const Problem& problem) {
  return problem.rounded_products && problem.type == Type::float32;
}

// A row of floats, rounded to pairs in `buffer`, which has room for one more vector.
FA_INLINE const float* rounded_row(const float* row, int64_t count, float* buffer) {
  if (row != buffer) __builtin_memcpy(buffer, row, static_cast<size_t>(count) * sizeof(float));
  narrow_to_pairs(buffer, count);
  return buffer;
}

// The sizes of the products. Products of pairs (pairs.hpp) have two bfloat16 in each float.
struct Shape {
  int64_t qk_size;  // of a row of query or key: head size and rope part
  int64_t value_size;
  int64_t packing;  // numbers in a float: 2 for pairs, else 1
  int64_t depth;    // of the product of query and key, in floats

  explicit Shape(const Problem& problem)
      : qk_size(problem.head_size + problem.rope_size), value_size(problem.value_size),
        packing(kHasPairs && (problem.type == Type::bfloat16 || rounds_to_bfloat16(problem)) ? 2 : 1),
        depth(ceil_div(qk_size, packing)) {}

  bool pairs() const { return kHasPairs && packing == 2; }
  int64_t padded_value_size() const { return ceil_div(value_size, kPanel) * kPanel; }
  // Floats from one copied row to the next: mostly an odd number of cache lines.
  int64_t key_stride() const { return ceil_div(depth, kLanes) * kLanes + 16; }
  int64_t value_stride() const { return padded_value_size() + 16; }
  int64_t block_floats() const { return kBlockKeys * (key_stride() + value_stride()); }
};

// K and V of a block as operands of the products.
struct KvBlock {
  const float* keys;
  int64_t key_stride;
  const float* values;  // a row for each key, or with pairs for two keys; in products of tiles a row for each column
  int64_t value_stride;
  bool keys_in_place;
  bool values_in_place;
  bool keys_follow;  // not copied yet: copy_some_keys() does it, before they are multiplied
};

// Whether the distance of rows, in floats, is no multiple of so many bytes.
FA_INLINE bool avoids_set_conflicts(int64_t row, int64_t bytes) {
  return row * static_cast<int64_t>(sizeof(float)) % bytes != 0;
}

// The element at which row 0 of a head begins.
FA_INLINE int64_t key_start(const Problem& problem, const Sequence& sequence, int64_t key_head) {
  return sequence.key + key_head * problem.key.head;
}
FA_INLINE int64_t value_start(const Problem& problem, const Sequence& sequence, int64_t key_head) {
  return sequence.value + key_head * problem.value.head;
}

// A row as an operand of the products: floats, or pairs.
FA_INLINE const float* key_operand(const Problem& problem, const Shape& shape, const Sequence& sequence,
                                   int64_t key_head, int64_t j, float* buffer) {
  if (!shape.pairs()) return key_row(problem, sequence, key_head, j, buffer);
  if (!rounds_to_bfloat16(problem)) return key_pairs(problem, sequence, key_head, j, buffer);
  return rounded_row(key_row(problem, sequence, key_head, j, buffer), shape.qk_size, buffer);
}

FA_INLINE const float* query_operand(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t head,
                                     int64_t i, float* buffer) {
  if (!shape.pairs()) return query_row(problem, sequence, head, i, buffer);
  if (!rounds_to_bfloat16(problem)) return query_pairs(problem, sequence, head, i, buffer);
  return rounded_row(query_row(problem, sequence, head, i, buffer), shape.qk_size, buffer);
}

// Calls body(stored) with the type of stored.hpp that reads the problem's numbers.
template <class Body>
FA_INLINE void with_stored_type(const Problem& problem, Body body) {
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

// Copies rows [first, first + count) of a head that begins at element `start`, as operands of the products.
template <class Stored>
static void copy_rows(const Strided& rows, Type type, int64_t start, int64_t first, int64_t count, int64_t size, float* out,
                      int64_t out_stride) {
  const auto* from = static_cast<const typename Stored::Number*>(rows.data) + start + first * rows.row;
  for (int64_t j = 0; j < count; ++j, from += rows.row, out += out_stride) {
    prefetch_row(rows, type, start, first + j + kPrefetchDistance, size);
    float* to = out;
    int64_t n = 0;
    for (; n + Stored::kPerLoad <= size; n += Stored::kPerLoad, to += kLanes) store(to, Stored::load(from + n));
    if (n < size) store(to, Stored::load_partial(from + n, size - n));
  }
}

// Copies keys [first, first + keys). `buffer` has room for one key.
static void copy_keys(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                      int64_t first, int64_t keys, float* out, float* buffer) {
  const int64_t start = key_start(problem, sequence, key_head);
  if (problem.rope_size == 0 && !rounds_to_bfloat16(problem)) {
    with_stored_type(problem, [&](auto stored) {
      copy_rows<decltype(stored)>(problem.key, problem.type, start, first, keys, problem.head_size, out, shape.key_stride());
    });
    return;
  }
  for (int64_t j = 0; j < keys; ++j) {
    float* row = out + j * shape.key_stride();
    prefetch_row(problem.key, problem.type, start, first + j + kPrefetchDistance, problem.head_size);
    const float* from = key_operand(problem, shape, sequence, key_head, first + j, buffer);
    __builtin_memcpy(row, from, static_cast<size_t>(shape.depth) * sizeof(float));
  }
}

// Copies values as [pair of keys][column][2]. An odd last key is paired with zeros.
static void copy_value_pairs(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                             int64_t first, int64_t keys, float* out) {
  const int64_t size = problem.value_size;
  const int64_t start = value_start(problem, sequence, key_head);
  const auto* values = static_cast<const uint16_t*>(problem.value.data) + start + first * problem.value.row;
  for (int64_t j = 0; j < keys; j += 2) {
    const uint16_t* even = values + j * problem.value.row;
    const uint16_t* odd = even + problem.value.row;
    const bool both = j + 1 < keys;
    prefetch_row(problem.value, problem.type, start, first + j + kPrefetchDistance, problem.value_size);
    prefetch_row(problem.value, problem.type, start, first + j + 1 + kPrefetchDistance, problem.value_size);
    float* row = out + j / 2 * shape.value_stride();
    int64_t d = 0;
    for (; d + StoredPairs::kPerLoad <= size; d += StoredPairs::kPerLoad) {
      Vec low;
      Vec high;
      interleave(StoredPairs::load(even + d), both ? StoredPairs::load(odd + d) : Vec{}, low, high);
      store(row + d, low);
      store(row + d + kLanes, high);
    }
    if (d < size) {
      Vec low;
      Vec high;
      interleave(StoredPairs::load_partial(even + d, size - d), both ? StoredPairs::load_partial(odd + d, size - d) : Vec{},
                 low, high);
      store(row + d, low);
      store(row + d + kLanes, high);
    }
  }
}

// The same for float32 values, which are rounded to bfloat16.
static void round_value_pairs(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                              int64_t first, int64_t keys, float* out) {
  const int64_t size = problem.value_size;
  const int64_t start = value_start(problem, sequence, key_head);
  const float* values = static_cast<const float*>(problem.value.data) + start + first * problem.value.row;
  const auto part = [&](const float* from, int64_t d) {
    return d + kLanes <= size ? load(from + d) : StoredFloats::load_partial(from + d, size - d);
  };
  for (int64_t j = 0; j < keys; j += 2) {
    const float* even = values + j * problem.value.row;
    prefetch_row(problem.value, problem.type, start, first + j + kPrefetchDistance, size);
    prefetch_row(problem.value, problem.type, start, first + j + 1 + kPrefetchDistance, size);
    float* row = out + j / 2 * shape.value_stride();
    for (int64_t d = 0; d < size; d += kLanes) {
      store(row + d, pair_of(part(even, d), j + 1 < keys ? part(even + problem.value.row, d) : Vec{}));
    }
  }
}

// Floats from one column of values to the next where tile registers multiply: an odd number of cache lines.
inline constexpr int64_t kColumnStride = kBlockKeys / 2 + 16;

// Copies values as [column][pair of keys], which is how tile_product.hpp reads them. An odd last key is paired with zeros.
static void copy_value_columns(const Problem& problem, const Sequence& sequence, int64_t key_head, int64_t first, int64_t keys,
                               float* out) {
  const int64_t size = problem.value_size;
  const int64_t start = value_start(problem, sequence, key_head);
  // Columns [d, d + kLanes) of keys j and j + 1, as pairs.
  const auto some_pairs = [&](int64_t j, int64_t d) {
    if (j >= keys) return Vec{};
    const bool both = j + 1 < keys;
    const int64_t count = smaller(kLanes, size - d);
    const int64_t even = start + (first + j) * problem.value.row + d;
    const int64_t odd = even + problem.value.row;
    if (problem.type == Type::float32) {
      const auto* values = static_cast<const float*>(problem.value.data);
      return pair_of(Isa::load_first(values + even, count), both ? Isa::load_first(values + odd, count) : Vec{});
    }
    const auto halves = [&](int64_t at) {
      const auto* values = static_cast<const uint16_t*>(problem.value.data) + at;
      if (count == kLanes) return load_as<HalfVec>(values);
      HalfVec v{};
      __builtin_memcpy(&v, values, static_cast<size_t>(count) * sizeof *values);
      return v;
    };
    const HalfVec lower = halves(even), upper = both ? halves(odd) : HalfVec{};
    return (Vec)(__builtin_convertvector(lower, BitVec) | __builtin_convertvector(upper, BitVec) << 16);
  };
  // The lower or upper half of columns [d, d + 2 kLanes) of bfloat16, likewise. It takes one instruction instead of four.
  const auto half_of_pairs = [&](int64_t j, int64_t d, bool upper_half) {
    if (j >= keys) return Vec{};
    const auto* even = static_cast<const uint16_t*>(problem.value.data) + start + (first + j) * problem.value.row + d;
    Vec low;
    Vec high;
    interleave(StoredPairs::load(even), j + 1 < keys ? StoredPairs::load(even + problem.value.row) : Vec{}, low, high);
    return upper_half ? high : low;
  };
  const auto copy_square = [&](int64_t j, int64_t d, auto pairs) {
    Vec rows[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = pairs(j + 2 * i);
    transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) store(out + (d + i) * kColumnStride + j / 2, rows[i]);
  };
  for (int64_t j = 0; j < keys; j += 2 * kLanes) {
    for (int64_t next = j; next < smaller(keys, j + 2 * kLanes); ++next) {
      prefetch_row(problem.value, problem.type, start, first + next + 2 * kLanes, size);
    }
    int64_t d = 0;
    for (; problem.type == Type::bfloat16 && d + 2 * kLanes <= size; d += 2 * kLanes) {
      copy_square(j, d, [&](int64_t key) { return half_of_pairs(key, d, false); });
      copy_square(j, d + kLanes, [&](int64_t key) { return half_of_pairs(key, d, true); });
    }
    for (; d < size; d += kLanes) copy_square(j, d, [&](int64_t key) { return some_pairs(key, d); });
  }
}

// What a tile needs of a block.
struct KvUse {
  bool one_panel;  // whether only one panel reads the keys
  bool values;     // whether the values are needed as an operand of the products of panels
};

// Keys [first, first + keys) of a key head and their values. `block` has room for a copy of both, `buffer` for one key.
inline KvBlock load_kv_block(const Problem& problem, const Shape& shape, const Sequence& sequence, int64_t key_head,
                             int64_t first, int64_t keys, KvUse use, float* block, float* buffer) {
  const bool floats = problem.type == Type::float32 && !shape.pairs();
  const bool even_pairs = shape.pairs() && !rounds_to_bfloat16(problem) && problem.head_size % 2 == 0;
  const int64_t key_stride = problem.key.row / shape.packing;
  const bool keys_in_place = problem.rope_size == 0 && (floats || even_pairs) && avoids_set_conflicts(key_stride, 2048);
  const bool values_in_place = floats && avoids_set_conflicts(problem.value.row, Isa::kCopiedValueRows);
  const bool keys_follow = use.one_panel && !keys_in_place && problem.rope_size == 0 && !rounds_to_bfloat16(problem);
  KvBlock data{block,         shape.key_stride(), block + kBlockKeys * shape.key_stride(), shape.value_stride(),
               keys_in_place, values_in_place,    keys_follow};
  if (keys_in_place) {
    const int64_t at = key_start(problem, sequence, key_head) / shape.packing + first * key_stride;
    data.keys = static_cast<const float*>(problem.key.data) + at;
    data.key_stride = key_stride;
  } else if (!keys_follow) {
    copy_keys(problem, shape, sequence, key_head, first, keys, block, buffer);
  }
  float* copies = block + kBlockKeys * shape.key_stride();
  if (!use.values) {
    data.values_in_place = true;
  } else if (values_in_place) {
    const int64_t at = value_start(problem, sequence, key_head) + first * problem.value.row;
    data.values = static_cast<const float*>(problem.value.data) + at;
    data.value_stride = problem.value.row;
  } else if (Isa::kHasTiles) {
    copy_value_columns(problem, sequence, key_head, first, keys, copies);
    data.value_stride = kColumnStride;
  } else if (shape.pairs() && rounds_to_bfloat16(problem)) {
    round_value_pairs(problem, shape, sequence, key_head, first, keys, copies);
  } else if (shape.pairs()) {
    copy_value_pairs(problem, shape, sequence, key_head, first, keys, copies);
  } else {
    with_stored_type(problem, [&](auto stored) {
      copy_rows<decltype(stored)>(problem.value, problem.type, value_start(problem, sequence, key_head), first, keys,
                                  problem.value_size, copies, shape.value_stride());
    });
  }
  return data;
}

}  // namespace fa::FA_ISA
