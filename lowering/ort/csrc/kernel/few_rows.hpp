// The weighted values of a tile of few query rows: at most one vector of them.
//
// A vector holds columns of V, as they lie in memory, and each of them is multiplied with the probability of every row. So V
// is not copied, and its numbers are converted in registers. The sums are those of the panels, bit for bit: each begins with
// the rescaled earlier sum, and the keys follow in their order.
#pragma once

#include "microkernel.hpp"
#include "query_tile.hpp"

namespace fa::FA_ISA {

// Rows whose sums of the columns of one load fit the registers.
template <class Stored>
inline constexpr int kSummedRows = kLanes / kSumsPerLoad<Stored>;

// sums[r] = sums[r] rescale[r] + P V for kSummedRows rows and the columns of one load. `last` is how many columns that are if it
// is not full. `weights` has a line of a panel for each key, or with pairs for two keys. Without `rescale` there are no sums yet.
template <class Stored, bool kPartial>
FA_INLINE void add_columns_to_rows(const float* weights, StoredRows<Stored> values, int64_t count, int64_t last,
                                   const float* rescale, float* sums, int64_t columns, PrefetchQueue& prefetches) {
  constexpr int kUnit = kSumsPerLoad<Stored>;
  constexpr int kRows = kSummedRows<Stored>;
  constexpr int kKeys = Stored::kPairs ? 2 : 1;
  Vec sum[kRows][kUnit] = {};
  if (rescale != nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      load_sums<Stored>(sums + r * columns, sum[r]);
#pragma GCC unroll 2
      for (Vec& part : sum[r]) part *= rescale[r];
    }
  }
  const auto column = [&](const typename Stored::Number* row) {
    return kPartial ? Stored::load_partial(row, last) : Stored::load(row);
  };
  PrefetchRows current = prefetches.current;
  for (int64_t done = 0; done < count; done += kKeys * kPrefetchDepth) {
    current.issue(prefetches.rows_per_step);
    const int64_t end = smaller(count, done + kKeys * kPrefetchDepth);
    for (int64_t j = done; j < end; j += kKeys) {
      Vec x[kUnit];
      x[0] = column(values.data);
      if constexpr (Stored::kPairs) {
        const Vec odd = j + 1 < count ? column(values.data + values.stride) : Vec{};
        interleave(x[0], odd, x[0], x[1]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int u = 0; u < kUnit; ++u) sum[r][u] = add_products_of<Stored::kPairs>(sum[r][u], weights[r], x[u]);
      }
      weights += kPanel;
      values.data += kKeys * values.stride;
    }
  }
  prefetches.current = current;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) store_sums<Stored>(sums + r * columns, sum[r]);
}

// acc_rows = diag(rescale) acc_rows + P V for keys [first, first + count), with one vector of rows. Rows beyond those of the
// tile get sums that nobody reads.
template <class Stored>
static void add_values_to_rows(const QueryTile& tile, const float* weights, int64_t first, int64_t count,
                               const float* rescale) {
  const int64_t size = tile.problem.value_size;
  const int64_t columns = tile.columns();
  const StoredRows<Stored> values =
      stored_rows<Stored>(tile.problem.value, tile.sequence.value, tile.plan.head, first);
  for (int64_t r = 0; r < tile.rows(); r += kSummedRows<Stored>) {
    float* sums = tile.s.acc_rows + r * columns;
    const float* factors = rescale == nullptr ? nullptr : rescale + r;
    int64_t d = 0;
    for (; d + Stored::kPerLoad <= size; d += Stored::kPerLoad) {
      tile.prefetches.refill();
      add_columns_to_rows<Stored, false>(weights + r, {values.data + d, values.stride}, count, 0, factors, sums + d, columns,
                                         tile.prefetches);
    }
    if (d < size) {
      add_columns_to_rows<Stored, true>(weights + r, {values.data + d, values.stride}, count, size - d, factors, sums + d,
                                        columns, tile.prefetches);
    }
  }
}

}  // namespace fa::FA_ISA
