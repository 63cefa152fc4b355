// The two products for a few query rows, read in the order of memory.
//
// Memory is the limit then, so what comes first is that it is asked for in its own order, one key after the other, each
// from its beginning to its end, and each load instruction steps from key to key by the same distance: so the processor
// fetches ahead by itself as fast as it can (Zen 4: 30 GB/s). Two keys side by side are read at a third of that, at 60 to
// 75 % where their lines are asked for, too. Where the queries of one or two rows fit the registers there are no loads but
// those of keys and values, for the processor looks ahead as far as its load queue reaches. More rows meet a key at once,
// with their queries from the first-level cache: four rows of float32 take a seventh longer than reading the keys.
#pragma once

#include "prefetch.hpp"
#include "stored.hpp"

namespace fa::FA_ISA {

// Keys whose values are added before the next columns or rows are taken. 32 and 64 are 5 to 10 % slower: with more of
// them the columns are visited less in the order of memory.
inline constexpr int64_t kValueKeys = 16;

// One row computes so little that the processor waits at the end of each page, where its own fetching stops. So each load of
// a whole cache line asks for the one so many bytes on: 5 % faster, 4096 are not. With more rows, which compute meanwhile,
// nothing is gained, and 16 bits by half lines get slower.
inline constexpr int64_t kBytesAhead = 1024;

template <class Stored, int kRows>
FA_INLINE void ask_ahead(const typename Stored::Number* p) {
  constexpr int64_t kNumber = sizeof(typename Stored::Number);
  if constexpr (kRows == 1 && Stored::kStep * kNumber == kCacheLine) ask_for(p + kBytesAhead / kNumber);
}

// Adds lanes that differ in the bit kStep; lane l of the result holds a's sum, or b's where l has the bit.
template <int kStep>
FA_INLINE Vec add_halves(Vec a, Vec b) {
  return shuffle(a, b, [](int lane) { return (lane & kStep) == 0 ? lane : kLanes + lane; }) +
         shuffle(a, b, [](int lane) { return (lane & kStep) == 0 ? lane + kStep : kLanes + lane - kStep; });
}

// One vector of kCount: lane l of the result is of vector l / kUnit % kCount.
template <int kCount, int kUnit>
FA_INLINE Vec fold(Vec* vectors) {
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) vectors[i] = add_halves<kHalf * kUnit>(vectors[i], vectors[i + kHalf]);
    return fold<kHalf, kUnit>(vectors);
  }
  return vectors[0];
}

// Lane l of the result is the sum of the lanes of vector l.
FA_INLINE Vec sum_each(Vec (&vectors)[kLanes]) { return fold<kLanes, 1>(vectors); }

// The same of the first half of the vectors; the upper lanes repeat the lower ones.
FA_INLINE Vec sum_each_of_half(Vec (&vectors)[kLanes]) {
  constexpr int kHalf = kLanes / 2;
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) vectors[i] = add_halves<kHalf>(vectors[i], vectors[i]);
  return fold<kHalf, 1>(vectors);
}

// Rows of K or V, `row` numbers apart.
template <class Stored>
struct StoredRows {
  const typename Stored::Number* data;
  int64_t row;
};

// The rows of a query, as `Stored` loads them: whole vectors, filled up with 0.
struct QueryRows {
  const float* data;
  int64_t row;
};

// Products of kLanes keys and kRows queries over kVectors loads of columns, `last` of them numbers of the last load or 0 if
// that is whole, added to parts[r][key] or, with kFirst, put there. The queries stay in registers, for every other load
// would shorten the look ahead of the processor's load queue. Keys from `count` on are read as the last one.
template <class Stored, int kRows, int kVectors, bool kFirst>
FA_INLINE void score_columns(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t last,
                             Vec (&parts)[kRows][kLanes]) {
  Vec q[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) q[r][v] = load(queries.data + r * queries.row + v * kLanes);
  }
