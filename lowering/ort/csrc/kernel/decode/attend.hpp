// One step of decoding: some tokens of one key head, and the query heads that read it.
#pragma once

#include "products.hpp"
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
  int64_t columns;  // of a row of sums and queries: whole vectors
  const float* queries;
  const float* constants;
  State state;

  int64_t next_token;  // where the next step begins, with this key head: its keys are asked for
  int64_t next_head;

  int64_t head(int64_t r) const { return key_head * rows + r; }
  int64_t at(int64_t token) const { return row_of(d, entry, token) + key_head * entry.head_stride; }

  // The keys of token `j` of the next step; null where there is none.
  const char* next_keys(int64_t j, int64_t cell) const {
    if (next_token + j >= entry.length) return nullptr;
    const int64_t index = row_of(d, entry, next_token + j) + next_head * entry.head_stride;
    return static_cast<const char*>(entry.key) + index * cell;
  }

  // Tokens from `token` on, below `end`, that lie one row after the other.
  int64_t together(int64_t token, int64_t end) const {
    return d.block_size == 0 ? end - token : smaller(end - token, d.block_size - token % d.block_size);
  }
};

template <Cell kCell>
FA_INLINE void score_tokens(const Group& g, const Tokens& t, float* scores) {
  const int64_t row = g.d.row_stride * kCellBytes<kCell>;
  for (int64_t j = 0; j < t.count; j += kLanes) {
    const char* key = static_cast<const char*>(g.entry.key) + g.at(t.first + j) * kCellBytes<kCell>;
    const char* value = static_cast<const char*>(g.entry.value) + g.at(t.first + j) * kCellBytes<kCell>;
    const int64_t count = smaller(kLanes, t.count - j);
    for (int64_t r = 0; r < g.rows; r += kMostRows) {
      with_rows(smaller(kMostRows, g.rows - r), [&]<int kRows>() {
        score_tile<kCell, kRows>(g.queries + r * g.columns, g.columns, key, row, count, g.d.size, g.constants + r,
                                 scores + r * kTokenRow + j, kTokenRow, r == 0 ? value : nullptr);
      });
    }
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
template <Cell kCell>
FA_INLINE void add_run(const Group& g, const Tokens& t, int64_t begin, int64_t end, const float* weights) {
  const int64_t row = g.d.row_stride * kCellBytes<kCell>;
  for (int64_t j = begin; j < end;) {
    const int64_t count = g.together(t.first + j, t.first + end);
    const char* value = static_cast<const char*>(g.entry.value) + g.at(t.first + j) * kCellBytes<kCell>;
    const char* next = g.next_keys(j, kCellBytes<kCell>);
    for (int64_t r = 0; r < g.rows; r += kMostRows) {
      with_rows(smaller(kMostRows, g.rows - r), [&]<int kRows>() {
        add_values<kCell, kRows>(weights + r * kTokenRow + j, kTokenRow, value, row, count, g.d.size,
                                 g.state.sums + r * g.columns, g.columns, r == 0 ? next : nullptr);
      });
    }
    j += count;
  }
}

// Where masked tokens have a score, those without weight are still not read.
template <Cell kCell>
static void add_weighted(const Group& g, const Tokens& t, const float* weights) {
  for (int64_t j = 0; j < t.count; ++j) {
    const char* value = static_cast<const char*>(g.entry.value) + g.at(t.first + j) * kCellBytes<kCell>;
    for (int64_t r = 0; r < g.rows; ++r) {
      const float* weight = weights + r * kTokenRow + j;
      if (t.hidden != nullptr && t.hidden[j] != 0 && *weight == 0) continue;
      add_values<kCell, 1>(weight, kTokenRow, value, 0, 1, g.d.size, g.state.sums + r * g.columns, g.columns, nullptr);
    }
  }
}

template <Cell kCell>
static void attend_tokens(const Group& g, const Tokens& t, const DecodeScratch& s) {
  score_tokens<kCell>(g, t, s.scores);
  soften_tokens(g, t, s);
  if (t.filled) {
    add_weighted<kCell>(g, t, s.scores);
    return;
  }
  for (int64_t j = 0; j < t.count;) {
    int64_t end = t.hidden == nullptr ? t.count : j;
    while (end < t.count && t.hidden[end] == 0) ++end;
    add_run<kCell>(g, t, j, end, s.scores);
    j = end;
    while (j < t.count && t.hidden[j] != 0) ++j;
  }
}

}  // namespace fa::FA_ISA
