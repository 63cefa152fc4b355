// The products of up to four query rows at a time with K and V, which are streamed in the order of memory.
//
// Memory is the limit here. So the keys are read one after the other, each from its beginning to its end, and each load
// instruction steps from key to key by the same distance. The hardware prefetcher then reaches its full speed (Zen 4: 30
// GB/s). Measured: two keys side by side are read at a third of that, or at 60 to 75 % with software prefetches.
//
// If the queries of one or two rows fit the registers, there are no loads but those of keys and values, so that the load
// queue looks as far ahead as it can. More rows are multiplied with a key at once, with their queries from the first-level
// cache: four rows of float32 take a seventh longer than reading the keys.
#pragma once

#include "prefetch.hpp"
#include "stored.hpp"

namespace fa::FA_ISA {

// Keys whose values are added before the next columns or rows. Measured: 32 and 64 are 5 to 10 % slower, because the columns
// are then read less in the order of memory.
inline constexpr int64_t kValueKeys = 16;

// Prefetch distance in bytes. One row has so little to compute that the processor waits at the end of each page, where the
// hardware prefetcher stops. So each load of a whole cache line prefetches the line at this distance. Measured: 5 % faster;
// a distance of 4096 is not. With more rows nothing is gained, and 16-bit numbers, which are loaded by half lines, get
// slower.
inline constexpr int64_t kPrefetchBytes = 1024;

// Adds lanes whose numbers differ in the bit kStep. Lane l of the result is a sum of a if l lacks the bit, else of b.
template <int kStep>
FA_INLINE Vec add_halves(Vec a, Vec b) {
  return shuffle(a, b, [](int lane) { return (lane & kStep) == 0 ? lane : kLanes + lane; }) +
         shuffle(a, b, [](int lane) { return (lane & kStep) == 0 ? lane + kStep : kLanes + lane - kStep; });
}

// Reduces kCount vectors to one: lane l of the result belongs to vector l / kUnit % kCount.
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
FA_INLINE Vec sum_lanes_of_each(Vec (&vectors)[kLanes]) { return fold<kLanes, 1>(vectors); }

// The same for the first half of the vectors. The upper lanes repeat the lower ones.
FA_INLINE Vec sum_lanes_of_first_half(Vec (&vectors)[kLanes]) {
  constexpr int kHalf = kLanes / 2;
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; ++i) vectors[i] = add_halves<kHalf>(vectors[i], vectors[i]);
  return fold<kHalf, 1>(vectors);
}

// Rows of K or V, `stride` numbers apart.
template <class Stored>
struct StoredRows {
  const typename Stored::Number* data;
  int64_t stride;

  // Row `first` and those after it.
  [[gnu::always_inline]] StoredRows from(int64_t first) const { return {data + first * stride, stride}; }
};

// While a row is read, the row `ahead` numbers after it is prefetched.
template <class Stored>
struct StoredRows<Paged<Stored>> {
  const typename Stored::Number* data;
  int64_t stride;
  int64_t ahead = kCacheLine / sizeof(typename Stored::Number);

  [[gnu::always_inline]] StoredRows from(int64_t first) const { return {data + first * stride, stride, ahead}; }
};

// Rows of a head from row `first` on.
template <class Stored>
FA_INLINE StoredRows<Stored> stored_rows(const Strided& rows, int64_t sequence, int64_t head, int64_t first) {
  return {static_cast<const typename Stored::Number*>(rows.data) + sequence + head * rows.head + first * rows.row,
          rows.row};
}

template <class Stored, int kRows>
FA_INLINE void prefetch_ahead(const typename Stored::Number* p) {
  constexpr int64_t kNumber = sizeof(typename Stored::Number);
  if constexpr (!Stored::kPaged && kRows == 1 && Stored::kPerLoad * kNumber == kCacheLine) {
    prefetch(p + kPrefetchBytes / kNumber);
  }
}

// With kPaged: prefetches what is rows.ahead numbers after kLoads loads from p on.
template <int kLoads, class Stored>
FA_INLINE void prefetch_other_page(StoredRows<Stored> rows, const typename Stored::Number* p) {
  if constexpr (Stored::kPaged) {
    constexpr int64_t kLine = kCacheLine / sizeof(typename Stored::Number);
#pragma GCC unroll 16
    for (int64_t n = 0; n < kLoads * Stored::kPerLoad; n += kLine) prefetch(p + rows.ahead + n);
  }
}

// Query rows in whole vectors of what `Stored` loads, filled up with 0.
struct QueryRows {
  const float* data;
  int64_t stride;
};

