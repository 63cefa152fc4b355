// Micro-tiles of several products: C = C_0 + A_1 B_1 + A_2 B_2 stays in registers (microkernel.hpp has the loop). The operands are
// in the first or second-level cache, so nothing is prefetched.
#pragma once

#include "../microkernel.hpp"

namespace fa::FA_ISA::lin {

// Sums of 0 for each finite number and of NaN for others. There are four, so that few wait for each other.
struct FiniteCheck {
  Vec sums[4] = {};
  bool holds() const { return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) == 0; }
};

// kRows x 2 vectors of sums.
template <int kRows>
struct Tile {
  Vec sum[kRows][2];

  FA_INLINE Tile zero() {
    Tile tile;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) tile.sum[r][0] = tile.sum[r][1] = Vec{};
    return tile;
  }

  // Row r of `from` times factors[r * step].
  FA_INLINE Tile scaled(const float* from, int64_t stride, const float* factors, int64_t step) {
    Tile tile = zero();
    tile.add_scaled(from, stride, factors, step);
    return tile;
  }
  [[gnu::always_inline]] void add_scaled(const float* from, int64_t stride, const float* factors, int64_t step) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = splat(factors[r * step]);
      sum[r][0] += load(from + r * stride) * factor;
      sum[r][1] += load(from + r * stride + kLanes) * factor;
    }
  }

  // Row r times factors[r * step].
  [[gnu::always_inline]] void scale(const float* factors, int64_t step = 1) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = splat(factors[r * step]);
      sum[r][0] *= factor;
      sum[r][1] *= factor;
    }
  }

  // With kPairs `depth` counts pairs of numbers.
  template <bool kPairs = false>
  [[gnu::always_inline]] void add(RowMajor a, PanelB b, int64_t depth) {
    Reader<RowMajor, kRows> numbers(a);
    add_along_depth<kRows, 2, kPairs>(numbers, b, depth, sum);
  }

  // Row r += sum over n < r of triangle_rn row n.
  [[gnu::always_inline]] void substitute(const float* triangle, int64_t stride) {
#pragma GCC unroll 16
    for (int n = 0; n < kRows; ++n) {
#pragma GCC unroll 16
      for (int r = n + 1; r < kRows; ++r) {
        const Vec weight = splat(triangle[r * stride + n]);
        sum[r][0] += sum[n][0] * weight;
        sum[r][1] += sum[n][1] * weight;
      }
    }
  }

  // Stores all rows.
  [[gnu::always_inline]] void store_to(float* to, int64_t stride, FiniteCheck& check) const {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      store(to + r * stride, sum[r][0]);
      store(to + r * stride + kLanes, sum[r][1]);
      check.sums[r % 2 * 2] += sum[r][0] * 0.0f;
      check.sums[r % 2 * 2 + 1] += sum[r][1] * 0.0f;
    }
  }
};

// Calls f.run<kRows>(first) for tiles of rows [0, count): kMicroRows rows in each, and fewer in the last.
template <int kRows = kMicroRows, class F>
FA_INLINE void last_tile(int64_t first, int64_t rows, F& f) {
  if (rows == kRows) return f.template run<kRows>(first);
  if constexpr (kRows > 1) last_tile<kRows - 1>(first, rows, f);
}
template <class F>
FA_INLINE void each_tile(int64_t count, F f) {
  int64_t first = 0;
  for (; first + kMicroRows <= count; first += kMicroRows) f.template run<kMicroRows>(first);
  if (first < count) last_tile<kMicroRows - 1>(first, count - first, f);
}

}  // namespace fa::FA_ISA::lin
