// The products of microkernel.hpp in tile registers, where the processor has them: C = A B, C += A B or C = C diag(beta) + A B,
// with A and B in pairs of bfloat16.
//
// A micro-tile has one or two tiles of rows, and one or two of columns. The products of four tiles do not wait for each other.
// A is read by rows: a tile is kTileSide rows of kTileSide pairs, as they lie in memory. A tile of B is kTileSide lines of a
// panel. What is missing in the last rows of A, or at the end of the depth, is filled up with 0 in a copy.
#pragma once

#include "microkernel.hpp"

namespace fa::FA_ISA {

// Rows of A that one call multiplies, at most.
template <bool kPairs>
inline constexpr int64_t kProductRows = kPairs && Isa::kHasTiles ? 2 * kTileSide : kMicroRows;

// Between these two calls a thread may use the tile registers.
struct TilesOfThread {
  TilesOfThread() { Isa::enable_tiles(); }
  ~TilesOfThread() { Isa::disable_tiles(); }
  TilesOfThread(const TilesOfThread&) = delete;
  TilesOfThread& operator=(const TilesOfThread&) = delete;
};

// An operand of a tile instruction: rows that are `stride` floats apart.
struct TileRows {
  const float* data;
  int64_t stride;
};

// C += A B along kTileSide pairs. C of a micro-tile are tiles 0 to 3, row after row; A are tiles 4 and 5, B are 6 and 7.
template <int kRowTiles, int kVectors>
FA_INLINE void add_tiles(TileRows a, TileRows b) {
  Isa::template load_tile<6>(b.data, b.stride);
  Isa::template load_tile<4>(a.data, a.stride);
  Isa::template add_tile_products<0, 4, 6>();
  if constexpr (kVectors == 2) {
    Isa::template load_tile<7>(b.data + kLanes, b.stride);
    Isa::template add_tile_products<1, 4, 7>();
  }
  if constexpr (kRowTiles == 2) {
    Isa::template load_tile<5>(a.data + kTileSide * a.stride, a.stride);
    Isa::template add_tile_products<2, 5, 6>();
    if constexpr (kVectors == 2) Isa::template add_tile_products<3, 5, 7>();
  }
}

// The same for the pairs from `k` on, where rows or lines are missing.
template <int kRowTiles, int kVectors>
[[gnu::noinline]] static void add_partial_tiles(int64_t rows, RowMajor a, PanelB b, int64_t depth, int64_t k) {
  alignas(64) float some_rows[kRowTiles * kTileSide * kTileSide];
  alignas(64) float some_lines[kTileSide * kVectors * kLanes];
  for (; k < depth; k += kTileSide) {
    const int64_t count = smaller(kTileSide, depth - k);
    for (int64_t r = 0; r < kRowTiles * kTileSide; ++r) {
      for (int64_t n = 0; n < kTileSide; n += kLanes) {
        const int64_t numbers = r < rows ? smaller(kLanes, larger(0, count - n)) : 0;
        store(some_rows + r * kTileSide + n, Isa::load_first(a.data + r * a.stride + k + n, numbers));
      }
    }
    const TileRows left{some_rows, kTileSide};
    if (count == kTileSide) {
      add_tiles<kRowTiles, kVectors>(left, {b.data + k * b.stride, b.stride});
      continue;
    }
    for (int64_t n = 0; n < kTileSide; ++n) {
      for (int v = 0; v < kVectors; ++v) {
        const Vec line = n < count ? load(b.data + (k + n) * b.stride + v * kLanes) : Vec{};
        store(some_lines + (n * kVectors + v) * kLanes, line);
      }
    }
    add_tiles<kRowTiles, kVectors>(left, {some_lines, kVectors * kLanes});
  }
}

// C = A B, C += A B or C = C diag(beta) + A B for `rows` rows, with A B in `sums`.
template <int kVectors, Beta kBeta>
FA_INLINE void add_to_output(int64_t rows, const float* sums, Output c) {
  Vec factor[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) factor[v] = kBeta == Beta::diagonal ? load(c.beta + v * kLanes) : Vec{};
#pragma GCC unroll 4
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Vec sum = load(sums + (r * kVectors + v) * kLanes);
      float* at = c.data + r * c.stride + v * kLanes;
      if constexpr (kBeta == Beta::one || kBeta == Beta::added) sum += load(at);
      if constexpr (kBeta == Beta::diagonal) sum += load(at) * factor[v];
      store(at, sum);
    }
  }
}