#pragma GCC unroll 1
  for (int64_t j = 0; j < kLanes; ++j) {
    const typename Stored::Number* key = keys.data + smaller(j, count - 1) * keys.row;
    Vec sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = kFirst ? Vec{} : parts[r][j];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const typename Stored::Number* from = key + v * Stored::kStep;
      const Vec k = last > 0 && v == kVectors - 1 ? Stored::load_some(from, last) : Stored::load(from);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = add_products<Stored::kPairs>(sum[r], q[r][v], k);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) parts[r][j] = sum[r];
  }
}

// All columns, kVectors loads at a time and then fewer.
template <class Stored, int kRows, int kVectors, bool kFirst>
FA_INLINE void score_rows(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                          Vec (&parts)[kRows][kLanes]) {
  constexpr int64_t kWide = kVectors * Stored::kStep;
  if (size >= kWide) {
    score_columns<Stored, kRows, kVectors, kFirst>(queries, keys, count, 0, parts);
    for (size -= kWide;; size -= kWide) {
      keys.data += kWide;
      queries.data += kVectors * kLanes;
      if (size < kWide) break;
      score_columns<Stored, kRows, kVectors, false>(queries, keys, count, 0, parts);
    }
    if (size == 0) return;
    if constexpr (kVectors > 1) {
      score_rows<Stored, kRows, kVectors / 2, false>(queries, keys, count, size, parts);
    } else {
      score_columns<Stored, kRows, 1, false>(queries, keys, count, size, parts);
    }
  } else if constexpr (kVectors > 1) {
    score_rows<Stored, kRows, kVectors / 2, kFirst>(queries, keys, count, size, parts);
  } else {
    score_columns<Stored, kRows, 1, kFirst>(queries, keys, count, size, parts);
  }
}

// Keys of kVectors whole loads. A store of a vector takes more than two cycles of Zen 4, so the sums of kTogether keys are
// folded into one vector before they leave the registers.
inline constexpr int kTogether = 4;

// The sizes of heads that models have; 128 numbers are 8 loads of AVX-512.
inline constexpr int64_t kUsualSizes[] = {64, 128};
inline constexpr int kMostWhole = 16;  // loads that are written out one by one

// Not of int8, whose products take longer than reading: keys side by side, which share the loads of the queries, are 3 %
// faster. With 16 registers they are for several rows of any type.
template <class Stored>
inline constexpr bool kReadsWhole = sizeof(typename Stored::Number) > 1 && kRegisters > 16;

template <class Stored, int kRows, int kVectors>
static void score_whole(QueryRows queries, StoredRows<Stored> keys, int64_t count, float* scores, int64_t score_row) {
  constexpr bool kHeld = kRows * kVectors <= kRegisters / 2;
  Vec held[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; kHeld && r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) held[r][v] = load(queries.data + r * queries.row + v * kLanes);
  }
  Vec parts[kRows][kLanes / kTogether];
#pragma GCC unroll 1
  for (int64_t j = 0; j < kLanes; j += kTogether) {
    Vec sum[kRows][kTogether];
#pragma GCC unroll 4
    for (int u = 0; u < kTogether; ++u) {
      const typename Stored::Number* key = keys.data + smaller(j + u, count - 1) * keys.row;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][u] = Vec{};
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Vec k = Stored::load(key + v * Stored::kStep);
        ask_ahead<Stored, kRows>(key + v * Stored::kStep);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const Vec q = kHeld ? held[r][v] : load(queries.data + r * queries.row + v * kLanes);
          sum[r][u] = add_products<Stored::kPairs>(sum[r][u], q, k);
        }
      }
      if (u % 2 == 0) continue;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][u - 1] = add_halves<1>(sum[r][u - 1], sum[r][u]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) parts[r][j / kTogether] = add_halves<2>(sum[r][0], sum[r][2]);
  }
  for (int r = 0; r < kRows; ++r) store(scores + r * score_row, fold<kLanes / kTogether, kTogether>(parts[r]));
}

