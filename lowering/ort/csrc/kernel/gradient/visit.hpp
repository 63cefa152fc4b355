// A block of query rows meets a block of keys: the five products and the softmax's gradient between them.
#pragma once

#include "pack.hpp"
#include "product.hpp"
#include "soften.hpp"

namespace fa::FA_ISA::grad {

struct Visit {
  const Gradients& gradients;
  const Shape& shape;
  const Pair& pair;
  const Wave& wave;
  const Scratch& s;
  const RowSums& sums;
  int64_t first_key;
  int64_t keys;
  int64_t first_row;  // in the wave
  int64_t rows;
  bool keys_finite = true;

  const Problem& problem() const { return gradients.problem; }
  const Sequence& sequence() const { return *pair.sequence; }
  int64_t head_of(int64_t r) const { return wave.head_of(first_row + r); }
  int64_t index_of(int64_t r) const { return wave.index_of(first_row + r); }
  bool empty(int64_t r) const { return s.empty[first_row + r] != 0; }
  bool filled(int64_t r) const { return s.fill[first_row + r] != 0; }
  View attended(int64_t r) const { return view_of(problem(), sequence(), head_of(r), index_of(r), first_key, keys); }
  const float* queries() const { return s.queries + first_row * shape.columns(); }
  const float* dys() const { return s.dys + first_row * shape.value_columns(); }
  bool queries_finite() const { return s.finite[first_row / kBlockRows] != 0; }
  bool dys_finite() const { return s.finite[(kWaveRows + first_row) / kBlockRows] != 0; }
  float* query_sums() const { return sums.query + first_row * shape.columns(); }
  float* key_sums() const { return pair.key_sums + first_key * shape.columns(); }
  float* value_sums() const { return pair.value_sums + first_key * shape.value_columns(); }
  bool wants_ds() const { return gradients.wants_query() || gradients.wants_key() || gradients.sink != nullptr; }
};

// True if all rows see the same keys.
FA_INLINE bool all_alike(const Visit& v) {
  const Problem& problem = v.problem();
  const bool no_band = v.sequence().first == -kNoLimit && v.sequence().last == kNoLimit;
  const bool one_row = problem.mask_row == 0 && (problem.mask_head == 0 || v.wave.head_count == 1);
  return no_band && (problem.mask == nullptr || (one_row && !(problem.mask_value > -kInfinity))) &&
         problem.empty_rows == EmptyRows::zero;
}

// Fills views and windows; false if no row sees any of these keys.
static bool look(const Visit& v) {
  const Scratch& s = v.s;
  const bool alike = all_alike(v);
  bool seen = false;
  for (int64_t tile = 0; tile * kTileRows < v.rows; ++tile) {
    Window window{v.keys, 0};
    for (int64_t r = tile * kTileRows; r < smaller(v.rows, (tile + 1) * kTileRows); ++r) {
      if (alike && r > 0) {
        s.views[r] = s.views[0];
      } else if (v.empty(r) || v.filled(r)) {
        s.views[r] = {0, v.keys, nullptr};
      } else {
        s.views[r] = v.attended(r);
      }
      if (s.views[r].empty()) continue;
      window.begin = smaller(window.begin, s.views[r].begin / kPanel * kPanel);
      window.end = larger(window.end, s.views[r].end);
    }
    s.windows[tile] = window;
    seen = seen || !window.empty();
  }
  return seen;
}

// Rows times columns: `a` are rows as panels, `b` the columns of panels [depth][kPanel].
static void products(const Visit& v, const float* a, const float* b, int64_t depth, float* out) {
  const Depth along{depth, kPanel, v.rows * kPanel};
  for (int64_t c = 0; c < v.keys; c += kPanel) {
    for (int64_t r = 0; r < v.rows; r += kTileRows) {
      const Window window = v.s.windows[r / kTileRows];
      if (c < window.begin || c >= window.end) continue;
      multiply<kPanel, 1, false>(smaller(kTileRows, v.rows - r), a + r * kPanel, b + c * depth, along,
                                 out + r * kScoreRow + c, kScoreRow);
    }
  }
}

// One byte for each key of the view, readable as whole vectors; null if the row sees them all.
FA_INLINE const uint8_t* hidden_keys(const Visit& v, const View& view) {
  if (view.mask == nullptr) return nullptr;
  const int64_t count = view.end - view.begin;
  if (count % kLanes == 0) return view.mask + view.begin;
  __builtin_memcpy(v.s.hidden, view.mask + view.begin, static_cast<size_t>(count));
  return v.s.hidden;
}

// The same for a row that looks at all keys because those it does not attend have probabilities, too.
FA_INLINE const uint8_t* keys_not_attended(const Visit& v, int64_t r) {
  const View view = v.attended(r);
  if (view.open(v.keys)) return nullptr;
  for (int64_t j = 0; j < v.keys; ++j) {
    const bool seen = j >= view.begin && j < view.end && (view.mask == nullptr || view.mask[j] == 0);
    v.s.hidden[j] = seen ? 0 : 1;
  }
  return v.s.hidden;
}

static void soften_row(const Visit& v, int64_t r) {
  const Problem& problem = v.problem();
  const Scratch& s = v.s;
  const View& view = s.views[r];
  float* p = s.p + r * kScoreRow;
  float* ds = s.ds + r * kScoreRow;
  const int64_t begin = view.empty() ? v.keys : view.begin;
  const int64_t end = view.empty() ? v.keys : view.end;
  const int64_t at = v.first_row + r;
  if (begin < end) {
    Row row{p + begin, ds + begin, end - begin, s.max[at], s.weight[at], s.delta[at]};
    if (problem.drop_mask != nullptr) {
      row.drop = drop_bit(v.sequence(), v.head_of(r), v.index_of(r)) + v.first_key + begin;
    }
    if (v.empty(r)) {
      soften_empty(row, problem, v.sequence().key_length);
    } else {
      row.hidden = v.filled(r) ? keys_not_attended(v, r) : hidden_keys(v, view);
      row.fill = s.fill[at];
      row.silent = s.silent[at] != 0;
      if (has_bias(problem)) {
        row.bias = bias_row(problem, v.sequence(), v.head_of(r), v.index_of(r), v.first_key + begin, row.count, s.rows);
      }
      const bool plain = row.hidden == nullptr && row.bias == nullptr && !row.silent && problem.drop_mask == nullptr;
      if (plain && v.gradients.sink == nullptr) {
        soften_plain(row, problem.scale);
      } else {
        v.sums.dots[at] += soften_any(row, problem);
      }
    }
  }
  for (int64_t c = 0; c < begin; ++c) p[c] = ds[c] = 0;
  for (int64_t c = end; c < v.keys; ++c) p[c] = ds[c] = 0;
}

// sums += weights^T rows: of dV (P F and dO) and dK (dS and Q).
static void add_to_keys(const Visit& v, const float* weights, const float* rows, int64_t columns, float* sums) {
  const int64_t tiles = blocks_of(v.rows, kTileRows);
  for (int64_t j = 0; j < v.keys; j += kTileRows) {
    const int64_t count = smaller(kTileRows, v.keys - j);
    int64_t first = 0;
    int64_t last = tiles;
    while (first < last && !v.s.windows[first].meets(j, j + count)) ++first;
    while (last > first && !v.s.windows[last - 1].meets(j, j + count)) --last;
    const int64_t begin = first * kTileRows;
    const int64_t depth = smaller(v.rows, last * kTileRows) - begin;
    if (depth <= 0) continue;
    for (int64_t c = 0; c < columns; c += kPanel) {
      multiply<1, kScoreRow, true>(count, weights + begin * kScoreRow + j, rows + c * v.rows + begin * kPanel,
                                   {depth, depth, 0}, sums + j * columns + c, columns);
    }
  }
}

// sums += dS K.
static void add_to_queries(const Visit& v) {
  const int64_t columns = v.shape.columns();
  for (int64_t c = 0; c < columns; c += kPanel) {
    for (int64_t r = 0; r < v.rows; r += kTileRows) {
      const Window window = v.s.windows[r / kTileRows];
      if (window.empty()) continue;
      const int64_t depth = window.end - window.begin;
      multiply<kScoreRow, 1, true>(smaller(kTileRows, v.rows - r), v.s.ds + r * kScoreRow + window.begin,
                                   v.s.keys + c * v.keys + window.begin * kPanel, {depth, depth, 0},
                                   v.query_sums() + r * columns + c, columns);
    }
  }
}

// Row r of panels of `rows` rows, added with a weight.
FA_INLINE void add_row(float weight, const float* panels, int64_t rows, int64_t r, int64_t columns, float* sum) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Vec x = load(panels + c / kPanel * kPanel * rows + r * kPanel + c % kPanel);
    store(sum + c, load(sum + c) + x * weight);
  }
}

