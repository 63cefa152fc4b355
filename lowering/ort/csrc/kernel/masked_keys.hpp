// Masked keys that have a score all the same: the operator extension `cpu_mask_value`.
//
// They are added at the end, as one more block of the online softmax: the sum of their weights and of their values,
// unless `cpu_masked_values` takes those for 0. All of them have one score, or one and their bias (`cpu_masked_bias`).
// Beside a row's largest score they mostly vanish, and then no value is read.
#pragma once

#include "bias.hpp"
#include "overflow.hpp"
#include "dropout.hpp"
#include "online_softmax.hpp"

namespace fa::FA_ISA {

// exp(-x) is 0 in float32 from here on: below half of the smallest number, 2^-149.
inline constexpr float kVanishes = 104.0f;

FA_INLINE bool is_attended(const View& view, int64_t j) {
  return j >= view.begin && j < view.end && (view.mask == nullptr || view.mask[j] == 0);
}

static bool attends_all(const Span& span, int64_t r) {
  const int64_t length = span.sequence.key_length;
  for (int64_t first = 0; first < length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, length - first);
    const View view = view_of(span.problem, span.sequence, span.head_of(r), span.index_of(r), first, keys);
    for (int64_t j = 0; j < keys; ++j) {
      if (!is_attended(view, j)) return false;
    }
  }
  return true;
}

// mask_value, and the key's bias where the extension `cpu_masked_bias` adds it; else `bias` is null.
FA_INLINE float excluded_score(const Problem& problem, const float* bias, int64_t j) {
  if (bias == nullptr) return problem.mask_value;
  return problem.mask_value + (problem.pse_inside_scale ? bias[j] * problem.scale : bias[j]);
}

FA_INLINE const float* excluded_bias(const Span& span, int64_t r, int64_t first, int64_t keys) {
  if (!span.problem.masked_bias) return nullptr;
  return bias_row(span.problem, span.sequence, span.head_of(r), span.index_of(r), first, keys, span.s.rows);
}

// No key of the row has a larger excluded score than this, attended ones included. NaN where the bias holds a NaN.
static float excluded_bound(const Span& span, int64_t r) {
  const Problem& problem = span.problem;
  const float factor = problem.pse_inside_scale ? problem.scale : 1.0f;
  Vec largest = splat(-kInfinity);
  IntVec undefined{};
  for (int64_t first = 0; first < span.sequence.key_length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, span.sequence.key_length - first);
    const float* bias = excluded_bias(span, r, first, keys);
    for (int64_t c = 0; c < keys; c += kLanes) {
      const IntVec inside = first_lanes(keys - c);
      const Vec score = inside ? load(bias + c) * factor + problem.mask_value : splat(-kInfinity);
      undefined |= score != score;
      largest = greater(score, largest);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (undefined[lane] != 0) return __builtin_nanf("");
  }
  return max_lanes(largest);
}

// The largest score of the keys the row does not attend; NaN where one of them is NaN.
static float excluded_peak(const Span& span, int64_t r) {
  float peak = -kInfinity;
  for (int64_t first = 0; first < span.sequence.key_length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, span.sequence.key_length - first);
    const View view = view_of(span.problem, span.sequence, span.head_of(r), span.index_of(r), first, keys);
    const float* bias = excluded_bias(span, r, first, keys);
    for (int64_t j = 0; j < keys; ++j) {
      if (is_attended(view, j)) continue;
      const float score = excluded_score(span.problem, bias, j);
      if (is_nan(score)) return score;
      if (score > peak) peak = score;
    }
  }
  return peak;
}

// The weights of a block of keys relative to the row's largest score; 0 for keys that are attended.
FA_INLINE void excluded_weights(const Span& span, int64_t r, int64_t first, int64_t keys, float* weights) {
  const View view = view_of(span.problem, span.sequence, span.head_of(r), span.index_of(r), first, keys);
  const float* bias = excluded_bias(span, r, first, keys);
  const float all = exp_nonpositive(splat(excluded_score(span.problem, nullptr, 0) - span.s.max[r]))[0];
  for (int64_t j = 0; j < keys; ++j) {
    const float weight =
        bias == nullptr ? all : exp_nonpositive(splat(excluded_score(span.problem, bias, j) - span.s.max[r]))[0];
    weights[j] = is_attended(view, j) ? 0.0f : weight;
  }
}