// parts[r][key] += queries[r] * keys[key], lane by lane, over kVectors loads of columns of kLanes keys; if `first`, parts is
// overwritten. `last` is how many numbers the last load has, or 0 if it is full. The queries stay in registers, because
// other loads would shorten how far the load queue looks ahead. Keys from `count` on repeat the last one.
template <class Stored, int kRows, int kVectors>
FA_INLINE void stream_key_columns(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t last, bool first,
                                  Vec (&parts)[kRows][kLanes]) {
  Vec q[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) q[r][v] = load(queries.data + r * queries.stride + v * kLanes);
  }
#pragma GCC unroll 1
  for (int64_t j = 0; j < kLanes; ++j) {
    const typename Stored::Number* key = keys.data + smaller(j, count - 1) * keys.stride;
    Vec sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = first ? Vec{} : parts[r][j];
    prefetch_other_page<kVectors>(keys, key);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const typename Stored::Number* from = key + v * Stored::kPerLoad;
      const Vec k = last > 0 && v == kVectors - 1 ? Stored::load_partial(from, last) : Stored::load(from);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = add_products<Stored::kPairs>(sum[r], q[r][v], k);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) parts[r][j] = sum[r];
  }
}

// All columns: kVectors loads at a time, then half as many. `first`: none of the columns before.
template <class Stored, int kRows, int kVectors>
FA_INLINE void stream_keys(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size, bool first,
                           Vec (&parts)[kRows][kLanes]) {
  constexpr int64_t kColumns = kVectors * Stored::kPerLoad;
  for (; size >= kColumns; size -= kColumns) {
    stream_key_columns<Stored, kRows, kVectors>(queries, keys, count, 0, first, parts);
    first = false;
    keys.data += kColumns;
    queries.data += kVectors * kLanes;
  }
  if constexpr (kVectors > 1) {
    if (size > 0) stream_keys<Stored, kRows, kVectors / 2>(queries, keys, count, size, first, parts);
  } else if (size > 0) {
    stream_key_columns<Stored, kRows, 1>(queries, keys, count, size, first, parts);
  }
}

// Scores of keys that are kVectors full loads long. Storing a vector takes more than two cycles on Zen 4, so the sums of
// kFoldedKeys keys are reduced to one vector before they leave the registers.
inline constexpr int kFoldedKeys = 4;

// The head sizes that models have. 128 numbers are 8 loads of AVX-512.
inline constexpr int64_t kFixedSizes[] = {64, 128};
inline constexpr int kMostFixedLoads = 16;  // loads that are unrolled

// Whether keys of these sizes have a loop of their own. Not for int8, whose products take longer than reading: keys side by
// side, which share the loads of the queries, are 3 % faster. With 16 registers keys side by side are faster for several
// rows of any type.
template <class Stored>
inline constexpr bool kHasFixedSizes = sizeof(typename Stored::Number) > 1 && kRegisters > 16;

template <class Stored, int kRows, int kVectors>
FA_INLINE void stream_keys_fixed(QueryRows queries, StoredRows<Stored> keys, int64_t count, float* scores,
                                 int64_t score_stride) {
  constexpr bool kQueryInRegisters = kRows * kVectors <= kRegisters / 2;
  Vec query_registers[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; kQueryInRegisters && r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) query_registers[r][v] = load(queries.data + r * queries.stride + v * kLanes);
  }
  Vec parts[kRows][kLanes / kFoldedKeys];
#pragma GCC unroll 1
  for (int64_t j = 0; j < kLanes; j += kFoldedKeys) {
    Vec sum[kRows][kFoldedKeys];
#pragma GCC unroll 4
    for (int u = 0; u < kFoldedKeys; ++u) {
      const typename Stored::Number* key = keys.data + smaller(j + u, count - 1) * keys.stride;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][u] = Vec{};
      prefetch_other_page<kVectors>(keys, key);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Vec k = Stored::load(key + v * Stored::kPerLoad);
        prefetch_ahead<Stored, kRows>(key + v * Stored::kPerLoad);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const Vec q = kQueryInRegisters ? query_registers[r][v] : load(queries.data + r * queries.stride + v * kLanes);
          sum[r][u] = add_products<Stored::kPairs>(sum[r][u], q, k);
        }
      }
      if (u % 2 == 0) continue;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r][u - 1] = add_halves<1>(sum[r][u - 1], sum[r][u]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) parts[r][j / kFoldedKeys] = add_halves<2>(sum[r][0], sum[r][2]);
  }
  for (int r = 0; r < kRows; ++r) store(scores + r * score_stride, fold<kLanes / kFoldedKeys, kFoldedKeys>(parts[r]));
}

// The same for keys of any size. (noinline: in one function with it, GCC compiles stream_keys_fixed to slower code. Measured
// for bfloat16: a step takes 4 % longer.)
template <class Stored, int kRows>
[[gnu::noinline]] static void stream_keys_of_any_size(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                                                      float* scores, int64_t score_stride) {
  Vec parts[kRows][kLanes];
  stream_keys<Stored, kRows, kRegisters / 2 / kRows>(queries, keys, count, size, true, parts);
  for (int r = 0; r < kRows; ++r) store(scores + r * score_stride, sum_lanes_of_each(parts[r]));
}

