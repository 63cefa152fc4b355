// One row of one block in the online softmax: scores in, exp(score - largest so far) out.
#pragma once

#include "exp.hpp"

namespace fa::FA_ISA {

// While every score was -inf the row has no largest one; any finite number then makes exp(-inf) = 0.
FA_INLINE float exp_origin(float max) { return max == -kInfinity ? 0.0f : max; }

// A sum of values may overflow although their mean does not. It is made again then, of values times a power of two: no sum of
// so many, with weights of at most 1, overflows in this unit, and nothing is lost but beside the smallest floats.
FA_INLINE float unit_for(int64_t keys) {
  float unit = 0.5f;
  for (; keys > 0; keys /= 2) unit *= 0.5f;
  return unit;
}

// Turns `count` scores into exp(score * scale - origin) in place and gives their sum. Whole vectors are read and
// written; what lies beyond `count` becomes 0.
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

// Turns `count` products q . k into probabilities in place, relative to the largest score so far, which `max` becomes;
// gives their sum. `bias` holds `count` floats and `hidden` `count` bytes, not 0 where the key is not attended, both
// with room for a whole vector. Scores stay in natural units: a bias of -FLT_MAX times log2(e) would overflow.
template <bool kBias, bool kHidden>
FA_INLINE float soften(float* scores, int64_t count, float scale, const float* bias, bool bias_inside,
                       const uint8_t* hidden, float& max) {
  const float before = bias_inside ? 1.0f : scale;
  const float after = bias_inside ? scale : 1.0f;
  const Vec nothing = splat(-kInfinity);
  const auto score = [&](int64_t c) {
    Vec s = load(scores + c);
    if constexpr (kBias) {
      s = (s * before + load(bias + c)) * after;
    } else {
      s = s * scale;
    }
    if constexpr (kHidden) s = nonzero_bytes(hidden + c) ? nothing : s;
    return s;
  };
  Vec largest = splat(max);
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    const Vec s = score(c);
    store(scores + c, s);
    largest = greater(s, largest);
  }
  if (c < count) {
    const Vec s = first_lanes(count - c) ? score(c) : nothing;
    store(scores + c, s);
    largest = greater(s, largest);
  }
  max = max_lanes(largest);
  return exponentials(scores, count, 1.0f, exp_origin(max));
}

// score * scale - max in one rounding differs from 0 at the largest score by up to half a unit in its last place, a
// factor common to the whole row. It cancels in the output but shows in softmax_sum; below this size it is at most 1e-6.
inline constexpr float kLargestFused = 32.0f;

FA_INLINE float largest_of(const float* products, int64_t count) {
  Vec largest = splat(-kInfinity);
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) largest = greater(load(products + c), largest);
  if (c < count) {
    largest = greater(first_lanes(count - c) ? load(products + c) : splat(-kInfinity), largest);
  }
  return max_lanes(largest);
}

// The same without bias or mask: where the scale is positive, the largest product is the largest score, and the scale
// goes into the exponential.
FA_INLINE float soften_below(float largest, float* scores, int64_t count, float scale, float& max) {
  const float top = largest * scale;
  if (!(scale > 0) || !(top < kLargestFused && top > -kLargestFused)) {
    return soften<false, false>(scores, count, scale, nullptr, false, nullptr, max);
  }
  max = top > max ? top : max;
  return exponentials(scores, count, scale, exp_origin(max));
}

FA_INLINE float soften_plain(float* scores, int64_t count, float scale, float& max) {
  return soften_below(largest_of(scores, count), scores, count, scale, max);
}

}  // namespace fa::FA_ISA
