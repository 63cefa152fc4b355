// Masked keys that have a score: the operator extension `cpu_mask_value`.
//
// They are added at the end, as one more block of the online softmax: their weights to the sum, and their weighted values to
// the accumulator, unless `cpu_masked_values` counts those as 0. All masked keys have the same score, or with
// `cpu_masked_bias` the same score plus their bias. Mostly their weight vanishes beside the row's largest score. It is 0
// then, and the value is not read: NaN or infinity at a masked key counts only where the key has a weight.
#pragma once

#include "bias.hpp"
#include "overflow.hpp"
#include "dropout.hpp"
#include "online_softmax.hpp"

namespace fa::FA_ISA {

// exp(-x) is 0 in float32 for larger x: it is below half of the smallest number, 2^-149.
inline constexpr float kVanishes = 104.0f;

FA_INLINE bool is_attended(const View& view, int64_t j) {
  return j >= view.begin && j < view.end && (view.mask == nullptr || view.mask[j] == 0);
}

// Whether the row attends every key of its sequence.
static bool attends_all_keys(const QueryTile& tile, int64_t r) {
  const int64_t length = tile.sequence.key_length;
  for (int64_t first = 0; first < length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, length - first);
    const View view = view_of(tile.problem, tile.sequence, tile.head_of(r), tile.index_of(r), first, keys);
    for (int64_t j = 0; j < keys; ++j) {
      if (!is_attended(view, j)) return false;
    }
  }
  return true;
}

// mask_value, plus the key's bias if `cpu_masked_bias` is set. Otherwise `bias` is null.
FA_INLINE float masked_score(const Problem& problem, const float* bias, int64_t j) {
  if (bias == nullptr) return problem.mask_value;
  return problem.mask_value + (problem.pse_inside_scale ? bias[j] * problem.scale : bias[j]);
}

FA_INLINE const float* masked_bias_row(const QueryTile& tile, int64_t r, int64_t first, int64_t keys) {
  if (!tile.problem.masked_bias) return nullptr;
  return bias_row(tile.problem, tile.sequence, tile.head_of(r), tile.index_of(r), first, keys, tile.s.row_buffer);
}

// The largest score of the keys that the row does not attend. NaN if one of them is NaN.
static float masked_score_max(const QueryTile& tile, int64_t r) {
  float masked_max = -kInfinity;
  for (int64_t first = 0; first < tile.sequence.key_length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, tile.sequence.key_length - first);
    const View view = view_of(tile.problem, tile.sequence, tile.head_of(r), tile.index_of(r), first, keys);
    const float* bias = masked_bias_row(tile, r, first, keys);
    for (int64_t j = 0; j < keys; ++j) {
      if (is_attended(view, j)) continue;
      const float score = masked_score(tile.problem, bias, j);
      if (is_nan(score)) return score;
      if (score > masked_max) masked_max = score;
    }
  }
  return masked_max;
}

// The weights of the masked keys of a block relative to the row's largest score. Attended keys get 0.
FA_INLINE void masked_weights(const QueryTile& tile, int64_t r, int64_t first, int64_t keys, float* weights) {
  const View view = view_of(tile.problem, tile.sequence, tile.head_of(r), tile.index_of(r), first, keys);
  const float* bias = masked_bias_row(tile, r, first, keys);
  const float all = exp_nonpositive(splat(masked_score(tile.problem, nullptr, 0) - tile.s.max[r]))[0];
  for (int64_t j = 0; j < keys; ++j) {
    const float weight =
        bias == nullptr ? all : exp_nonpositive(splat(masked_score(tile.problem, bias, j) - tile.s.max[r]))[0];
    weights[j] = is_attended(view, j) ? 0.0f : weight;
  }
}

