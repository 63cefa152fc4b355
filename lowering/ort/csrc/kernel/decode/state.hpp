// What a task keeps of the query heads of one key head while the tokens go by, and how such states are joined.
#pragma once

#include "../online_softmax.hpp"
#include "plan.hpp"

namespace fa::FA_ISA {

// `rows` query heads: the largest score, the sum of exponentials, the sums of values (whole vectors a row).
struct State {
  float* max;
  float* total;
  float* sums;

  static int64_t floats(int64_t rows, int64_t columns) { return rows * (columns + 2); }
  State(float* memory, int64_t rows) : max(memory), total(memory + rows), sums(memory + 2 * rows) {}

  void clear(int64_t rows, int64_t columns) const {
    for (int64_t r = 0; r < rows; ++r) {
      max[r] = -kInfinity;
      total[r] = 0;
    }
    for (int64_t i = 0; i < rows * columns; ++i) sums[i] = 0;
  }

  // The largest score of row r has become `top`: what was summed before shrinks.
  void raise(int64_t r, float top, int64_t columns) const {
    const float factor = exp_nonpositive(splat(max[r] - exp_origin(top)))[0];
    max[r] = top;
    total[r] *= factor;
    float* row = sums + r * columns;
    for (int64_t d = 0; d < columns; d += kLanes) store(row + d, load(row + d) * factor);
  }
};

// Adds `other`, of later tokens, to `state`.
FA_INLINE void join(const State& state, const State& other, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    if (other.max[r] == -kInfinity && !is_nan(other.total[r])) continue;
    // Alone, a state keeps all it has, also a largest score of +inf.
    const bool alone = state.max[r] == -kInfinity && !is_nan(state.total[r]);
    const float top = other.max[r] > state.max[r] ? other.max[r] : state.max[r];
    if (top != state.max[r] && !alone) state.raise(r, top, columns);
    state.max[r] = top;
    const float factor = alone || other.max[r] == top ? 1.0f : exp_nonpositive(splat(other.max[r] - exp_origin(top)))[0];
    state.total[r] += other.total[r] * factor;
    float* to = state.sums + r * columns;
    const float* from = other.sums + r * columns;
    for (int64_t d = 0; d < columns; d += kLanes) store(to + d, load(to + d) + load(from + d) * factor);
  }
}

}  // namespace fa::FA_ISA
