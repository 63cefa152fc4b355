// The products of skinny matrices: up to kSkinnyRows query rows with K, and as many rows of probabilities with V. K and V
// are not packed (in BLIS's words: small, unpacked). Each of their numbers is read once, so a copy would cost more than it
// saves. Decoding uses these products, where one new token meets a long cache.
//
// Several rows are multiplied with several keys (or columns) at a time, so that a load serves more than one product. Keys
// are still read nearly in the order of memory. Where the rows of a head are contiguous, streaming_product.hpp may be
// faster.
#pragma once

#include "prefetch.hpp"
#include "streaming_product.hpp"
#include "rows.hpp"

namespace fa::FA_ISA {

// A tile of up to this many rows is skinny. With more rows, the reductions of 16 vectors (30 shuffles a row for 16 keys)
// cost more than what they avoid.
inline constexpr int64_t kSkinnyRows = 8;

// The keys of a block are a multiple of kSkinnyBlockUnit and at most kMostSkinnyBlockKeys; all rows together have at most
// kSkinnyBlockScores scores. The hardware prefetcher starts slowly, so runs of keys, then of values, should be long, as long
// as the scores stay in the second-level cache. Measured: 512 keys are up to a tenth slower than 4096.
inline constexpr int64_t kSkinnyBlockUnit = 512;
inline constexpr int64_t kMostSkinnyBlockKeys = 4096;
inline constexpr int64_t kSkinnyBlockScores = 16384;

// The largest power of two of vectors for each of `rows` rows such that all of them fit the registers.
constexpr int vectors_per_row(int rows, int most) {
  int count = most;
  while (count > 1 && count * rows > kRegisters * 3 / 4) count /= 2;
  return count;
}

// The prefetch distance in numbers.
template <class Stored>
FA_INLINE int64_t prefetch_distance(StoredRows<Stored> rows) {
  if constexpr (Stored::kPaged) {
    return rows.ahead;
  } else {
    return kPrefetchDistance * rows.stride;
  }
}

// scores[r][key] = queries[r] . keys[key] for `count` keys of `size` numbers. kKeys keys share the loads of a query row.
template <class Stored, int kRows>
static void multiply_skinny_keys(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                                 float* scores, int64_t score_stride) {
  // Measured: with 4 or more rows, 4 keys of float32 at a time are 20 % slower than 2.
  constexpr int kKeys = vectors_per_row(kRows, kRows > 2 && sizeof(typename Stored::Number) == sizeof(float) ? 2 : 4);
  const int64_t full = size / Stored::kPerLoad * Stored::kPerLoad;
  const int64_t ahead = prefetch_distance(keys);
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec parts[kRows][kLanes];
    const bool half = count - c <= kLanes / 2;
    for (int64_t j = 0; j < (half ? kLanes / 2 : kLanes); j += kKeys) {
      const typename Stored::Number* from[kKeys];
      for (int u = 0; u < kKeys; ++u) from[u] = keys.data + smaller(c + j + u, count - 1) * keys.stride;
      Vec sum[kRows][kKeys] = {};
      const float* query = queries.data;
      const auto add = [&](const Vec(&k)[kKeys]) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec q = load(query + r * queries.stride);
#pragma GCC unroll 8
          for (int u = 0; u < kKeys; ++u) sum[r][u] = add_products<Stored::kPairs>(sum[r][u], q, k[u]);
        }
        query += kLanes;
      };
      for (int64_t d = 0; d < full; d += Stored::kPerLoad) {
        Vec k[kKeys];
#pragma GCC unroll 8
        for (int u = 0; u < kKeys; ++u) {
          k[u] = Stored::load(from[u] + d);
          prefetch(from[u] + d + ahead);
        }
        add(k);
      }
      if (full < size) {
        Vec k[kKeys];
        for (int u = 0; u < kKeys; ++u) k[u] = Stored::load_partial(from[u] + full, size - full);
        add(k);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int u = 0; u < kKeys; ++u) parts[r][j + u] = sum[r][u];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store(scores + r * score_stride + c, half ? sum_lanes_of_first_half(parts[r]) : sum_lanes_of_each(parts[r]));
    }
  }
}