// For rows that hold inf or NaN: what a row does not attend must not be multiplied, for 0 * inf is NaN.
// `probable`: also what a row does not attend and has a probability for all the same.
template <class Add>
static void carefully(const Visit& v, bool probable, Add add) {
  for (int64_t r = 0; r < v.rows; ++r) {
    if (v.empty(r) && !probable) continue;
    const View view = v.filled(r) && !probable ? v.attended(r) : v.s.views[r];
    for (int64_t j = view.begin; j < view.end; ++j) {
      if (view.mask == nullptr || view.mask[j] == 0) add(r, j);
    }
  }
}

static void add_values(const Visit& v) {
  const int64_t columns = v.shape.value_columns();
  if (v.dys_finite()) {
    add_to_keys(v, v.s.p, v.dys(), columns, v.value_sums());
    return;
  }
  carefully(v, true, [&](int64_t r, int64_t j) {
    add_row(v.s.p[r * kScoreRow + j], v.dys(), v.rows, r, columns, v.value_sums() + j * columns);
  });
}

static void add_keys(const Visit& v) {
  const int64_t columns = v.shape.columns();
  if (v.queries_finite()) {
    add_to_keys(v, v.s.ds, v.queries(), columns, v.key_sums());
    return;
  }
  carefully(v, false, [&](int64_t r, int64_t j) {
    add_row(v.s.ds[r * kScoreRow + j], v.queries(), v.rows, r, columns, v.key_sums() + j * columns);
  });
}

