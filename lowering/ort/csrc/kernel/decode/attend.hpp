// One step of decoding: the query heads of a task attend some tokens of its key heads.
#pragma once

#include "output.hpp"
#include "state.hpp"
#include "../softcap.hpp"

namespace fa::FA_ISA {

// The memory of one worker.
struct DecodeScratch {
  float* queries;    // [rows of a task][columns]
  float* constants;  // [rows of a task]: what the offset of quantised keys adds to each product
  float* scores;     // [rows of a task][tokens], later the weights in their place
  float* bias;       // [tokens]
  float* row;        // [columns]
  uint8_t* hidden;   // [tokens]

  // `tokens`: DecodePlan::token_stride().
  static size_t bytes(int64_t rows, int64_t tokens, int64_t columns) {
    return 64 + sizeof(float) * static_cast<size_t>(rows * (columns + 1) + (rows + 1) * tokens + columns) +
           static_cast<size_t>(tokens);
  }
  DecodeScratch(void* memory, int64_t rows, int64_t tokens, int64_t columns) {
    const auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    scores = reinterpret_cast<float*>(address);
    queries = scores + rows * tokens;
    row = queries + rows * columns;
    bias = row + columns;
    constants = bias + tokens;
    hidden = reinterpret_cast<uint8_t*>(constants + rows);
  }
};

// The tokens [first, first + count) of a step.
struct DecodeStep {
  int64_t first;
  int64_t count;
  const uint8_t* hidden;  // [count], not 0 where the token is masked; null if none is
  bool masks_score;       // masked tokens have the score kMaskedScore; otherwise they are left out
};

// What a task works on.
struct DecodeTask {
  const Decode& d;
  const DecodeEntry& entry;
  int64_t first;    // its first key head
  int64_t count;    // key heads
  int64_t rows;     // query heads of a key head
  int64_t end;      // of the tokens of the task
  int64_t columns;  // floats of a row of sums or queries: whole vectors
  const float* queries;
  const float* constants;
  float* scores;
  int64_t score_stride;
  float* states;
  int64_t state_floats;
  float overflow_scale;  // a factor of the values: 1, or less where their sums would overflow

  int64_t head(int64_t n, int64_t r) const { return (first + n) * rows + r; }
  SoftmaxState state(int64_t n) const { return SoftmaxState(states + n * state_floats, rows); }
  float* scores_of(int64_t n, int64_t r) const { return scores + (n * rows + r) * score_stride; }
  int64_t at(int64_t n, int64_t token) const { return row_of(d, entry, token) + (first + n) * entry.head_stride; }