template <class Stored, int kRows>
static void score_pass(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size, float* scores,
                       int64_t score_row) {
  constexpr int kLarge = kUsualSizes[1] / Stored::kStep;
  constexpr int kSmall = kUsualSizes[0] / Stored::kStep;
  if constexpr (kReadsWhole<Stored> && kLarge <= kMostWhole) {
    if (size == kUsualSizes[1]) {
      score_whole<Stored, kRows, kLarge>(queries, keys, count, scores, score_row);
      return;
    }
  }
  if constexpr (kReadsWhole<Stored> && kSmall <= kMostWhole) {
    if (size == kUsualSizes[0]) {
      score_whole<Stored, kRows, kSmall>(queries, keys, count, scores, score_row);
      return;
    }
  }
  Vec parts[kRows][kLanes];
  score_rows<Stored, kRows, kRegisters / 2 / kRows, true>(queries, keys, count, size, parts);
  for (int r = 0; r < kRows; ++r) store(scores + r * score_row, sum_each(parts[r]));
}

// kVectors loads of columns of V, `last` of them numbers of the last load or 0 if that is whole; sums stay in registers
// while `count` keys go by. With pairs, the weights of two keys lie in a float.
template <class Stored, int kRows, int kVectors>
FA_INLINE void value_columns(const float* weights, int64_t weight_row, StoredRows<Stored> values, int64_t count,
                             int64_t last, float* sums, int64_t columns) {
  constexpr int kUnit = kSumsOf<Stored>;
  constexpr int kKeys = Stored::kPairs ? 2 : 1;
  Vec sum[kRows][kVectors][kUnit];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) load_sums<Stored>(sums + r * columns + v * Stored::kStep, sum[r][v]);
  }
  const auto column = [&](const typename Stored::Number* row, int v) {
    ask_ahead<Stored, kRows>(row + v * Stored::kStep);
    return last > 0 && v == kVectors - 1 ? Stored::load_some(row + v * Stored::kStep, last)
                                         : Stored::load(row + v * Stored::kStep);
  };
  for (int64_t j = 0; j < count; j += kKeys) {
    const typename Stored::Number* row = values.data + j * values.row;
    Vec x[kVectors][kUnit];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) x[v][0] = column(row, v);
    if constexpr (Stored::kPairs) {
      asm volatile("" ::: "memory");  // the second key's numbers are read after the first one's
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Vec odd = j + 1 < count ? column(row + values.row, v) : Vec{};
        interleave(x[v][0], odd, x[v][0], x[v][1]);
      }
    }
    if constexpr (Stored::kApart) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        x[v][1] = Stored::odd(x[v][0]);
        x[v][0] = Stored::even(x[v][0]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float weight = weights[r * weight_row + j / kKeys];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors * kUnit; ++v) {
        Vec& own = sum[r][v / kUnit][v % kUnit];
        own = add_products<Stored::kPairs>(own, weight, x[v / kUnit][v % kUnit]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store_sums<Stored>(sums + r * columns + v * Stored::kStep, sum[r][v]);
  }
}

// All columns, kVectors loads at a time and then fewer.
template <class Stored, int kRows, int kVectors>
FA_INLINE void value_rows(const float* weights, int64_t weight_row, StoredRows<Stored> values, int64_t count,
                          int64_t size, float* sums, int64_t columns) {
  constexpr int64_t kWide = kVectors * Stored::kStep;
  for (; size >= kWide; size -= kWide) {
    value_columns<Stored, kRows, kVectors>(weights, weight_row, values, count, 0, sums, columns);
    values.data += kWide;
    sums += kWide;
  }
  if constexpr (kVectors > 1) {
    value_rows<Stored, kRows, kVectors / 2>(weights, weight_row, values, count, size, sums, columns);
  } else if (size > 0) {
    value_columns<Stored, kRows, 1>(weights, weight_row, values, count, size, sums, columns);
  }
}

