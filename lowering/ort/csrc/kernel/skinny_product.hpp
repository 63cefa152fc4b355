// The two products for a few query rows straight from K and V: each number is read once from memory, where it lies, so
// copying it would cost more than it saves. Used by decoding, where one new token meets a long cache.
//
// Several rows meet several keys (or columns) at a time, so that a load serves more than one product, but keys are read
// nearly in the order of memory. One or two rows of heads that lie apart go the way of streaming_product.hpp.
#pragma once

#include "prefetch.hpp"
#include "streaming_product.hpp"
#include "rows.hpp"

namespace fa::FA_ISA {

// With up to this many rows a head goes this way. Beyond, the reductions of 16 vectors (30 shuffles a row for 16 keys)
// cost more than what they avoid.
inline constexpr int64_t kDirectRows = 8;

// Keys of one block are a multiple of this, at most so many, and of all rows together no more than so many scores: long
// runs of keys, then of values, for the processor begins slowly to fetch ahead, as long as the scores stay in the
// second-level cache. 512 are up to a tenth slower than 4096.
inline constexpr int64_t kFewBlockUnit = 512;
inline constexpr int64_t kMostFewBlockKeys = 4096;
inline constexpr int64_t kFewBlockScores = 16384;

// The largest power of two of vectors that fit beside each other for so many rows.
constexpr int vectors_beside(int rows, int most) {
  int count = most;
  while (count > 1 && count * rows > kRegisters * 3 / 4) count /= 2;
  return count;
}

// Scores of `count` keys, `size` numbers each.
template <class Stored, int kRows>
static void direct_scores_of(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                             float* scores, int64_t score_row) {
  // 4 rows of floats at a time are 20 % slower than 2 unless there is little to compute.
  constexpr int kKeys = vectors_beside(kRows, kRows > 2 && sizeof(typename Stored::Number) == sizeof(float) ? 2 : 4);
  const int64_t whole = size / Stored::kStep * Stored::kStep;
  const int64_t ahead = kAhead * keys.row;
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec parts[kRows][kLanes];
    const bool half = count - c <= kLanes / 2;
    for (int64_t j = 0; j < (half ? kLanes / 2 : kLanes); j += kKeys) {
      const typename Stored::Number* from[kKeys];
      for (int u = 0; u < kKeys; ++u) from[u] = keys.data + smaller(c + j + u, count - 1) * keys.row;
      Vec sum[kRows][kKeys] = {};
      const float* query = queries.data;
      const auto add = [&](const Vec(&k)[kKeys]) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec q = load(query + r * queries.row);
#pragma GCC unroll 8
          for (int u = 0; u < kKeys; ++u) sum[r][u] = add_products<Stored::kPairs>(sum[r][u], q, k[u]);
        }
        query += kLanes;
      };
      for (int64_t d = 0; d < whole; d += Stored::kStep) {
        Vec k[kKeys];
#pragma GCC unroll 8
        for (int u = 0; u < kKeys; ++u) {
          k[u] = Stored::load(from[u] + d);
          ask_for(from[u] + d + ahead);
        }
        add(k);
      }
      if (whole < size) {
        Vec k[kKeys];
        for (int u = 0; u < kKeys; ++u) k[u] = Stored::load_some(from[u] + whole, size - whole);
        add(k);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int u = 0; u < kKeys; ++u) parts[r][j + u] = sum[r][u];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store(scores + r * score_row + c, half ? sum_each_of_half(parts[r]) : sum_each(parts[r]));
    }
  }
}