  // How many tokens from `token` on, below `end`, are contiguous in memory.
  int64_t contiguous(int64_t token, int64_t end) const {
    return d.block_size == 0 ? end - token : smaller(end - token, d.block_size - token % d.block_size);
  }
};

// The keys or values of the task's key head n from `token` on.
template <class Stored>
FA_INLINE StoredRows<Stored> rows_at(const DecodeTask& h, const void* data, int64_t n, int64_t token) {
  return {static_cast<const typename Stored::Number*>(data) + h.at(n, token), h.d.row_stride};
}

// A head's rows that follow each other in a page are a run. While a short run is read, the products prefetch a later one,
// about this many bytes ahead in the order of reading. The hardware prefetcher is too slow there: when the head changes, its
// queries and sums have left the first-level cache, and their loads wait for those from memory. Measured on Zen 4 with pages
// of 16 tokens and numbers of 16 bits: without these prefetches, a step takes a quarter to a half longer.
//
// All lines are prefetched by software then, at two thirds of the speed of the hardware prefetcher. So runs are long where
// the products leave the hardware prefetcher more time.
inline constexpr int64_t kPagedAheadBytes = 8 << 10;
FA_INLINE int64_t longest_short_run(int64_t rows) { return rows > 2 ? 32 << 10 : rows == 2 ? 4 << 10 : 0; }

// Whether the products prefetch from page to page (kPaged). They always do where the heads alternate from row to row, because
// each head's rows lie apart.
FA_INLINE bool prefetches_pages(const Decode& d) {
  if (d.block_size == 0) return false;
  return d.row_stride != d.size || d.block_size * d.size * bytes_of(d.cell) <= longest_short_run(d.group());
}

// The rows of the task's heads from `token` on, up to the end of a page. After the last head, those of `next_data` from
// `next_token` on are read.
struct PagedRuns {
  const void* data;
  int64_t token;
  const void* next_data;
  int64_t next_token;
};

// How many numbers after the run of key head n the run is that is prefetched meanwhile. If the heads alternate from row to
// row, it is the same head's run kPrefetchDistance tokens later. After the last run, the next line is prefetched, which does
// no harm.
template <class Stored>
FA_INLINE int64_t prefetched_run(const DecodeTask& h, const PagedRuns& runs, int64_t n) {
  constexpr int64_t kNumber = sizeof(typename Stored::Number);
  const auto address = [&](const void* data, int64_t head, int64_t token) {
    return reinterpret_cast<intptr_t>(rows_at<Stored>(h, data, head, token).data);
  };
  const auto distance = [&](const void* data, int64_t head, int64_t token) {
    if (token >= h.end) return kCacheLine / kNumber;
    return (address(data, head, token) - address(runs.data, n, runs.token)) / kNumber;
  };
  if (h.d.row_stride != h.d.size) return distance(runs.data, n, runs.token + kPrefetchDistance);
  const int64_t head = n + smaller(h.count, larger(1, kPagedAheadBytes / (h.d.block_size * h.d.size * kNumber)));
  if (head < h.count) return distance(runs.data, head, runs.token);
  return distance(runs.next_data, head - h.count, runs.next_token);
}

// What is prefetched of the next run of rows: the hardware prefetcher does not foresee where it begins. Measured: 4096 is no
// better.
inline constexpr int64_t kPrefetchRunBytes = 1024;

// Prefetches the first keys or values from `token` on. Where the rows of one head are not contiguous, the products prefetch
// themselves.
template <class Stored>
FA_INLINE void prefetch_run(const DecodeTask& h, const void* data, int64_t token) {
  if (Stored::kPaged || token >= h.end || h.d.row_stride != h.d.size) return;
  const int64_t bytes = h.contiguous(token, h.end) * h.d.size * static_cast<int64_t>(sizeof(typename Stored::Number));
  prefetch_lines(reinterpret_cast<const char*>(rows_at<Stored>(h, data, 0, token).data), smaller(kPrefetchRunBytes, bytes));
}

// Adds what the offsets of quantised keys add to each product.
FA_INLINE void add_key_offsets(const DecodeTask& h, const DecodeStep& t) {
  if (h.d.key_offset == nullptr) return;
  for (int64_t r = 0; r < h.count * h.rows; ++r) {
    float* scores = h.scores_of(0, r);
    for (int64_t j = 0; j < t.count; ++j) scores[j] += h.constants[r];
  }
}

// The products of all rows of the task with the tokens of a step: scores [rows][token_stride].
template <class Stored>
[[gnu::noinline]] static void multiply_keys(const DecodeTask& h, const DecodeStep& t) {
  for (int64_t j = 0; j < t.count;) {
    const int64_t count = h.contiguous(t.first + j, t.first + t.count);
    const bool last = j + count == t.count;
    const PagedRuns runs{h.entry.key, t.first + j, last ? h.entry.value : h.entry.key, last ? t.first : t.first + j + count};
    for (int64_t n = 0; n < h.count; ++n) {
      if (n + 1 == h.count) prefetch_run<Stored>(h, runs.next_data, runs.next_token);
      StoredRows<Stored> keys = rows_at<Stored>(h, runs.data, n, runs.token);
      if constexpr (Stored::kPaged) keys.ahead = prefetched_run<Stored>(h, runs, n);
      for (int64_t r = 0; r < h.rows; r += kSkinnyRows) {
        skinny_scores(smaller(kSkinnyRows, h.rows - r), {h.queries + (n * h.rows + r) * h.columns, h.columns}, keys, count,
                      h.d.size, h.scores_of(n, r) + j, h.score_stride);
      }
    }
    j += count;
  }
  add_key_offsets(h, t);
}

// Caps the products of a step. (noinline: so that a step without a cap is compiled as if there were none)
[[gnu::noinline]] static void cap_products(const DecodeTask& h, const DecodeStep& t) {
  const Softcap softcap(h.d.softcap, h.d.scale);
  for (int64_t r = 0; r < h.count * h.rows; ++r) softcap.row(h.scores_of(0, r), t.count);
}

FA_INLINE float remaining_scale(const Decode& d) { return remaining_scale(d.softcap, d.scale); }

FA_INLINE void add_block_sum(const DecodeTask& h, const SoftmaxState& state, int64_t r, float new_max, float sum) {
  if (new_max != state.max[r]) state.rescale(r, new_max, h.columns);
  state.sum[r] += sum;
}

// Products of row r of key head n become weights relative to the largest score so far. Some tokens are masked or have a
// bias.
FA_INLINE void softmax_row(const DecodeTask& h, const DecodeStep& t, const DecodeScratch& s, int64_t n, int64_t r) {
  const SoftmaxState state = h.state(n);
  float* scores = h.scores_of(n, r);
  float new_max = state.max[r];
  if (h.d.pse != nullptr) {
    const int64_t at = h.entry.pse + h.head(n, r) * h.d.pse_head + t.first;
    const float* bias = as_floats(h.d.pse, at, t.count, type_of(h.d.pse_cell), s.bias);
    if (bias != s.bias) __builtin_memcpy(s.bias, bias, static_cast<size_t>(t.count) * sizeof(float));
  }
  float sum;
  if (t.masks_score) {
    for (int64_t j = 0; j < t.count; ++j) {
      const float score = scores[j] * remaining_scale(h.d) + (h.d.pse == nullptr ? 0.0f : s.bias[j]);
      scores[j] = t.hidden != nullptr && t.hidden[j] != 0 ? kMaskedScore : score;
    }
    sum = online_softmax<false, false>(scores, t.count, 1.0f, nullptr, false, nullptr, new_max);
  } else if (h.d.pse == nullptr) {
    sum = online_softmax<false, true>(scores, t.count, remaining_scale(h.d), nullptr, false, t.hidden, new_max);
  } else if (t.hidden == nullptr) {
    sum = online_softmax<true, false>(scores, t.count, remaining_scale(h.d), s.bias, false, nullptr, new_max);
  } else {
    sum = online_softmax<true, true>(scores, t.count, remaining_scale(h.d), s.bias, false, t.hidden, new_max);
  }
  add_block_sum(h, state, r, new_max, sum);
}

// The same for all rows without mask and bias. The maxima of some rows are computed first: reducing the lanes of a vector
// takes long, and the rows do not wait for each other.
FA_INLINE void softmax_rows_unmasked(const DecodeTask& h, const DecodeStep& t, int64_t n) {
  const SoftmaxState state = h.state(n);
  for (int64_t first = 0; first < h.rows; first += kSkinnyRows) {
    const int64_t rows = smaller(kSkinnyRows, h.rows - first);
    float largest[kSkinnyRows];
    for (int64_t r = 0; r < rows; ++r) largest[r] = largest_of(h.scores_of(n, first + r), t.count);
    for (int64_t r = 0; r < rows; ++r) {
      float new_max = state.max[first + r];
      const float sum = online_softmax_given_max(largest[r], h.scores_of(n, first + r), t.count, remaining_scale(h.d), new_max);
      add_block_sum(h, state, first + r, new_max, sum);
    }
  }
}

// Scores of a step become weights, and the states are rescaled. (noinline: so that it is compiled once, not for each type)
[[gnu::noinline]] static void softmax_step(const DecodeTask& h, const DecodeStep& t, const DecodeScratch& s) {
  const bool plain = h.d.pse == nullptr && t.hidden == nullptr && !t.masks_score;
  for (int64_t n = 0; n < h.count; ++n) {
    if (plain) {
      softmax_rows_unmasked(h, t, n);
    } else {
      for (int64_t r = 0; r < h.rows; ++r) softmax_row(h, t, s, n, r);
    }
  }
}

// A weight must not become 0: it may be multiplied with an infinity.
FA_INLINE void downscale_weights(const DecodeTask& h, const DecodeStep& t) {
  constexpr float kSmallest = 0x1p-126f;
  for (int64_t r = 0; r < h.count * h.rows; ++r) {
    float* weights = h.scores_of(0, r);
    for (int64_t j = 0; j < t.count; ++j) {
      const float weight = weights[j] * h.overflow_scale;
      if (weights[j] > 0) weights[j] = weight > kSmallest ? weight : kSmallest;
    }
  }
}

// Adds the values of tokens [begin, end) of the step.
template <class Stored>
static void add_values(const DecodeTask& h, const DecodeStep& t, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end;) {
    const int64_t count = h.contiguous(t.first + j, t.first + end);
    const bool last = j + count == t.count;
    const PagedRuns runs{h.entry.value, t.first + j, last ? h.entry.key : h.entry.value, t.first + j + count};
    for (int64_t n = 0; n < h.count; ++n) {
      if (n + 1 == h.count) prefetch_run<Stored>(h, runs.next_data, runs.next_token);
      StoredRows<Stored> values = rows_at<Stored>(h, runs.data, n, runs.token);
      if constexpr (Stored::kPaged) values.ahead = prefetched_run<Stored>(h, runs, n);
      for (int64_t r = 0; r < h.rows; r += kSkinnyRows) {
        skinny_values(smaller(kSkinnyRows, h.rows - r), h.scores_of(n, r) + j, h.score_stride, values, count, h.d.size,
                      h.state(n).sums + r * h.columns, h.columns);
      }
    }
    j += count;
  }
}

