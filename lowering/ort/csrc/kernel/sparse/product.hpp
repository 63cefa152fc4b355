// The matrix products of the sparse kernels: a tile of sums held in registers while the depth runs.
//
// Unlike microkernel.hpp's, their rows of keys lie anywhere (gather.hpp): of scores they are the numbers that are
// broadcast, of weighted sums the lines.
#pragma once

#include "gather.hpp"

namespace fa::FA_ISA {

inline constexpr int64_t kStep = 16;  // lines of a product between two calls of Ahead::step

// out[key][kVectors * kLanes] = keys [first, first + kKeys) . query, which is [depth][kVectors * kLanes].
template <int kKeys, int kVectors>
static void score_tile(const Listed& keys, int64_t first, const float* query, int64_t depth, float* out, Ahead& ahead) {
  constexpr int kWidth = kVectors * kLanes;
  Vec sum[kKeys][kVectors] = {};
  for (int part = 0; depth > 0; ++part) {
    const float* at[kKeys];
#pragma GCC unroll 16
    for (int r = 0; r < kKeys; ++r) at[r] = keys.rows(part)[first + r];
    const int64_t own = smaller(keys.numbers(part), depth);
    depth -= own;
    for (int64_t left = own; left > 0; left -= kStep) {
      ahead.step();
      const int64_t lines = smaller(left, kStep);
      for (int64_t d = 0; d < lines; ++d) {
        Vec line[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) line[v] = load(query + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kKeys; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[r][v] += line[v] * at[r][d];
        }
        query += kWidth;
      }
#pragma GCC unroll 16
      for (int r = 0; r < kKeys; ++r) at[r] += kStep;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kKeys; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(out + r * kWidth + v * kLanes, sum[r][v]);
  }
}

// out[row][kPanel] = alpha[row] out + sum over keys of weights[row * kRowStep + key * kKeyStep] keys[key][column, + kPanel).
template <int kRows, int kRowStep, int kKeyStep>
FA_INLINE void weigh_tile(const float* weights, const float* const* keys, int64_t column, int64_t count, float* out,
                          int64_t out_row, const float* alpha, Ahead& ahead) {
  Vec sum[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) sum[r][v] = load(out + r * out_row + v * kLanes) * alpha[r];
  }
  for (int64_t left = count; left > 0; left -= kStep) {
    ahead.step();
    const float* const* end = keys + smaller(left, kStep);
    for (; keys < end; ++keys) {
      const float* line = *keys + column;
      const Vec line0 = load(line), line1 = load(line + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sum[r][0] += line0 * weights[r * kRowStep];
        sum[r][1] += line1 * weights[r * kRowStep];
      }
      weights += kKeyStep;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(out + r * out_row + v * kLanes, sum[r][v]);
  }
}

// `rows` from 1 to kTileRows: each count is a loop of its own, so that a short last tile does not pay for more.
template <int kRowStep, int kKeyStep, int kRows = kTileRows>
static void weigh_rows(int64_t rows, const float* weights, const float* const* keys, int64_t column, int64_t count,
                       float* out, int64_t out_row, const float* alpha, Ahead& ahead) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return weigh_rows<kRowStep, kKeyStep, kRows - 1>(rows, weights, keys, column, count, out, out_row, alpha, ahead);
    }
  }
  weigh_tile<kRows, kRowStep, kKeyStep>(weights, keys, column, count, out, out_row, alpha, ahead);
}

// sums[tokens[key]] += sum over rows of weights[row * kRowStep + key * kKeyStep] lines[row], all of kPanel numbers. One
// key after the other, for a list may name a key twice.
template <int kKeys, int kRowStep, int kKeyStep>
FA_INLINE void spread_tile(const float* weights, const float* lines, int64_t rows, const int64_t* tokens, float* sums) {
  Vec sum[kKeys][2] = {};
  for (int64_t h = 0; h < rows; ++h) {
    const Vec line0 = load(lines), line1 = load(lines + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kKeys; ++r) {
      sum[r][0] += line0 * weights[r * kKeyStep];
      sum[r][1] += line1 * weights[r * kKeyStep];
    }
    lines += kPanel;
    weights += kRowStep;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kKeys; ++r) {
    float* to = sums + tokens[r] * kPanel;
    store(to, load(to) + sum[r][0]);
    store(to + kLanes, load(to + kLanes) + sum[r][1]);
  }
}

// `keys` from 1 to kTileRows.
template <int kRowStep, int kKeyStep, int kKeys = kTileRows>
static void spread_keys(int64_t keys, const float* weights, const float* lines, int64_t rows, const int64_t* tokens,
                        float* sums) {
  if constexpr (kKeys > 1) {
    if (keys < kKeys) {
      return spread_keys<kRowStep, kKeyStep, kKeys - 1>(keys, weights, lines, rows, tokens, sums);
    }
  }
  spread_tile<kKeys, kRowStep, kKeyStep>(weights, lines, rows, tokens, sums);
}

}  // namespace fa::FA_ISA
