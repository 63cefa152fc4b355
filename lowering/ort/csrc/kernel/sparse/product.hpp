// The matrix products of the sparse kernels. A micro-tile of sums stays in registers while the depth runs.
//
// In contrast to microkernel.hpp the rows of keys lie anywhere (gather.hpp). In products of scores the keys' numbers are
// broadcast; in weighted sums the keys are the lines.
#pragma once

#include "gather.hpp"

namespace fa::FA_ISA {

// Floats, or pairs, of a key between two prefetches.
inline constexpr int64_t kStep = kCacheLine / sizeof(float);
inline constexpr int64_t kPrefetchSteps = 8;

// out[key][kVectors * kLanes] = keys [first, first + kKeys) . query. `query` is [depth][kVectors * kLanes]; with kPairs
// there are half as many lines of pairs.
template <int kKeys, int kVectors, bool kPairs>
static void score_tile(const GatheredRows<kPairs>& keys, int64_t first, const float* query, int64_t depth, float* out) {
  constexpr int kWidth = kVectors * kLanes;
  Vec sum[kKeys][kVectors] = {};
  for (int part = 0; depth > 0; ++part) {
    const float* at[kKeys];
#pragma GCC unroll 16
    for (int r = 0; r < kKeys; ++r) at[r] = keys.rows(part)[first + r];
    const int64_t count = smaller(keys.numbers(part), depth);
    depth -= count;
    for (int64_t left = keys.operand_floats(count); left > 0; left -= kStep) {
      if (left > kPrefetchSteps * kStep) {
#pragma GCC unroll 16
        for (int r = 0; r < kKeys; ++r) __builtin_prefetch(at[r] + kPrefetchSteps * kStep, 0, 2);
      }
      const int64_t lines = smaller(left, kStep);
      for (int64_t d = 0; d < lines; ++d) {
        Vec line[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) line[v] = load(query + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kKeys; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[r][v] = add_products<kPairs>(sum[r][v], at[r][d], line[v]);
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

// kPanel columns of gathered keys from `column` on.
struct KeyLines {
  const float* const* rows;
  int64_t column;
  const float* at(int64_t n) const { return rows[n] + column; }
};

// Lines of pairs: the same columns of two keys, interleaved.
struct PairLines {
  const float* data;
  const float* at(int64_t n) const { return data + n * kPanel; }
};

// out[row][kPanel] = alpha[row] out + sum over lines of weights[row * kRowStep + line * kKeyStep] lines[line][kPanel].
template <int kRows, int kRowStep, int kKeyStep, bool kPairs, class Lines>
FA_INLINE void weighted_sum_tile(const float* weights, Lines lines, int64_t count, float* out, int64_t out_row,
                                 const float* alpha) {
  Vec sum[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) sum[r][v] = load(out + r * out_row + v * kLanes) * alpha[r];
  }
  for (int64_t n = 0; n < count; ++n) {
    const float* line = lines.at(n);
    const Vec line0 = load(line), line1 = load(line + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = add_products<kPairs>(sum[r][0], weights[r * kRowStep], line0);
      sum[r][1] = add_products<kPairs>(sum[r][1], weights[r * kRowStep], line1);
    }
    weights += kKeyStep;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(out + r * out_row + v * kLanes, sum[r][v]);
  }
}

// `rows` is 1 to kMicroRows: each count is a loop of its own, so that a short last micro-tile does not pay for more.
template <int kRowStep, int kKeyStep, bool kPairs, class Lines, int kRows = kMicroRows>
static void weighted_sum_rows(int64_t rows, const float* weights, Lines lines, int64_t count, float* out, int64_t out_row,
                              const float* alpha) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return weighted_sum_rows<kRowStep, kKeyStep, kPairs, Lines, kRows - 1>(rows, weights, lines, count, out, out_row,
                                                                             alpha);
    }
  }
  weighted_sum_tile<kRows, kRowStep, kKeyStep, kPairs>(weights, lines, count, out, out_row, alpha);
}

// sums[tokens[key] - origin] += sum over rows of weights[row * kRowStep + key * kKeyStep] lines[row], for kPanel numbers. The
// keys are added one after the other, because a list may name a key twice. With kPairs each row is one of pairs.
template <int kKeys, int kRowStep, int kKeyStep, bool kPairs>
FA_INLINE void scatter_add_tile(const float* weights, const float* lines, int64_t rows, const int64_t* tokens,
                                int64_t origin, float* sums) {
  Vec sum[kKeys][2] = {};
  for (int64_t h = 0; h < rows; ++h) {
    const Vec line0 = load(lines), line1 = load(lines + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kKeys; ++r) {
      sum[r][0] = add_products<kPairs>(sum[r][0], weights[r * kKeyStep], line0);
      sum[r][1] = add_products<kPairs>(sum[r][1], weights[r * kKeyStep], line1);
    }
    lines += kPanel;
    weights += kRowStep;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kKeys; ++r) {
    float* to = sums + (tokens[r] - origin) * kPanel;
    store(to, load(to) + sum[r][0]);
    store(to + kLanes, load(to + kLanes) + sum[r][1]);
  }
}

// `keys` is 1 to kMicroRows.
template <int kRowStep, int kKeyStep, bool kPairs, int kKeys = kMicroRows>
static void scatter_add_keys(int64_t keys, const float* weights, const float* lines, int64_t rows, const int64_t* tokens,
                             int64_t origin, float* sums) {
  if constexpr (kKeys > 1) {
    if (keys < kKeys) {
      return scatter_add_keys<kRowStep, kKeyStep, kPairs, kKeys - 1>(keys, weights, lines, rows, tokens, origin, sums);
    }
  }
  scatter_add_tile<kKeys, kRowStep, kKeyStep, kPairs>(weights, lines, rows, tokens, origin, sums);
}

}  // namespace fa::FA_ISA