// Raises `maxima` to the largest number in each column. Even and odd rows do not wait for each other.
template <int kVectors>
FA_INLINE void raise_maxima(int64_t rows, const float* from, int64_t stride, float* maxima) {
  Vec largest[2][kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) largest[0][v] = largest[1][v] = load(maxima + v * kLanes);
  int64_t r = 0;
#pragma GCC unroll 4
  for (; r + 1 < rows; r += 2) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        largest[n][v] = maximum(load(from + (r + n) * stride + v * kLanes), largest[n][v]);
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    if (r < rows) largest[0][v] = maximum(load(from + r * stride + v * kLanes), largest[0][v]);
    store(maxima + v * kLanes, maximum(largest[0][v], largest[1][v]));
  }
}

// One micro-tile.
template <int kRowTiles, int kVectors, Beta kBeta>
static void multiply_tiles(int64_t rows, RowMajor a, PanelB b, int64_t depth, Output c, PrefetchQueue& prefetches) {
  constexpr int64_t kRows = kRowTiles * kTileSide;
  constexpr bool kTwoRows = kRowTiles == 2;
  constexpr bool kTwoColumns = kVectors == 2;
  Isa::template clear_tile<0>();
  if constexpr (kTwoColumns) Isa::template clear_tile<1>();
  if constexpr (kTwoRows) Isa::template clear_tile<2>();
  if constexpr (kTwoRows && kTwoColumns) Isa::template clear_tile<3>();
  PrefetchRows current = prefetches.current;
  const int64_t whole = rows == kRows ? depth / kTileSide * kTileSide : 0;
  for (int64_t k = 0; k < whole; k += kTileSide) {
    current.issue(prefetches.rows_per_step);
    add_tiles<kRowTiles, kVectors>({a.data + k, a.stride}, {b.data + k * b.stride, b.stride});
  }
  if (whole < depth) add_partial_tiles<kRowTiles, kVectors>(rows, a, b, depth, whole);
  prefetches.current = current;
  alignas(64) float sums[kRows * kVectors * kLanes];
  const bool direct = kBeta == Beta::zero && rows == kRows;
  float* to = direct ? c.data : sums;
  const int64_t stride = direct ? c.stride : kVectors * kLanes;
  Isa::template store_tile<0>(to, stride);
  if constexpr (kTwoColumns) Isa::template store_tile<1>(to + kLanes, stride);
  if constexpr (kTwoRows) Isa::template store_tile<2>(to + kTileSide * stride, stride);
  if constexpr (kTwoRows && kTwoColumns) Isa::template store_tile<3>(to + kTileSide * stride + kLanes, stride);
  if (!direct) add_to_output<kVectors, kBeta>(rows, sums, c);
  if (c.column_max != nullptr) raise_maxima<kVectors>(rows, to, stride, c.column_max);
}

// multiply() of microkernel.hpp for up to kProductRows<kPairs> rows, in tile registers where there are some.
template <int kVectors, Beta kBeta, bool kPairs, class A>
FA_INLINE void multiply_operands(int64_t rows, A a, PanelB b, int64_t depth, Output c, PrefetchQueue& prefetches) {
  if constexpr (!kPairs || !Isa::kHasTiles) {
    multiply<kVectors, kBeta, kPairs>(rows, a, b, depth, c, prefetches);
  } else if (rows > kTileSide) {
    multiply_tiles<2, kVectors, kBeta>(rows, a, b, depth, c, prefetches);
  } else {
    multiply_tiles<1, kVectors, kBeta>(rows, a, b, depth, c, prefetches);
  }
}

}  // namespace fa::FA_ISA
