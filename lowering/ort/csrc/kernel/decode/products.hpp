// The two products of decoding, straight from keys and values as they are stored: each is loaded and converted once for
// up to kMostRows query heads.
#pragma once

#include "../direct.hpp"
#include "cells.hpp"

namespace fa::FA_ISA {

inline constexpr int kMostRows = 8;

// Accumulators that fit the registers beside what is loaded.
#if defined(__AVX512F__)
inline constexpr int kAccumulators = 16;
#else
inline constexpr int kAccumulators = 8;
#endif

// Keys taken at once for so many rows: each query number is then loaded once for all of them.
template <int kRows>
inline constexpr int kKeysAtOnce = kAccumulators / kRows >= 4 ? 4 : kAccumulators / kRows >= 2 ? 2 : 1;

inline constexpr int64_t kLine = 64;  // bytes of a cache line

// The first-level cache has too few requests under way to keep memory busy: asking for these lines there is no faster
// than not asking at all (Zen 5: 10 GB/s against 18).
inline constexpr int kIntoSecondLevel = 1;

// Asks for what is read next, null being nothing. The two products wait for memory most of the time, so each asks for
// what the other will read; the processor itself foresees a long run, but not the alternation of keys and values.
FA_INLINE void fetch(const char* next, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(next + i, 0, kIntoSecondLevel);
}

// Values of kLanes tokens from `key` on, `row` bytes apart, times the queries: scores[r][0..kLanes). `size` is filled up
// to whole vectors in the queries. Tokens from `count` on are read as the last one.
template <Cell kCell, int kRows>
FA_INLINE void score_tile(const float* queries, int64_t columns, const char* key, int64_t row, int64_t count,
                          int64_t size, const float* constant, float* scores, int64_t score_row, const char* next) {
  constexpr int kKeys = kKeysAtOnce<kRows>;
  Vec parts[kRows][kLanes];
  const int64_t whole = size / kLanes * kLanes;
#pragma GCC unroll 1
  for (int64_t j = 0; j < kLanes; j += kKeys) {
    const char* from[kKeys];
    Vec sum[kRows][kKeys];
#pragma GCC unroll 8
    for (int t = 0; t < kKeys; ++t) {
      from[t] = key + smaller(j + t, count - 1) * row;
      if (next != nullptr) fetch(next + smaller(j + t, count - 1) * row, size * kCellBytes<kCell>);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][t] = Vec{};
    }
    for (int64_t d = 0; d < whole; d += kLanes) {
      Vec k[kKeys];
#pragma GCC unroll 8
      for (int t = 0; t < kKeys; ++t) k[t] = cells<kCell>(from[t] + d * kCellBytes<kCell>);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec q = load(queries + r * columns + d);
#pragma GCC unroll 8
        for (int t = 0; t < kKeys; ++t) sum[r][t] += k[t] * q;
      }
    }
    if (whole < size) {
#pragma GCC unroll 8
      for (int t = 0; t < kKeys; ++t) {
        const Vec k = first_cells<kCell>(from[t] + whole * kCellBytes<kCell>, size - whole);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[r][t] += k * load(queries + r * columns + whole);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < kKeys; ++t) parts[r][j + t] = sum[r][t];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store(scores + r * score_row, sum_each(parts[r]) + splat(constant[r]));
}

// sums[r] += sum over `count` tokens of weights[r][token] * value, for kVectors vectors from number `d` on.
template <Cell kCell, int kRows, int kVectors>
FA_INLINE void value_columns(const float* weights, int64_t weight_row, const char* value, int64_t row, int64_t count,
                             int64_t d, float* sums, int64_t columns, const char* next) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * columns + d + v * kLanes);
  }
  const char* from = value + d * kCellBytes<kCell>;
  const int64_t ahead = next == nullptr ? 0 : next - value;
  for (int64_t j = 0; j < count; ++j, from += row) {
    if (ahead != 0) fetch(from + ahead, kVectors * kLanes * kCellBytes<kCell>);
    Vec x[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) x[v] = cells<kCell>(from + v * kLanes * kCellBytes<kCell>);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = splat(weights[r * weight_row + j]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += weight * x[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(sums + r * columns + d + v * kLanes, sum[r][v]);
  }
}

// The same for all numbers of a head.
template <Cell kCell, int kRows>
FA_INLINE void add_values(const float* weights, int64_t weight_row, const char* value, int64_t row, int64_t count,
                          int64_t size, float* sums, int64_t columns, const char* next) {
  constexpr int kMany = kAccumulators / kRows >= 8 ? 8 : kAccumulators / kRows >= 4 ? 4 : kAccumulators / kRows >= 2 ? 2 : 1;
  int64_t d = 0;
  for (; d + kMany * kLanes <= size; d += kMany * kLanes) {
    value_columns<kCell, kRows, kMany>(weights, weight_row, value, row, count, d, sums, columns, next);
  }
  for (; d + kLanes <= size; d += kLanes) {
    value_columns<kCell, kRows, 1>(weights, weight_row, value, row, count, d, sums, columns, next);
  }
  if (d == size) return;
  for (int64_t j = 0; j < count; ++j) {
    const Vec x = first_cells<kCell>(value + j * row + d * kCellBytes<kCell>, size - d);
    for (int r = 0; r < kRows; ++r) {
      float* to = sums + r * columns + d;
      store(to, load(to) + x * weights[r * weight_row + j]);
    }
  }
}

// Calls `body` with the number of rows as a constant, from 1 to kMostRows.
template <int kRows = kMostRows, class Body>
FA_INLINE void with_rows(int64_t rows, Body body) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kRows - 1>(rows, body);
  }
  body.template operator()<kRows>();
}

}  // namespace fa::FA_ISA
