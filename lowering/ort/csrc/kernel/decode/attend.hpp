// One step of decoding: some tokens of one key head, and the query heads that read it.
#pragma once

#include "output.hpp"
#include "state.hpp"

namespace fa::FA_ISA {

// Floats from one row of scores to the next: an odd number of cache lines, so that rows do not share a set.
inline constexpr int64_t kTokenRow = kMostTokens + 16;

// The memory of one worker.
struct DecodeScratch {
  float* queries;    // [rows of a task][columns]
  float* constants;  // [rows of a task]: what the offset of quantised keys adds to each product
  float* scores;     // [group][kTokenRow], then the weights in their place
  float* bias;       // [kTokenRow]
  float* row;        // [columns]
  uint8_t* hidden;   // [kTokenRow]

  static size_t bytes(int64_t rows, int64_t group, int64_t columns) {
    return 64 + sizeof(float) * static_cast<size_t>(rows * (columns + 1) + group * kTokenRow + kTokenRow + columns) +
           kTokenRow;
  }
  DecodeScratch(void* memory, int64_t rows, int64_t group, int64_t columns) {
    const auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    scores = reinterpret_cast<float*>(address);
    queries = scores + group * kTokenRow;
    row = queries + rows * columns;
    bias = row + columns;
    constants = bias + kTokenRow;
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

struct Group {
  const Decode& d;
  const DecodeEntry& entry;
  int64_t key_head;
  int64_t rows;     // query heads
  int64_t end;      // of the tokens of the task
  int64_t columns;  // of a row of sums and queries: whole vectors
  const float* queries;
  const float* constants;
  State state;

  int64_t head(int64_t r) const { return key_head * rows + r; }
  int64_t at(int64_t token) const { return row_of(d, entry, token) + key_head * entry.head_stride; }

  // Tokens from `token` on, below `end`, that lie one row after the other.
  int64_t together(int64_t token, int64_t end) const {
    return d.block_size == 0 ? end - token : smaller(end - token, d.block_size - token % d.block_size);
  }
};

// Keys or values of a group from `token` on.
template <class Stored>
FA_INLINE StoredRows<Stored> rows_at(const Group& g, const void* data, int64_t token) {
  return {static_cast<const typename Stored::Number*>(data) + g.at(token), g.d.row_stride};
}

// Bytes asked for of what is read when a run of rows has ended: the processor does not foresee it. 4096 are no better.
inline constexpr int64_t kRunAhead = 1024;

// Asks for the first keys or values from `token` on, where there are some. Between rows of other heads the products ask
// for themselves.
template <class Stored>
FA_INLINE void ask_for_run(const Group& g, const void* data, int64_t token) {
  if (token >= g.end || g.d.row_stride != g.d.size) return;
  const int64_t bytes = g.together(token, g.end) * g.d.size * static_cast<int64_t>(sizeof(typename Stored::Number));
  ask_for_lines(reinterpret_cast<const char*>(rows_at<Stored>(g, data, token).data), smaller(kRunAhead, bytes));
}

template <class Stored>
static void score_tokens(const Group& g, const Tokens& t, float* scores) {
  for (int64_t j = 0; j < t.count;) {
    const int64_t count = g.together(t.first + j, t.first + t.count);
    const StoredRows<Stored> keys = rows_at<Stored>(g, g.entry.key, t.first + j);
    const bool last = j + count == t.count;
    ask_for_run<Stored>(g, last ? g.entry.value : g.entry.key, last ? t.first : t.first + j + count);
    for (int64_t r = 0; r < g.rows; r += kDirectRows) {
      direct_scores(smaller(kDirectRows, g.rows - r), {g.queries + r * g.columns, g.columns}, keys, count, g.d.size,
                    scores + r * kTokenRow + j, kTokenRow);
    }
    j += count;
  }
  if (g.d.key_offset == nullptr) return;
  for (int64_t r = 0; r < g.rows; ++r) {
    for (int64_t j = 0; j < t.count; ++j) scores[r * kTokenRow + j] += g.constants[r];
  }
}

// Products to weights relative to the largest score so far.
FA_INLINE void soften_tokens(const Group& g, const Tokens& t, const DecodeScratch& s) {
  for (int64_t r = 0; r < g.rows; ++r) {
    float* scores = s.scores + r * kTokenRow;
    float top = g.state.max[r];
    if (g.d.pse != nullptr) {
      const int64_t at = g.entry.pse + g.head(r) * g.d.pse_head + t.first;
      const float* bias = as_floats(g.d.pse, at, t.count, type_of(g.d.pse_cell), s.bias);
      if (bias != s.bias) __builtin_memcpy(s.bias, bias, static_cast<size_t>(t.count) * sizeof(float));
    }
    float sum;
    if (t.filled) {
      for (int64_t j = 0; j < t.count; ++j) {
        const float score = scores[j] * g.d.scale + (g.d.pse == nullptr ? 0.0f : s.bias[j]);
        scores[j] = t.hidden != nullptr && t.hidden[j] != 0 ? kMaskedScore : score;
      }
      sum = soften<false, false>(scores, t.count, 1.0f, nullptr, false, nullptr, top);
    } else if (g.d.pse == nullptr) {
      sum = t.hidden == nullptr ? soften_plain(scores, t.count, g.d.scale, top)
                                : soften<false, true>(scores, t.count, g.d.scale, nullptr, false, t.hidden, top);
    } else if (t.hidden == nullptr) {
      sum = soften<true, false>(scores, t.count, g.d.scale, s.bias, false, nullptr, top);
    } else {
      sum = soften<true, true>(scores, t.count, g.d.scale, s.bias, false, t.hidden, top);
    }
    if (top != g.state.max[r]) g.state.raise(r, top, g.columns);
    g.state.total[r] += sum;
  }
}

// Adds the values of tokens [begin, end) of the step.
template <class Stored>
static void add_run(const Group& g, const Tokens& t, int64_t begin, int64_t end, const float* weights) {
  for (int64_t j = begin; j < end;) {
    const int64_t count = g.together(t.first + j, t.first + end);
    const StoredRows<Stored> values = rows_at<Stored>(g, g.entry.value, t.first + j);
    ask_for_run<Stored>(g, j + count == t.count ? g.entry.key : g.entry.value, t.first + j + count);
    for (int64_t r = 0; r < g.rows; r += kDirectRows) {
      direct_values(smaller(kDirectRows, g.rows - r), weights + r * kTokenRow + j, kTokenRow, values, count, g.d.size,
                    g.state.sums + r * g.columns, g.columns);
    }
    j += count;
  }
}

// Where masked tokens have a score, those without weight are still not read.
template <class Stored>
static void add_weighted(const Group& g, const Tokens& t, const float* weights) {
  for (int64_t j = 0; j < t.count; ++j) {
    const StoredRows<Stored> value = rows_at<Stored>(g, g.entry.value, t.first + j);
    for (int64_t r = 0; r < g.rows; ++r) {
      const float* weight = weights + r * kTokenRow + j;
      if (t.hidden != nullptr && t.hidden[j] != 0 && *weight == 0) continue;
      direct_values(1, weight, kTokenRow, value, 1, g.d.size, g.state.sums + r * g.columns, g.columns);
    }
  }
}

template <class Keys, class Values>
static void attend_tokens(const Group& g, const Tokens& t, const DecodeScratch& s) {
  score_tokens<Keys>(g, t, s.scores);
  soften_tokens(g, t, s);
  if (t.filled) {
    add_weighted<Values>(g, t, s.scores);
    return;
  }
  for (int64_t j = 0; j < t.count;) {
    int64_t end = t.hidden == nullptr ? t.count : j;
    while (end < t.count && t.hidden[end] == 0) ++end;
    add_run<Values>(g, t, j, end, s.scores);
    j = end;
    while (j < t.count && t.hidden[j] != 0) ++j;
  }
}

}  // namespace fa::FA_ISA
