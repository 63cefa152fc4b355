// The matrix product of the sparse kernels: a tile of kTileRows rows and kVectors vectors of columns held in registers
// while the depth runs.
//
// Unlike microkernel.hpp, B need not be a packed panel: it may be a column of gathered rows, kColumnStep floats apart,
// and A may lie in chunks (gather.hpp), which follow each other along the depth.
#pragma once

#include "../simd.hpp"

namespace fa::FA_ISA {

inline constexpr int kChunk = 192;      // numbers of a gathered row that lie together: 6 panels of AVX-512
inline constexpr int kGatherKeys = 96;  // keys of a block: whole tiles of 6 and of 12; 576 floats each are 216 KB

enum class Sum { fresh, added, scaled };  // C = A B, C += A B, C = diag(alpha) C + A B

template <int kRows, int kVectors, int kRowStep, int kDepthStep, int kColumnStep, Sum kSum, bool kChunked>
FA_INLINE void tile_product(const float* a, const float* b, int64_t depth, float* c, int64_t c_row,
                            const float* alpha) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kSum == Sum::fresh) sum[r][v] = Vec{};
      if constexpr (kSum == Sum::added) sum[r][v] = load(c + r * c_row + v * kLanes);
      if constexpr (kSum == Sum::scaled) sum[r][v] = load(c + r * c_row + v * kLanes) * alpha[r];
    }
  }
  for (int64_t left = depth; left > 0; left -= kChunk) {
    const int64_t part = kChunked && left > kChunk ? int64_t{kChunk} : left;
    const float* at = a;
    for (int64_t k = 0; k < part; ++k) {
      Vec column[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) column[v] = load(b + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][v] += column[v] * at[r * kRowStep];
      }
      at += kDepthStep;
      b += kColumnStep;
    }
    if (!kChunked) break;
    a += kGatherKeys * kChunk;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(c + r * c_row + v * kLanes, sum[r][v]);
  }
}

// `rows` from 1 to kTileRows: each count is a loop of its own, so that a short last tile does not pay for more.
template <int kVectors, int kRowStep, int kDepthStep, int kColumnStep, Sum kSum, bool kChunked = false,
          int kRows = kTileRows>
static void product(int64_t rows, const float* a, const float* b, int64_t depth, float* c, int64_t c_row,
                    const float* alpha = nullptr) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      product<kVectors, kRowStep, kDepthStep, kColumnStep, kSum, kChunked, kRows - 1>(rows, a, b, depth, c, c_row, alpha);
      return;
    }
  }
  tile_product<kRows, kVectors, kRowStep, kDepthStep, kColumnStep, kSum, kChunked>(a, b, depth, c, c_row, alpha);
}

}  // namespace fa::FA_ISA