static void add_excluded_row(const Span& span, int64_t r) {
  const Problem& problem = span.problem;
  const int64_t length = span.sequence.key_length;
  const int64_t bit = drop_bit(span.sequence, span.head_of(r), span.index_of(r));
  float* sums = span.s.sums + r * span.columns();
  for (int64_t first = 0; first < length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, length - first);
    // Reading a value of 16 bits may take the place of the bias, so all weights come first.
    float weights[kBlockKeys];
    excluded_weights(span, r, first, keys, weights);
    float sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      sum += weights[j];
      if (!problem.masked_values || weights[j] == 0) continue;
      const int64_t key = first + j;
      if (problem.drop_mask != nullptr && (bits_from(problem.drop_mask, bit + key, 1) & 1) == 0) continue;
      const float* value = span.value(key);
      for (int64_t d = 0; d < problem.value_size; ++d) sums[d] += weights[j] * (value[d] * span.s.unit[r]);
    }
    span.s.total[r] += sum;
  }
}

static void add_excluded(const Span& span) {
  const Scratch& s = span.s;
  const Problem& problem = span.problem;
  if (problem.mask_value == -kInfinity && !problem.masked_bias) return;
  const int64_t columns = span.columns();
  const bool rows_share = problem.slopes == nullptr && !problem.pse_compressed && span.sequence.pse_row == 0;
  float bound = problem.mask_value;
  int64_t bound_head = -1;  // the head that the bound was made for
  for (int64_t r = 0; r < span.rows(); ++r) {
    // NaN or exp(inf - inf): so far only a row that attends a key has come to it, this one may have its sink alone.
    if (problem.sink != nullptr && !(problem.sink[span.head_of(r)] < kInfinity)) s.total[r] = __builtin_nanf("");
    if (is_nan(s.total[r])) continue;
    if (problem.masked_bias && !(rows_share && span.head_of(r) == bound_head)) {
      bound = excluded_bound(span, r);
      bound_head = span.head_of(r);
    }
    if (s.max[r] - bound > kVanishes || attends_all(span, r)) continue;
    const float peak = problem.masked_bias ? excluded_peak(span, r) : bound;
    if (is_nan(peak) || peak == kInfinity) s.total[r] = __builtin_nanf("");
    if (peak == kInfinity) s.max[r] = peak;
    // Where all scores are -inf, nothing is left behind.
    if (is_nan(s.total[r]) || peak == -kInfinity || s.max[r] - peak > kVanishes) continue;
    const float max = s.max[r] > peak ? s.max[r] : peak;
    // A row that attends no key has nothing to shrink.
    const float shrink = s.max[r] == -kInfinity ? 0.0f : exp_nonpositive(splat(s.max[r] - max))[0];
    s.max[r] = max;
    s.total[r] *= shrink;
    for (int64_t d = 0; d < columns; ++d) s.sums[r * columns + d] *= shrink;
    if (exp_nonpositive(splat(peak - max))[0] == 0) continue;
    float* sums = s.sums + r * columns;
    const size_t bytes = static_cast<size_t>(columns) * sizeof(float);
    const float total = s.total[r];
    __builtin_memcpy(s.kept, sums, bytes);
    add_excluded_row(span, r);
    const float unit = unit_for(span.sequence.key_length);
    if (s.unit[r] == unit || !overflowed(span, r, sums, 1)) continue;
    for (int64_t d = 0; d < columns; ++d) sums[d] = s.kept[d] * unit;
    s.unit[r] = unit;
    s.total[r] = total;
    add_excluded_row(span, r);
  }
}

}  // namespace fa::FA_ISA