// kVectors loads of columns of V, `last` of them numbers of the last load or 0 if that is whole; sums stay in registers
// while `count` keys go by. With pairs, the weights of two keys lie in a float.
template <class Stored, int kRows, int kVectors>
FA_INLINE void direct_columns(const float* weights, int64_t weight_row, StoredRows<Stored> values, int64_t count,
                              int64_t last, float* sums, int64_t columns) {
  constexpr int kUnit = kSumsOf<Stored>;
  constexpr int kKeys = Stored::kPairs ? 2 : 1;
  Vec sum[kRows][kVectors][kUnit];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) load_sums<Stored>(sums + r * columns + v * Stored::kStep, sum[r][v]);
  }
  const auto column = [&](const typename Stored::Number* row, int v) {
    ask_for(row + v * Stored::kStep + kAhead * values.row);
    return last > 0 && v == kVectors - 1 ? Stored::load_some(row + v * Stored::kStep, last)
                                         : Stored::load(row + v * Stored::kStep);
  };
  for (int64_t j = 0; j < count; j += kKeys) {
    const typename Stored::Number* row = values.data + j * values.row;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec x[kUnit];
      x[0] = column(row, v);
      if constexpr (Stored::kPairs) {
        const Vec odd = j + 1 < count ? column(row + values.row, v) : Vec{};
        interleave(x[0], odd, x[0], x[1]);
      }
      if constexpr (Stored::kApart) {
        x[1] = Stored::odd(x[0]);
        x[0] = Stored::even(x[0]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const float weight = weights[r * weight_row + j / kKeys];
#pragma GCC unroll 2
        for (int u = 0; u < kUnit; ++u) sum[r][v][u] = add_products<Stored::kPairs>(sum[r][v][u], weight, x[u]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store_sums<Stored>(sums + r * columns + v * Stored::kStep, sum[r][v]);
  }
}

// sums += P V for `count` values of `size` numbers. With pairs, P is rounded on the way.
template <class Stored, int kRows>
static void direct_values_of(const float* scores, int64_t score_row, StoredRows<Stored> values, int64_t count,
                             int64_t size, float* sums, int64_t columns) {
  constexpr int kUnit = kSumsOf<Stored>;
  constexpr int kVectors = vectors_beside(kRows * kUnit, 8 / kUnit);
  constexpr int64_t kWide = kVectors * Stored::kStep;
  for (int64_t c = 0; c < count; c += kValueKeys) {
    const int64_t keys = smaller(kValueKeys, count - c);
    const float* weights = scores + c;
    int64_t weight_row = score_row;
    float rounded[kRows][kValueKeys + kLanes];
    if constexpr (Stored::kPairs) {
      for (int r = 0; r < kRows; ++r) {
        __builtin_memcpy(rounded[r], weights + r * score_row, static_cast<size_t>(keys) * sizeof(float));
        narrow_to_pairs(rounded[r], keys);
      }
      weights = rounded[0];
      weight_row = kValueKeys + kLanes;
    }
    StoredRows<Stored> from{values.data + c * values.row, values.row};
    int64_t d = 0;
    for (; d + kWide <= size; d += kWide) {
      direct_columns<Stored, kRows, kVectors>(weights, weight_row, from, keys, 0, sums + d, columns);
      from.data += kWide;
    }
    for (; d < size; d += Stored::kStep) {
      const int64_t last = d + Stored::kStep > size ? size - d : 0;
      direct_columns<Stored, kRows, 1>(weights, weight_row, from, keys, last, sums + d, columns);
      from.data += Stored::kStep;
    }
  }
}

// `rows` from 1 to kDirectRows.
template <class Stored, int kRows = kDirectRows>
static void direct_scores(int64_t rows, QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                          float* scores, int64_t score_row) {
  if constexpr (kRows == kDirectRows) {
    if (keys_in_order<Stored>(rows, size, keys.row)) {
      scores_in_order(rows, queries, keys, count, size, scores, score_row);
      return;
    }
  }
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      direct_scores<Stored, kRows - 1>(rows, queries, keys, count, size, scores, score_row);
      return;
    }
  }
  direct_scores_of<Stored, kRows>(queries, keys, count, size, scores, score_row);
}

template <class Stored, int kRows = kDirectRows>
static void direct_values(int64_t rows, const float* scores, int64_t score_row, StoredRows<Stored> values,
                          int64_t count, int64_t size, float* sums, int64_t columns) {
  if constexpr (kRows == kDirectRows) {
    if (const int64_t most = rows_of_values<Stored>(rows, size, values.row); most > 0) {
      values_in_order(rows, most, scores, score_row, values, count, size, sums, columns);
      return;
    }
  }
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      direct_values<Stored, kRows - 1>(rows, scores, score_row, values, count, size, sums, columns);
      return;
    }
  }
  direct_values_of<Stored, kRows>(scores, score_row, values, count, size, sums, columns);
}

// sum += p v for one key.
FA_INLINE void add_value(float p, const float* v, int64_t size, float* sum) {
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store(sum + d, load(sum + d) + load(v + d) * p);
  for (; d < size; ++d) sum[d] += v[d] * p;
}

}  // namespace fa::FA_ISA
