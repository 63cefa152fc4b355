// The online softmax of one row and one block: scores become exp(score - max), where max is the largest score so far.
#pragma once

#include "exp.hpp"

namespace fa::FA_ISA {

// The number that is subtracted from the scores of a row: their maximum, or 0 while all of them are -inf, because -inf - -inf
// would be NaN.
FA_INLINE float softmax_origin(float max) { return max == -kInfinity ? 0.0f : max; }

// A sum of values may overflow although their mean does not. It is then computed again with values times this power of two:
// no sum of this many values, with weights of at most 1, overflows. Nothing is lost but digits of the smallest floats.
FA_INLINE float overflow_scale_for(int64_t keys) {
  float overflow_scale = 0.5f;
  for (; keys > 0; keys /= 2) overflow_scale *= 0.5f;
  return overflow_scale;
}

// Turns `count` scores into exp(score * scale - origin) in place and returns their sum. Whole vectors are read and written;
// the numbers beyond `count` become 0.
FA_INLINE float exponentials(float* scores, int64_t count, float scale, float origin) {
  const Vec shift = splat(origin);
  Vec sum{};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    const Vec p = exp_nonpositive(load(scores + c) * scale - shift);
    store(scores + c, p);
    sum += p;
  }
  if (c < count) {
    const Vec p = clear_where(~first_lanes(count - c), exp_nonpositive(load(scores + c) * scale - shift));
    store(scores + c, p);
    sum += p;
  }
  return sum_lanes(sum);
}

// Turns `count` products q . k of a row into probabilities in place and returns their sum. `max` is the largest score of the
// earlier blocks; it becomes the largest score so far, which the probabilities are relative to. `bias` holds `count` floats,
// `hidden` holds `count` bytes, not 0 where the key is masked; both may be read as whole vectors.
//
// Scores are not multiplied by log2(e): a bias of -FLT_MAX would overflow.
template <bool kBias, bool kHidden>
FA_INLINE float online_softmax(float* scores, int64_t count, float scale, const float* bias, bool bias_inside,
                               const uint8_t* hidden, float& max) {
  const float before = bias_inside ? 1.0f : scale;
  const float after = bias_inside ? scale : 1.0f;
  const Vec minus_infinity = splat(-kInfinity);
  const auto score = [&](int64_t c) {
    Vec s = load(scores + c);
    if constexpr (kBias) {
      s = (s * before + load(bias + c)) * after;
    } else {
      s = s * scale;
    }
    if constexpr (kHidden) s = nonzero_bytes(hidden + c) ? minus_infinity : s;
    return s;
  };
  Vec largest = splat(max);
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    const Vec s = score(c);
    store(scores + c, s);
    largest = maximum(s, largest);
  }
  if (c < count) {
    const Vec s = first_lanes(count - c) ? score(c) : minus_infinity;
    store(scores + c, s);
    largest = maximum(s, largest);
  }
  max = max_lanes(largest);
  return exponentials(scores, count, 1.0f, softmax_origin(max));
}

// With one fused multiply-add, score * scale - max is not exactly 0 at the largest score; it is off by up to half a unit in
// the last place of max. All probabilities of the row then have the same wrong factor. It cancels in the output but shows in
// softmax_sum. Below this bound it differs from 1 by at most 1e-6.
inline constexpr float kLargestFusedScore = 32.0f;

// The largest of `count` products. Whole vectors are read.
FA_INLINE float largest_of(const float* products, int64_t count) {
  Vec largest = splat(-kInfinity);
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) largest = maximum(load(products + c), largest);
  if (c < count) {
    largest = maximum(first_lanes(count - c) ? load(products + c) : splat(-kInfinity), largest);
  }
  return max_lanes(largest);
}

// online_softmax without bias and mask, for a row whose largest product is known. If the scale is positive, the largest
// product is the largest score, and the scale moves into the exponential.
FA_INLINE float online_softmax_given_max(float largest, float* scores, int64_t count, float scale, float& max) {
  const float top = largest * scale;
  if (!(scale > 0) || !(top < kLargestFusedScore && top > -kLargestFusedScore)) {
    return online_softmax<false, false>(scores, count, scale, nullptr, false, nullptr, max);
  }
  max = top > max ? top : max;
  return exponentials(scores, count, scale, softmax_origin(max));
}

FA_INLINE float online_softmax_unmasked(float* scores, int64_t count, float scale, float& max) {
  return online_softmax_given_max(largest_of(scores, count), scores, count, scale, max);
}

}  // namespace fa::FA_ISA