// The same token by token. Where masked tokens have a score, the values of those without weight are still not read.
template <class Stored>
static void add_weighted_values(const DecodeTask& h, const DecodeStep& t) {
  for (int64_t j = 0; j < t.count; ++j) {
    for (int64_t n = 0; n < h.count; ++n) {
      const StoredRows<Stored> value = rows_at<Stored>(h, h.entry.value, n, t.first + j);
      for (int64_t r = 0; r < h.rows; ++r) {
        const float* weight = h.scores_of(n, r) + j;
        if (t.hidden != nullptr && t.hidden[j] != 0 && *weight == 0) continue;
        skinny_values(1, weight, h.score_stride, value, 1, h.d.size, h.state(n).sums + r * h.columns, h.columns);
      }
    }
  }
}

// One step: products, soft cap, online softmax, weighted values.
template <class Keys, class Values>
[[gnu::noinline]] static void attend_step(const DecodeTask& h, const DecodeStep& t, const DecodeScratch& s) {
  multiply_keys<Keys>(h, t);
  if (h.d.softcap != 0) cap_products(h, t);
  softmax_step(h, t, s);
  if (h.overflow_scale != 1.0f) downscale_weights(h, t);
  if (t.masks_score) {
    add_weighted_values<Values>(h, t);
    return;
  }
  for (int64_t j = 0; j < t.count;) {
    int64_t end = t.hidden == nullptr ? t.count : j;
    while (end < t.count && t.hidden[end] == 0) ++end;
    add_values<Values>(h, t, j, end);
    j = end;
    while (j < t.count && t.hidden[j] != 0) ++j;
  }
}

}  // namespace fa::FA_ISA