// scores[r][key] = queries[r] . keys[key] for kLanes keys and kRows rows. (noinline, like the values below and the functions of
// decoding that call them: in one function the registers do not suffice for the addresses of all, and a step with AVX2 takes
// up to a tenth longer)
template <class Stored, int kRows>
[[gnu::noinline]] static void stream_keys_pass(QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                                               float* scores, int64_t score_stride) {
  constexpr int kLarge = kFixedSizes[1] / Stored::kPerLoad;
  constexpr int kSmall = kFixedSizes[0] / Stored::kPerLoad;
  if constexpr (kHasFixedSizes<Stored> && kLarge <= kMostFixedLoads) {
    if (size == kFixedSizes[1]) {
      stream_keys_fixed<Stored, kRows, kLarge>(queries, keys, count, scores, score_stride);
      return;
    }
  }
  if constexpr (kHasFixedSizes<Stored> && kSmall <= kMostFixedLoads) {
    if (size == kFixedSizes[0]) {
      stream_keys_fixed<Stored, kRows, kSmall>(queries, keys, count, scores, score_stride);
      return;
    }
  }
  stream_keys_of_any_size<Stored, kRows>(queries, keys, count, size, scores, score_stride);
}

// sums[r] += weights[r] V for kVectors loads of columns. `last` is how many numbers the last load has, or 0 if it is full.
// The sums stay in registers while `count` keys go by. With pairs, each float of `weights` holds two keys' weights.
template <class Stored, int kRows, int kVectors>
FA_INLINE void stream_value_columns(const float* weights, int64_t weight_stride, StoredRows<Stored> values, int64_t count,
                                    int64_t last, float* sums, int64_t columns) {
  constexpr int kUnit = kSumsPerLoad<Stored>;
  constexpr int kKeys = Stored::kPairs ? 2 : 1;
  Vec sum[kRows][kVectors][kUnit];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) load_sums<Stored>(sums + r * columns + v * Stored::kPerLoad, sum[r][v]);
  }
  const auto column = [&](const typename Stored::Number* row, int v) {
    prefetch_ahead<Stored, kRows>(row + v * Stored::kPerLoad);
    return last > 0 && v == kVectors - 1 ? Stored::load_partial(row + v * Stored::kPerLoad, last)
                                         : Stored::load(row + v * Stored::kPerLoad);
  };
  for (int64_t j = 0; j < count; j += kKeys) {
    const typename Stored::Number* row = values.data + j * values.stride;
#pragma GCC unroll 2
    for (int n = 0; n < kKeys; ++n) prefetch_other_page<kVectors>(values, row + n * values.stride);
    Vec x[kVectors][kUnit];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) x[v][0] = column(row, v);
    if constexpr (Stored::kPairs) {
      asm volatile("" ::: "memory");  // reads the second key after the first one
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Vec odd = j + 1 < count ? column(row + values.stride, v) : Vec{};
        interleave(x[v][0], odd, x[v][0], x[v][1]);
      }
    }
    if constexpr (Stored::kEvenOdd) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        x[v][1] = Stored::odd(x[v][0]);
        x[v][0] = Stored::even(x[v][0]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float weight = weights[r * weight_stride + j / kKeys];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors * kUnit; ++v) {
        Vec& acc = sum[r][v / kUnit][v % kUnit];
        acc = add_products<Stored::kPairs>(acc, weight, x[v / kUnit][v % kUnit]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store_sums<Stored>(sums + r * columns + v * Stored::kPerLoad, sum[r][v]);
  }
}

// All columns: kVectors loads at a time, then half as many.
template <class Stored, int kRows, int kVectors>
FA_INLINE void stream_values(const float* weights, int64_t weight_stride, StoredRows<Stored> values, int64_t count,
                             int64_t size, float* sums, int64_t columns) {
  constexpr int64_t kColumns = kVectors * Stored::kPerLoad;
  for (; size >= kColumns; size -= kColumns) {
    stream_value_columns<Stored, kRows, kVectors>(weights, weight_stride, values, count, 0, sums, columns);
    values.data += kColumns;
    sums += kColumns;
  }
  if constexpr (kVectors > 1) {
    stream_values<Stored, kRows, kVectors / 2>(weights, weight_stride, values, count, size, sums, columns);
  } else if (size > 0) {
    stream_value_columns<Stored, kRows, 1>(weights, weight_stride, values, count, size, sums, columns);
  }
}