static void add_queries(const Visit& v) {
  if (v.keys_finite) {
    add_to_queries(v);
    return;
  }
  const int64_t columns = v.shape.columns();
  carefully(v, false, [&](int64_t r, int64_t j) {
    add_row(v.s.ds[r * kScoreRow + j], v.s.keys, v.keys, j, columns, v.query_sums() + r * columns);
  });
}

static void visit(const Visit& v) {
  products(v, v.queries(), v.s.keys_across, v.shape.depth, v.s.p);
  if (v.wants_ds()) products(v, v.dys(), v.s.values_across, v.shape.value_size, v.s.ds);
  for (int64_t r = 0; r < v.rows; ++r) soften_row(v, r);
  if (v.gradients.value != nullptr) add_values(v);
  if (v.gradients.wants_key()) add_keys(v);
  if (v.gradients.wants_query()) add_queries(v);
}

// One part of a pair in one wave.
static void run_part(const Gradients& gradients, const Shape& shape, const Pair& pair, int64_t part, const Wave& wave,
                     const Scratch& s, const RowSums& sums) {
  const Sequence& sequence = *pair.sequence;
  const int64_t rows = wave.rows();
  read_wave(gradients, sequence, shape, wave, s);
  for (int64_t n = 0; n < rows * shape.columns(); ++n) sums.query[n] = 0;
  for (int64_t r = 0; r < rows; ++r) sums.dots[r] = 0;
  bool see_all = false;
  for (int64_t r = 0; r < rows; ++r) see_all = see_all || s.empty[r] != 0 || s.fill[r] != 0;
  const KeyRange seen = banded(sequence, wave.begin, wave.end - 1);
  for (int64_t block = part; block < pair.blocks; block += pair.parts) {
    const int64_t first = block * kBlockKeys;
    const int64_t keys = smaller(kBlockKeys, sequence.key_length - first);
    if (!see_all && (first >= seen.end || first + keys <= seen.begin)) continue;
    bool packed = false;
    bool finite = true;
    for (int64_t begin = 0; begin < rows; begin += kBlockRows) {
      Visit v{gradients, shape, pair, wave, s, sums, first, keys, begin, smaller(kBlockRows, rows - begin)};
      if (!look(v)) continue;
      if (!packed) finite = pack_block(gradients.problem, sequence, shape, pair.key_head, first, keys, s);
      packed = true;
      v.keys_finite = finite;
      visit(v);
    }
  }
}

}  // namespace fa::FA_ISA::grad
