// The bias of one row of scores: read from a tensor, or computed from an ALiBi slope.
#pragma once

#include "convert.hpp"
#include "softcap.hpp"

namespace fa::FA_ISA {

// -slope * |distance| for `count` keys, or -slope * sqrt(|distance|) with `root`. `distance` is that of the first key. A
// distance beyond 2^24 is rounded as a float, one part in 2^24.
FA_INLINE void slope_bias(float slope, int64_t distance, int64_t count, bool root, float* out) {
  const float origin = static_cast<float>(distance);
  for (int64_t c = 0; c < count; ++c) out[c] = __builtin_fabsf(origin + static_cast<float>(static_cast<int32_t>(c)));
  if (root) {
    for (int64_t c = 0; c < count; ++c) out[c] = __builtin_sqrtf(out[c]);
  }
  for (int64_t c = 0; c < count; ++c) out[c] *= -slope;
}

FA_INLINE bool has_bias(const Problem& problem) { return problem.pse != nullptr || problem.slopes != nullptr; }

// The score of a product q . k, capped if there is a soft cap, and its bias. There is one rounding for product and sum where
// the processor has fused multiply-add, and one for a scale that follows. The gradient has to round as the forward pass
// does.
FA_INLINE Vec biased_score(const Problem& problem, Vec product, Vec bias) {
  const float before = problem.pse_inside_scale ? 1.0f : remaining_scale(problem.softcap, problem.scale);
  const float after = problem.pse_inside_scale ? problem.scale : 1.0f;
  return (product * before + bias) * after;
}

// The bias of row i for keys [first, first + count), as floats that may be read as whole vectors. `buffer` has room for as
// many.
FA_INLINE const float* bias_row(const Problem& problem, const Sequence& sequence, int64_t head, int64_t i,
                                int64_t first, int64_t count, float* buffer) {
  if (problem.slopes != nullptr) {
    const float slope = problem.slopes[sequence.slopes + head];
    slope_bias(slope, first - i + sequence.start, count, problem.slope_of_root, buffer);
    return buffer;
  }
  const int64_t at = sequence.pse + head * sequence.pse_head + pse_row_offset(problem, sequence, i) +
                     first * problem.pse_column;
  if (problem.pse_column == 0) {
    const float value = *as_floats(problem.pse, at, 1, problem.pse_type, buffer);
    for (int64_t c = 0; c < count; ++c) buffer[c] = value;
    return buffer;
  }
  const float* bias = as_floats(problem.pse, at, count, problem.pse_type, buffer);
  if (count % kLanes == 0 || bias == buffer) return bias;
  __builtin_memcpy(buffer, bias, static_cast<size_t>(count) * sizeof(float));
  return buffer;
}

// Whether all rows of a head have the same bias.
FA_INLINE bool rows_share_bias(const Problem& problem, const Sequence& sequence) {
  return problem.slopes == nullptr && !problem.pse_compressed && sequence.pse_row == 0;
}

// The scores of masked keys with this bias, if `cpu_masked_bias` is set.
FA_INLINE Vec masked_scores(const Problem& problem, Vec bias) {
  return bias * (problem.pse_inside_scale ? problem.scale : 1.0f) + problem.mask_value;
}

// An upper bound of these scores for row i, computed over all keys. NaN if the bias contains a NaN. `buffer` has room for
// kKeys floats.
template <int64_t kKeys>
static float masked_score_bound(const Problem& problem, const Sequence& sequence, int64_t head, int64_t i, float* buffer) {
  Vec largest = splat(-kInfinity);
  IntVec undefined{};
  for (int64_t first = 0; first < sequence.key_length; first += kKeys) {
    const int64_t keys = smaller(kKeys, sequence.key_length - first);
    const float* bias = bias_row(problem, sequence, head, i, first, keys, buffer);
    for (int64_t c = 0; c < keys; c += kLanes) {
      const IntVec inside = first_lanes(keys - c);
      const Vec score = inside ? masked_scores(problem, load(bias + c)) : splat(-kInfinity);
      undefined |= score != score;
      largest = maximum(score, largest);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (undefined[lane] != 0) return __builtin_nanf("");
  }
  return max_lanes(largest);
}

}  // namespace fa::FA_ISA