// sums += P V for `count` <= kValueKeys keys. With pairs, the weights are rounded to bfloat16 first.
template <class Stored, int kRows>
[[gnu::noinline]] static void stream_values_pass(const float* weights, int64_t weight_stride, StoredRows<Stored> values,
                                                 int64_t count, int64_t size, float* sums, int64_t columns) {
  // Three rows take three quarters of the registers, other numbers of rows half of them: a power of two of vectors for each
  // row.
  constexpr int kSums = kRows == 3 ? kRegisters * 3 / 4 : kRegisters / 2;
  constexpr int kVectors = kSums / (kRows * kSumsPerLoad<Stored>);
  if constexpr (Stored::kPairs) {
    constexpr int64_t kRounded = kValueKeys + kLanes;
    float rounded[kRows][kRounded];
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(rounded[r], weights + r * weight_stride, static_cast<size_t>(count) * sizeof(float));
      narrow_to_pairs(rounded[r], count);
    }
    stream_values<Stored, kRows, kVectors>(rounded[0], kRounded, values, count, size, sums, columns);
  } else {
    stream_values<Stored, kRows, kVectors>(weights, weight_stride, values, count, size, sums, columns);
  }
}

// Calls pass.operator()<kRows>(r) until all rows are done, with kRows rows from r on. kRows is at most `most`, and at most
// 4.
template <class Pass>
FA_INLINE void in_row_passes(int64_t rows, int64_t most, Pass pass) {
  int64_t r = 0;
  for (; most >= 4 && r + 4 <= rows; r += 4) pass.template operator()<4>(r);
  for (; most == 3 && r + 3 <= rows; r += 3) pass.template operator()<3>(r);
  for (; r + 2 <= rows; r += 2) pass.template operator()<2>(r);
  if (r < rows) pass.template operator()<1>(r);
}

// Whether the keys of a head are streamed. They are `row` numbers apart.
template <class Stored>
FA_INLINE bool streams_keys(int64_t rows, int64_t size, int64_t row) {
  const int64_t loads = ceil_div(size, Stored::kPerLoad);
  const bool usual = (size == kFixedSizes[0] || size == kFixedSizes[1]) && loads <= kMostFixedLoads;
  return row == size && ((usual && kHasFixedSizes<Stored>) || rows * loads <= kRegisters / 2);
}

// scores[r][key] = queries[r] . keys[key] for `count` keys of `size` numbers. Whole vectors of scores are written.
template <class Stored>
static void streaming_scores(int64_t rows, QueryRows queries, StoredRows<Stored> keys, int64_t count, int64_t size,
                             float* scores, int64_t score_stride) {
  for (int64_t c = 0; c < count; c += kLanes) {
    const StoredRows<Stored> block = keys.from(c);
    in_row_passes(rows, 4, [&]<int kRows>(int64_t r) {
      stream_keys_pass<Stored, kRows>({queries.data + r * queries.stride, queries.stride}, block, count - c, size,
                                      scores + r * score_stride + c, score_stride);
    });
  }
}

// How many rows, at most 4, have room in the registers for the sums of all columns. 0 if the values are not streamed.
//
// Measured for float32: three rows of 128 numbers and then one row read at 95 % of a plain read, four rows of half the
// columns at 70 %. Narrower types are bound by their products; for them four rows of some columns are as fast or faster.
// With kEvenOdd each pass over the values extracts the even and odd numbers anew: three and four rows in one pass over half the
// columns take 37 cycles for 128 numbers, in two passes over all columns 48.
template <class Stored>
FA_INLINE int64_t streaming_value_rows(int64_t rows, int64_t size, int64_t row) {
  if (row != size || (Stored::kEvenOdd && rows > 2)) return 0;
  const int64_t vectors = ceil_div(size, Stored::kPerLoad) * kSumsPerLoad<Stored>;
  if (rows * ceil_div(size, Stored::kPerLoad) <= kRegisters / 2) return kSumsPerLoad<Stored> > 1 ? 2 : 4;
  const int64_t room = smaller(4, kRegisters * 3 / 4 / vectors);
  return sizeof(typename Stored::Number) == sizeof(float) && room >= 3 ? room : 0;
}

// sums += P V for `count` values of `size` numbers, `most` rows at a time.
template <class Stored>
static void streaming_values(int64_t rows, int64_t most, const float* weights, int64_t weight_stride,
                             StoredRows<Stored> values, int64_t count, int64_t size, float* sums, int64_t columns) {
  for (int64_t c = 0; c < count; c += kValueKeys) {
    const StoredRows<Stored> block = values.from(c);
    const int64_t keys = smaller(kValueKeys, count - c);
    in_row_passes(rows, most, [&]<int kRows>(int64_t r) {
      stream_values_pass<Stored, kRows>(weights + r * weight_stride + c, weight_stride, block, keys, size,
                                        sums + r * columns, columns);
    });
  }
}

}  // namespace fa::FA_ISA
