// One step of decoding: some tokens of the key heads of a task, and the query heads that read them.
#pragma once

#include "output.hpp"
#include "state.hpp"

namespace fa::FA_ISA {

// The memory of one worker.
struct DecodeScratch {
  float* queries;    // [rows of a task][columns]
  float* constants;  // [rows of a task]: what the offset of quantised keys adds to each product
  float* scores;     // [rows of a task][tokens], then the weights in their place
  float* bias;       // [tokens]
  float* row;        // [columns]
  uint8_t* hidden;   // [tokens]

  // `tokens`: Plan's token_row.
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

// The tokens of a step: [first, first + count), those with a byte of `hidden` that is not 0 being masked.
struct Tokens {
  int64_t first;
  int64_t count;
  const uint8_t* hidden;  // null: none
  bool filled;            // masked tokens have the score kMaskedScore; else they are left out
};

// What a task works on.
struct Heads {
  const Decode& d;
  const DecodeEntry& entry;
  int64_t first;    // key head
  int64_t count;    // of key heads
  int64_t rows;     // query heads of a key head
  int64_t end;      // of the tokens of the task
  int64_t columns;  // of a row of sums and queries: whole vectors
  const float* queries;
  const float* constants;
  float* scores;
  int64_t score_row;
  float* states;
  int64_t state_floats;
  float unit;       // of the sums of values: 1, or less where they would overflow

  int64_t head(int64_t n, int64_t r) const { return (first + n) * rows + r; }
  State state(int64_t n) const { return State(states + n * state_floats, rows); }
  float* scores_of(int64_t n, int64_t r) const { return scores + (n * rows + r) * score_row; }
  int64_t at(int64_t n, int64_t token) const { return row_of(d, entry, token) + (first + n) * entry.head_stride; }