// `count` <= kValueKeys. With pairs, the weights are rounded on the way.
template <class Stored, int kRows>
static void value_pass(const float* weights, int64_t weight_row, StoredRows<Stored> values, int64_t count, int64_t size,
                       float* sums, int64_t columns) {
  // Three rows take three quarters of the registers, other numbers half of them: a power of two of vectors for each row.
  constexpr int kSums = kRows == 3 ? kRegisters * 3 / 4 : kRegisters / 2;
  constexpr int kVectors = kSums / (kRows * kSumsOf<Stored>);
  if constexpr (Stored::kPairs) {
    constexpr int64_t kRounded = kValueKeys + kLanes;
    float rounded[kRows][kRounded];
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(rounded[r], weights + r * weight_row, static_cast<size_t>(count) * sizeof(float));
      narrow_to_pairs(rounded[r], count);
    }
    value_rows<Stored, kRows, kVectors>(rounded[0], kRounded, values, count, size, sums, columns);
  } else {
    value_rows<Stored, kRows, kVectors>(weights, weight_row, values, count, size, sums, columns);
  }
}

// Calls pass(r) as pass.operator()<kRows>(r) for all rows, at most `most` of 4 of them at a time.
template <class Pass>
FA_INLINE void in_passes(int64_t rows, int64_t most, Pass pass) {
  int64_t r = 0;
  for (; most >= 4 && r + 4 <= rows; r += 4) pass.template operator()<4>(r);
  for (; most == 3 && r + 3 <= rows; r += 3) pass.template operator()<3>(r);
  for (; r + 2 <= rows; r += 2) pass.template operator()<2>(r);
  if (r < rows) pass.template operator()<1>(r);
}

// Whether the keys of a head, `row` numbers apart, are read this way.
template <class Stored>
FA_INLINE bool keys_in_order(int64_t rows, int64_t size, int64_t row) {
  const int64_t loads = blocks_of(size, Stored::kStep);
  const bool usual = (size == kUsualSizes[0] || size == kUsualSizes[1]) && loads <= kMostWhole;
  return row == size && ((usual && kReadsWhole<Stored>) || rows * loads <= kRegisters / 2);
}

// Scores of `count` keys, `size` numbers each; whole vectors of scores are written.
template <class Stored>
static void scores_in_order(int64_t rows, QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                            float* scores, int64_t score_row) {
  for (int64_t c = 0; c < count; c += kLanes) {
    const StoredRows<Stored> own{keys.data + c * keys.row, keys.row};
    in_passes(rows, 4, [&]<int kRows>(int64_t r) {
      score_pass<Stored, kRows>({queries.data + r * queries.row, queries.row}, own, count - c, size,
                                scores + r * score_row + c, score_row);
    });
  }
}

// How many rows have room in the registers for their sums of all columns, at most 4; 0 where values are not read this way.
// Three rows of 128 numbers and then one read float32 at 95 % of a plain read, four rows of half the columns at 70 %. What
// is narrower is bound by its products: there four rows of some columns are as fast or faster.
template <class Stored>
FA_INLINE int64_t rows_of_values(int64_t rows, int64_t size, int64_t row) {
  if (row != size) return 0;
  const int64_t vectors = blocks_of(size, Stored::kStep) * kSumsOf<Stored>;
  if (rows * blocks_of(size, Stored::kStep) <= kRegisters / 2) return kSumsOf<Stored> > 1 ? 2 : 4;
  const int64_t room = smaller(4, kRegisters * 3 / 4 / vectors);
  return sizeof(typename Stored::Number) == sizeof(float) && room >= 3 ? room : 0;
}

// sums += P V for `count` values of `size` numbers, `most` rows at a time.
template <class Stored>
static void values_in_order(int64_t rows, int64_t most, const float* weights, int64_t weight_row,
                            StoredRows<Stored> values, int64_t count, int64_t size, float* sums, int64_t columns) {
  for (int64_t c = 0; c < count; c += kValueKeys) {
    const StoredRows<Stored> own{values.data + c * values.row, values.row};
    const int64_t keys = smaller(kValueKeys, count - c);
    in_passes(rows, most, [&]<int kRows>(int64_t r) {
      value_pass<Stored, kRows>(weights + r * weight_row + c, weight_row, own, keys, size, sums + r * columns, columns);
    });
  }
}

}  // namespace fa::FA_ISA
