// The state of the online softmax while a task goes through its tokens, and how states of splits are merged.
#pragma once

#include "../online_softmax.hpp"
#include "plan.hpp"

namespace fa::FA_ISA {

// For each of `rows` query heads of one key head: the largest score, the sum of exponentials, and O = P V so far (whole
// vectors).
struct SoftmaxState {
  float* max;
  float* sum;
  float* sums;

  static int64_t floats(int64_t rows, int64_t columns) { return rows * (columns + 2); }
  SoftmaxState(float* memory, int64_t rows) : max(memory), sum(memory + rows), sums(memory + 2 * rows) {}

  void clear(int64_t rows, int64_t columns) const {
    for (int64_t r = 0; r < rows; ++r) {
      max[r] = -kInfinity;
      sum[r] = 0;
    }
    for (int64_t i = 0; i < rows * columns; ++i) sums[i] = 0;
  }

  // The largest score of row r has become `new_max`: rescales the sums.
  void rescale(int64_t r, float new_max, int64_t columns) const {
    const float factor = exp_nonpositive(splat(max[r] - softmax_origin(new_max)))[0];
    max[r] = new_max;
    sum[r] *= factor;
    float* row = sums + r * columns;
    for (int64_t d = 0; d < columns; d += kLanes) store(row + d, load(row + d) * factor);
  }
};

// Adds `other`, of later tokens, to `state`.
FA_INLINE void merge(const SoftmaxState& state, const SoftmaxState& other, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    if (other.max[r] == -kInfinity && !is_nan(other.sum[r])) continue;
    // If only one state has scores, its sums are taken as they are: if its largest score is +inf, inf - inf would be NaN.
    const bool alone = state.max[r] == -kInfinity && !is_nan(state.sum[r]);
    const float new_max = other.max[r] > state.max[r] ? other.max[r] : state.max[r];
    if (new_max != state.max[r] && !alone) state.rescale(r, new_max, columns);
    state.max[r] = new_max;
    const float factor =
        alone || other.max[r] == new_max ? 1.0f : exp_nonpositive(splat(other.max[r] - softmax_origin(new_max)))[0];
    state.sum[r] += other.sum[r] * factor;
    float* to = state.sums + r * columns;
    const float* from = other.sums + r * columns;
    for (int64_t d = 0; d < columns; d += kLanes) store(to + d, load(to + d) + load(from + d) * factor);
  }
}

}  // namespace fa::FA_ISA