  // Tokens from `token` on, below `end`, that lie one row after the other.
  int64_t together(int64_t token, int64_t end) const {
    return d.block_size == 0 ? end - token : smaller(end - token, d.block_size - token % d.block_size);
  }
};

// Keys or values of head n of the task from `token` on.
template <class Stored>
FA_INLINE StoredRows<Stored> rows_at(const Heads& h, const void* data, int64_t n, int64_t token) {
  return {static_cast<const typename Stored::Number*>(data) + h.at(n, token), h.d.row_stride};
}

// Bytes asked for of what is read when a run of rows has ended: the processor does not foresee it. 4096 are no better.
inline constexpr int64_t kRunAhead = 1024;

// Asks for the first keys or values from `token` on, where there are some. Between rows of other heads the products ask
// for themselves.
template <class Stored>
FA_INLINE void ask_for_run(const Heads& h, const void* data, int64_t token) {
  if (token >= h.end || h.d.row_stride != h.d.size) return;
  const int64_t bytes = h.together(token, h.end) * h.d.size * static_cast<int64_t>(sizeof(typename Stored::Number));
  ask_for_lines(reinterpret_cast<const char*>(rows_at<Stored>(h, data, 0, token).data), smaller(kRunAhead, bytes));
}

template <class Stored>
static void score_tokens(const Heads& h, const Tokens& t) {
  for (int64_t j = 0; j < t.count;) {
    const int64_t count = h.together(t.first + j, t.first + t.count);
    const bool last = j + count == t.count;
    for (int64_t n = 0; n < h.count; ++n) {
      if (n + 1 == h.count) {
        ask_for_run<Stored>(h, last ? h.entry.value : h.entry.key, last ? t.first : t.first + j + count);
      }
      const StoredRows<Stored> keys = rows_at<Stored>(h, h.entry.key, n, t.first + j);
      for (int64_t r = 0; r < h.rows; r += kDirectRows) {
        direct_scores(smaller(kDirectRows, h.rows - r), {h.queries + (n * h.rows + r) * h.columns, h.columns}, keys, count,
                      h.d.size, h.scores_of(n, r) + j, h.score_row);
      }
    }
    j += count;
  }
  if (h.d.key_offset == nullptr) return;
  for (int64_t r = 0; r < h.count * h.rows; ++r) {
    float* scores = h.scores_of(0, r);
    for (int64_t j = 0; j < t.count; ++j) scores[j] += h.constants[r];
  }
}

FA_INLINE void add_total(const Heads& h, const State& state, int64_t r, float top, float sum) {
  if (top != state.max[r]) state.raise(r, top, h.columns);
  state.total[r] += sum;
}

// Products of row r of head n to weights relative to the largest score so far, where some are masked or have a bias.
FA_INLINE void soften_row(const Heads& h, const Tokens& t, const DecodeScratch& s, int64_t n, int64_t r) {
  const State state = h.state(n);
  float* scores = h.scores_of(n, r);
  float top = state.max[r];
  if (h.d.pse != nullptr) {
    const int64_t at = h.entry.pse + h.head(n, r) * h.d.pse_head + t.first;
    const float* bias = as_floats(h.d.pse, at, t.count, type_of(h.d.pse_cell), s.bias);
    if (bias != s.bias) __builtin_memcpy(s.bias, bias, static_cast<size_t>(t.count) * sizeof(float));
  }
  float sum;
  if (t.filled) {
    for (int64_t j = 0; j < t.count; ++j) {
      const float score = scores[j] * h.d.scale + (h.d.pse == nullptr ? 0.0f : s.bias[j]);
      scores[j] = t.hidden != nullptr && t.hidden[j] != 0 ? kMaskedScore : score;
    }
    sum = soften<false, false>(scores, t.count, 1.0f, nullptr, false, nullptr, top);
  } else if (h.d.pse == nullptr) {
    sum = soften<false, true>(scores, t.count, h.d.scale, nullptr, false, t.hidden, top);
  } else if (t.hidden == nullptr) {
    sum = soften<true, false>(scores, t.count, h.d.scale, s.bias, false, nullptr, top);
  } else {
    sum = soften<true, true>(scores, t.count, h.d.scale, s.bias, false, t.hidden, top);
  }
  add_total(h, state, r, top, sum);
}

// The largest products of some rows come first: comparing the lanes of one takes long, and the others need not wait.
FA_INLINE void soften_rows_plainly(const Heads& h, const Tokens& t, int64_t n) {
  const State state = h.state(n);
  for (int64_t first = 0; first < h.rows; first += kDirectRows) {
    const int64_t rows = smaller(kDirectRows, h.rows - first);
    float largest[kDirectRows];
    for (int64_t r = 0; r < rows; ++r) largest[r] = largest_of(h.scores_of(n, first + r), t.count);
    for (int64_t r = 0; r < rows; ++r) {
      float top = state.max[first + r];
      const float sum = soften_below(largest[r], h.scores_of(n, first + r), t.count, h.d.scale, top);
      add_total(h, state, first + r, top, sum);
    }
  }
}

FA_INLINE void soften_tokens(const Heads& h, const Tokens& t, const DecodeScratch& s) {
  const bool plain = h.d.pse == nullptr && t.hidden == nullptr && !t.filled;
  for (int64_t n = 0; n < h.count; ++n) {
    if (plain) {
      soften_rows_plainly(h, t, n);
    } else {
      for (int64_t r = 0; r < h.rows; ++r) soften_row(h, t, s, n, r);
    }
  }
}

// A weight does not vanish: it may meet an infinity.
FA_INLINE void shrink_weights(const Heads& h, const Tokens& t) {
  constexpr float kSmallest = 0x1p-126f;
  for (int64_t r = 0; r < h.count * h.rows; ++r) {
    float* weights = h.scores_of(0, r);
    for (int64_t j = 0; j < t.count; ++j) {
      const float weight = weights[j] * h.unit;
      if (weights[j] > 0) weights[j] = weight > kSmallest ? weight : kSmallest;
    }
  }
}

// Adds the values of tokens [begin, end) of the step.
template <class Stored>
static void add_run(const Heads& h, const Tokens& t, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end;) {
    const int64_t count = h.together(t.first + j, t.first + end);
    for (int64_t n = 0; n < h.count; ++n) {
      if (n + 1 == h.count) {
        ask_for_run<Stored>(h, j + count == t.count ? h.entry.key : h.entry.value, t.first + j + count);
      }
      const StoredRows<Stored> values = rows_at<Stored>(h, h.entry.value, n, t.first + j);
      for (int64_t r = 0; r < h.rows; r += kDirectRows) {
        direct_values(smaller(kDirectRows, h.rows - r), h.scores_of(n, r) + j, h.score_row, values, count, h.d.size,
                      h.state(n).sums + r * h.columns, h.columns);
      }
    }
    j += count;
  }
}

// Where masked tokens have a score, those without weight are still not read.
template <class Stored>
static void add_weighted(const Heads& h, const Tokens& t) {
  for (int64_t j = 0; j < t.count; ++j) {
    for (int64_t n = 0; n < h.count; ++n) {
      const StoredRows<Stored> value = rows_at<Stored>(h, h.entry.value, n, t.first + j);
      for (int64_t r = 0; r < h.rows; ++r) {
        const float* weight = h.scores_of(n, r) + j;
        if (t.hidden != nullptr && t.hidden[j] != 0 && *weight == 0) continue;
        direct_values(1, weight, h.score_row, value, 1, h.d.size, h.state(n).sums + r * h.columns, h.columns);
      }
    }
  }
}

template <class Keys, class Values>
static void attend_tokens(const Heads& h, const Tokens& t, const DecodeScratch& s) {
  score_tokens<Keys>(h, t);
  soften_tokens(h, t, s);
  if (h.unit != 1.0f) shrink_weights(h, t);
  if (t.filled) {
    add_weighted<Values>(h, t);
    return;
  }
  for (int64_t j = 0; j < t.count;) {
    int64_t end = t.hidden == nullptr ? t.count : j;
    while (end < t.count && t.hidden[end] == 0) ++end;
    add_run<Values>(h, t, j, end);
    j = end;
    while (j < t.count && t.hidden[j] != 0) ++j;
  }
}

}  // namespace fa::FA_ISA