// Adds the weights of the masked keys to the row's sum, and their values to its accumulator.
static void add_masked_keys_of_row(const QueryTile& tile, int64_t r) {
  const Problem& problem = tile.problem;
  const int64_t length = tile.sequence.key_length;
  const int64_t bit = drop_bit(tile.sequence, tile.head_of(r), tile.index_of(r));
  float* sums = tile.s.acc_rows + r * tile.columns();
  for (int64_t first = 0; first < length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, length - first);
    // All weights are computed before a value is read: a value of 16 bits is widened into the buffer that holds the bias.
    float weights[kBlockKeys];
    masked_weights(tile, r, first, keys, weights);
    float sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      sum += weights[j];
      if (!problem.masked_values || weights[j] == 0) continue;
      const int64_t key = first + j;
      const bool dropped = problem.drop_mask != nullptr && (bits_from(problem.drop_mask, bit + key, 1) & 1) == 0;
      const float weight = dropped ? 0.0f : weights[j];
      const float* value = tile.value(key);
      for (int64_t d = 0; d < problem.value_size; ++d) sums[d] += weight * (value[d] * tile.s.overflow_scale[r]);
    }
    tile.s.sum[r] += sum;
  }
}

// Raises the largest score of row r to `masked_max` and rescales its sums. Returns whether the masked keys have weight then.
static bool update_max(const QueryTile& tile, int64_t r, float masked_max) {
  const Scratch& s = tile.s;
  if (is_nan(masked_max) || masked_max == kInfinity) s.sum[r] = __builtin_nanf("");
  if (masked_max == kInfinity) s.max[r] = masked_max;
  // If all scores are -inf, there is nothing to add.
  if (is_nan(s.sum[r]) || masked_max == -kInfinity || s.max[r] - masked_max > kVanishes) return false;
  const float max = s.max[r] > masked_max ? s.max[r] : masked_max;
  // A row that attends no key has nothing to rescale.
  const float rescale = s.max[r] == -kInfinity ? 0.0f : exp_nonpositive(splat(s.max[r] - max))[0];
  s.max[r] = max;
  s.sum[r] *= rescale;
  for (int64_t d = 0; d < tile.columns(); ++d) s.acc_rows[r * tile.columns() + d] *= rescale;
  return exp_nonpositive(splat(masked_max - max))[0] != 0;
}

// Adds the masked keys of row r, a second time with guards if the sums overflow.
static void add_masked_keys_safely(const QueryTile& tile, int64_t r) {
  const Scratch& s = tile.s;
  const int64_t columns = tile.columns();
  float* sums = s.acc_rows + r * columns;
  const float sum = s.sum[r];
  __builtin_memcpy(s.saved_acc, sums, static_cast<size_t>(columns) * sizeof(float));
  add_masked_keys_of_row(tile, r);
  const float overflow_scale = overflow_scale_for(tile.sequence.key_length);
  if (s.overflow_scale[r] == overflow_scale || !overflowed(tile, r, sums, 1)) return;
  for (int64_t d = 0; d < columns; ++d) sums[d] = s.saved_acc[d] * overflow_scale;
  s.overflow_scale[r] = overflow_scale;
  s.sum[r] = sum;
  add_masked_keys_of_row(tile, r);
}

// Adds the masked keys of all rows that they have weight in.
static void add_masked_keys(const QueryTile& tile) {
  const Scratch& s = tile.s;
  const Problem& problem = tile.problem;
  if (problem.mask_value == -kInfinity && !problem.masked_bias) return;
  const bool shared = rows_share_bias(problem, tile.sequence);
  float bound = problem.mask_value;
  int64_t bound_head = -1;  // the head that the bound was computed for
  for (int64_t r = 0; r < tile.rows(); ++r) {
    // A sink of NaN or +inf makes the sum NaN. So far this happened only in rows that attend a key; this row may have no
    // score but its sink.
    if (problem.sink != nullptr && !(problem.sink[tile.head_of(r)] < kInfinity)) s.sum[r] = __builtin_nanf("");
    if (is_nan(s.sum[r])) continue;
    if (problem.masked_bias && !(shared && tile.head_of(r) == bound_head)) {
      bound = masked_score_bound<kBlockKeys>(problem, tile.sequence, tile.head_of(r), tile.index_of(r), s.row_buffer);
      bound_head = tile.head_of(r);
    }
    if (s.max[r] - bound > kVanishes || attends_all_keys(tile, r)) continue;
    if (update_max(tile, r, problem.masked_bias ? masked_score_max(tile, r) : bound)) add_masked_keys_safely(tile, r);
  }
}

}  // namespace fa::FA_ISA