// sums[r] += weights[r] V for kVectors loads of columns. `last` is how many numbers the last load has, or 0 if it is full.
// The sums stay in registers while `count` keys go by. With pairs, each float of `weights` holds two keys' weights.
template <class Stored, int kRows, int kVectors>
FA_INLINE void skinny_value_columns(const float* weights, int64_t weight_stride, StoredRows<Stored> values, int64_t count,
                                    int64_t last, float* sums, int64_t columns) {
  constexpr int kUnit = kSumsPerLoad<Stored>;
  constexpr int kKeys = Stored::kPairs ? 2 : 1;
  Vec sum[kRows][kVectors][kUnit];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) load_sums<Stored>(sums + r * columns + v * Stored::kPerLoad, sum[r][v]);
  }
  const int64_t ahead = prefetch_distance(values);
  const auto column = [&](const typename Stored::Number* row, int v) {
    prefetch(row + v * Stored::kPerLoad + ahead);
    return last > 0 && v == kVectors - 1 ? Stored::load_partial(row + v * Stored::kPerLoad, last)
                                         : Stored::load(row + v * Stored::kPerLoad);
  };
  for (int64_t j = 0; j < count; j += kKeys) {
    const typename Stored::Number* row = values.data + j * values.stride;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec x[kUnit];
      x[0] = column(row, v);
      if constexpr (Stored::kPairs) {
        const Vec odd = j + 1 < count ? column(row + values.stride, v) : Vec{};
        interleave(x[0], odd, x[0], x[1]);
      }
      if constexpr (Stored::kEvenOdd) {
        x[1] = Stored::odd(x[0]);
        x[0] = Stored::even(x[0]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const float weight = weights[r * weight_stride + j / kKeys];
#pragma GCC unroll 2
        for (int u = 0; u < kUnit; ++u) sum[r][v][u] = add_products<Stored::kPairs>(sum[r][v][u], weight, x[u]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store_sums<Stored>(sums + r * columns + v * Stored::kPerLoad, sum[r][v]);
  }
}

// sums += P V for `count` values of `size` numbers. With pairs, P is rounded to bfloat16 first.
template <class Stored, int kRows>
static void multiply_skinny_values(const float* scores, int64_t score_stride, StoredRows<Stored> values, int64_t count,
                                   int64_t size, float* sums, int64_t columns) {
  constexpr int kUnit = kSumsPerLoad<Stored>;
  constexpr int kVectors = vectors_per_row(kRows * kUnit, 8 / kUnit);
  constexpr int64_t kColumns = kVectors * Stored::kPerLoad;
  for (int64_t c = 0; c < count; c += kValueKeys) {
    const int64_t keys = smaller(kValueKeys, count - c);
    const float* weights = scores + c;
    int64_t weight_stride = score_stride;
    float rounded[kRows][kValueKeys + kLanes];
    if constexpr (Stored::kPairs) {
      for (int r = 0; r < kRows; ++r) {
        __builtin_memcpy(rounded[r], weights + r * score_stride, static_cast<size_t>(keys) * sizeof(float));
        narrow_to_pairs(rounded[r], keys);
      }
      weights = rounded[0];
      weight_stride = kValueKeys + kLanes;
    }
    StoredRows<Stored> from = values.from(c);
    int64_t d = 0;
    for (; d + kColumns <= size; d += kColumns) {
      skinny_value_columns<Stored, kRows, kVectors>(weights, weight_stride, from, keys, 0, sums + d, columns);
      from.data += kColumns;
    }
    for (; d < size; d += Stored::kPerLoad) {
      const int64_t last = d + Stored::kPerLoad > size ? size - d : 0;
      skinny_value_columns<Stored, kRows, 1>(weights, weight_stride, from, keys, last, sums + d, columns);
      from.data += Stored::kPerLoad;
    }
  }
}

// scores[r][key] = queries[r] . keys[key]. `rows` is 1 to kSkinnyRows.
template <class Stored, int kRows = kSkinnyRows>
static void skinny_scores(int64_t rows, QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                          float* scores, int64_t score_stride) {
  if constexpr (kRows == kSkinnyRows) {
    if (streams_keys<Stored>(rows, size, keys.stride)) {
      streaming_scores(rows, queries, keys, count, size, scores, score_stride);
      return;
    }
  }
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      skinny_scores<Stored, kRows - 1>(rows, queries, keys, count, size, scores, score_stride);
      return;
    }
  }
  multiply_skinny_keys<Stored, kRows>(queries, keys, count, size, scores, score_stride);
}

// sums[r] += weights[r] V for `count` values. `rows` is 1 to kSkinnyRows.
template <class Stored, int kRows = kSkinnyRows>
static void skinny_values(int64_t rows, const float* scores, int64_t score_stride, StoredRows<Stored> values,
                          int64_t count, int64_t size, float* sums, int64_t columns) {
  if constexpr (kRows == kSkinnyRows) {
    if (const int64_t most = streaming_value_rows<Stored>(rows, size, values.stride); most > 0) {
      streaming_values(rows, most, scores, score_stride, values, count, size, sums, columns);
      return;
    }
  }
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      skinny_values<Stored, kRows - 1>(rows, scores, score_stride, values, count, size, sums, columns);
      return;
    }
  }
  multiply_skinny_values<Stored, kRows>(scores, score_stride, values, count, size, sums, columns);
}

// sum += p v for one key.
FA_INLINE void add_value(float p, const float* v, int64_t size, float* sum) {
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store(sum + d, load(sum + d) + load(v + d) * p);
  for (; d < size; ++d) sum[d] += v[d] * p;
}

}  // namespace fa::FA_ISA
