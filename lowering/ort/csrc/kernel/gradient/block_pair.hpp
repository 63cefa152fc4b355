// A block of query rows meets a block of keys: the five products and the softmax's gradient between them.
#pragma once

#include "../skinny_product.hpp"
#include "../microkernel.hpp"
#include "pack.hpp"
#include "softmax_gradient.hpp"

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
  Upcoming& upcoming;
  bool keys_finite = true;

  const Problem& problem() const { return gradients.problem; }
  const Sequence& sequence() const { return *pair.sequence; }
  int64_t head_of(int64_t r) const { return wave.head_of(first_row + r); }
  int64_t index_of(int64_t r) const { return wave.index_of(first_row + r); }
  bool empty(int64_t r) const { return s.empty[first_row + r] != 0; }
  bool filled(int64_t r) const { return s.fill[first_row + r] != 0; }
  View attended(int64_t r) const { return view_of(problem(), sequence(), head_of(r), index_of(r), first_key, keys); }
  bool queries_finite() const { return s.finite[first_row] != 0; }
  bool dys_finite() const { return s.finite[kWaveRows + first_row] != 0; }
  float* query_sums() const { return sums.query + first_row * shape.columns(); }
  float* key_sums() const { return pair.key_sums + first_key * shape.columns(); }
  float* value_sums() const { return pair.value_sums + first_key * shape.value_columns(); }
  bool wants_ds() const { return gradients.wants_query() || gradients.wants_key() || gradients.sink != nullptr; }
};

// Fills views and windows and gives the columns that some row sees.
static Window look(const Visit& v) {
  const Scratch& s = v.s;
  const Problem& problem = v.problem();
  const Sequence& sequence = v.sequence();
  const bool one_mask = one_mask_row(problem, v.wave.head_count);
  View open{0, v.keys, nullptr};
  if (one_mask && problem.mask != nullptr) {
    open = less_hidden(open, problem, sequence, v.head_of(0), v.index_of(0), v.first_key);
  }
  const auto view = [&](int64_t r) -> View {
    if (v.empty(r) || v.filled(r)) return {0, v.keys, nullptr};
    if (!one_mask) return v.attended(r);
    if (!has_band(sequence)) return open;
    return within(open, problem, sequence, v.head_of(r), v.index_of(r), v.first_key, v.keys);
  };
  Window all{v.keys, 0};
  for (int64_t tile = 0; tile * kMicroRows < v.rows; ++tile) {
    Window window{v.keys, 0};
    for (int64_t r = tile * kMicroRows; r < smaller(v.rows, (tile + 1) * kMicroRows); ++r) {
      s.views[r] = view(r);
      if (s.views[r].empty()) continue;
      window.begin = smaller(window.begin, s.views[r].begin / kLanes * kLanes);
      window.end = larger(window.end, s.views[r].end);
    }
    s.windows[tile] = window;
    all = {smaller(all.begin, window.begin), larger(all.end, window.end)};
  }
  return all;
}

// A tile of rows times the columns of its window: `b` are panels. Of a panel at the end of the window one half may be
// enough.
template <bool kPairs>
FA_INLINE void products(const Visit& v, int64_t count, RowsOf a, Window window, const float* b, int64_t depth,
                        int64_t across, float* out) {
  for (int64_t c = window.begin / kPanel * kPanel; c < window.end; c += kPanel) {
    const int64_t half = window.begin >= c + kLanes ? kLanes : 0;
    const Lines lines{b + c * across + half};
    const Target target{out + c + half, kScoreRow};
    v.upcoming.refill();
    if (half != 0 || window.end <= c + kLanes) {
      multiply<1, Sums::fresh, kPairs>(count, a, lines, depth, target, v.upcoming);
    } else {
      multiply<2, Sums::fresh, kPairs>(count, a, lines, depth, target, v.upcoming);
    }
  }
}

// One byte for each key of the view from the vector that holds its first one on, readable as whole vectors; null if the
// row sees them all.
FA_INLINE const uint8_t* hidden_keys(const View& view, uint8_t* buffer) {
  if (view.mask == nullptr) return nullptr;
  const int64_t first = view.begin / kLanes * kLanes;
  if ((view.end - first) % kLanes == 0) return view.mask + first;
  __builtin_memcpy(buffer, view.mask + first, static_cast<size_t>(view.end - first));
  return buffer;
}

// The same for a row that looks at all keys because those it does not attend have probabilities, too.
FA_INLINE const uint8_t* keys_not_attended(const Visit& v, int64_t r, uint8_t* buffer) {
  const View view = v.attended(r);
  if (view.open(v.keys)) return nullptr;
  for (int64_t j = 0; j < v.keys; ++j) {
    const bool seen = j >= view.begin && j < view.end && (view.mask == nullptr || view.mask[j] == 0);
    buffer[j] = seen ? 0 : 1;
  }
  return buffer;
}

// Row r of the block; `side` 0 or 1 has buffers of its own. Beyond the last row there is one that sees nothing.
static Row row_of(const Visit& v, int64_t r, int64_t side) {
  const Problem& problem = v.problem();
  const Scratch& s = v.s;
  Row row{s.p + r * kScoreRow, s.ds + r * kScoreRow};
  row.plain = true;
  if (r >= v.rows || s.views[r].empty()) return row;
  const View& view = s.views[r];
  const int64_t at = v.first_row + r;
  row.begin = view.begin;
  row.end = view.end;
  row.max = s.max[at];
  row.weight = s.weight[at];
  row.delta = s.delta[at];
  const int64_t first = v.first_key + row.first();
  uint8_t* hidden = s.hidden + side * kScoreRow;
  row.silent = s.silent[at] != 0;
  row.fill = s.fill[at];
  row.empty = v.empty(r);
  if (row.empty) {
    const float one = 1.0f / static_cast<float>(v.sequence().key_length);
    row.share = problem.empty_rows == EmptyRows::mean ? one : __builtin_nanf("");
  }
  row.hidden = v.filled(r) ? keys_not_attended(v, r, hidden) : hidden_keys(view, hidden);
  if (has_bias(problem)) {
    row.bias = bias_row(problem, v.sequence(), v.head_of(r), v.index_of(r), first, row.end - row.first(),
                        s.rows + side * kScoreRow);
  }
  if (problem.drop_mask != nullptr) row.drop = drop_bit(v.sequence(), v.head_of(r), v.index_of(r)) + first;
  row.plain = row.hidden == nullptr && row.bias == nullptr && !row.silent && !row.empty &&
              problem.drop_mask == nullptr && v.gradients.sink == nullptr;
  return row;
}

// Rows [begin, end), the first one even.
template <bool kPairs>
static void soften(const Visit& v, Window all, int64_t begin, int64_t end) {
  const Problem& problem = v.problem();
  const auto put_dots = [&](int64_t r, Vec dots) {
    if (v.gradients.sink != nullptr && r < v.rows) v.sums.dots[v.first_row + r] += sum_lanes(dots);
  };
  for (int64_t r = begin; r < end; r += kPairs ? 2 : 1) {
    float* p = v.s.p + r * kScoreRow;
    float* ds = v.s.ds + r * kScoreRow;
    Vec dots{};
    const Row row = row_of(v, r, 0);
    if constexpr (kPairs) {
      Vec odd_dots{};
      const Row odd = row_of(v, r + 1, 1);
      float* pairs = v.s.ds_pairs + r * kPairRow;
      if (row.plain && odd.plain) {
        soften_pair<true>(row, odd, problem, all, p, ds, pairs, pairs + kPairRow, dots, odd_dots);
      } else {
        soften_pair<false>(row, odd, problem, all, p, ds, pairs, pairs + kPairRow, dots, odd_dots);
      }
      put_dots(r + 1, odd_dots);
    } else if (row.plain) {
      soften_row<true>(row, problem, all, p, ds, dots);
    } else {
      soften_row<false>(row, problem, all, p, ds, dots);
    }
    put_dots(r, dots);
  }
}

// Rows that see a column of [from, to), and those between; the first one even.
static Window rows_that_see(const Visit& v, int64_t from, int64_t to) {
  const auto sees = [&](int64_t r) { return v.s.views[r].begin < to && from < v.s.views[r].end; };
  const auto meets = [&](int64_t r) { return v.s.windows[r / kMicroRows].meets(from, to); };
  Window rows{0, v.rows};
  while (rows.begin < rows.end && !meets(rows.begin)) rows.begin += kMicroRows;
  while (rows.begin < rows.end && !sees(rows.begin)) ++rows.begin;
  rows.begin = rows.begin / 2 * 2;
  while (rows.end > rows.begin && !meets(rows.end - 1)) rows.end = (rows.end - 1) / kMicroRows * kMicroRows;
  while (rows.end > rows.begin && !sees(rows.end - 1)) --rows.end;
  return rows;
}

template <int kVectors>
struct Width {
  static constexpr int kCount = kVectors;
};

// Calls body(width, column) for so many columns of sums, two vectors at a time and at the end perhaps one.
template <class Body>
FA_INLINE void each_panel(int64_t numbers, Body body) {
  for (int64_t c = 0; c < numbers; c += kPanel) {
    if (numbers - c > kLanes) {
      body(Width<2>{}, c);
    } else {
      body(Width<1>{}, c);
    }
  }
}

// sums += weights^T rows: of dV (P F and dO) and dK (dS and Q).
template <bool kPairs>
static void add_to_keys(const Visit& v, Window all, const float* weights, const float* lines, int64_t line,
                        int64_t numbers, float* sums, int64_t columns) {
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  for (int64_t j = all.begin; j < all.end; j += kMicroRows) {
    const int64_t count = smaller(kMicroRows, all.end - j);
    const Window rows = rows_that_see(v, j, j + count);
    if (rows.empty()) continue;
    const ColumnsOf a{weights + rows.begin * kScoreRow + j, kUnit * kScoreRow};
    each_panel(numbers, [&](auto width, int64_t c) {
      v.upcoming.refill();
      multiply<width.kCount, Sums::added, kPairs>(count, a, Lines{lines + rows.begin / kUnit * line + c, line},
                                                  blocks_of(rows.end - rows.begin, kUnit),
                                                  Target{sums + j * columns + c, columns}, v.upcoming);
    });
  }
}

// sums += dS K.
template <bool kPairs>
static void add_to_queries(const Visit& v) {
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  const int64_t columns = v.shape.columns();
  const int64_t line = v.shape.line();
  const int64_t row = kPairs ? kPairRow : kScoreRow;
  const float* ds = kPairs ? v.s.ds_pairs : v.s.ds;
  each_panel(v.shape.numbers, [&](auto width, int64_t c) {
    for (int64_t r = 0; r < v.rows; r += kMicroRows) {
      const Window window = v.s.windows[r / kMicroRows];
      if (window.empty()) continue;
      const int64_t first = window.begin / kUnit;
      v.upcoming.refill();
      multiply<width.kCount, Sums::added, kPairs>(smaller(kMicroRows, v.rows - r), RowsOf{ds + r * row + first, row},
                                                  Lines{v.s.key_lines + first * line + c, line},
                                                  blocks_of(window.end - window.begin, kUnit),
                                                  Target{v.query_sums() + r * columns + c, columns}, v.upcoming);
    }
  });
}

// The weight of row r and column j.
template <bool kPairs>
FA_INLINE float weight_of(const float* weights, int64_t r, int64_t j) {
  if constexpr (!kPairs) return weights[r * kScoreRow + j];
  const uint32_t both = to_bits(weights[r / 2 * 2 * kScoreRow + j]);
  return from_bits(r % 2 == 0 ? both << 16 : both & 0xffff0000u);
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

template <bool kPairs>
static void add_values(const Visit& v, Window all) {
  const int64_t columns = v.shape.value_columns();
  if (v.dys_finite()) {
    const int64_t line = v.shape.value_line();
    add_to_keys<kPairs>(v, all, v.s.p, v.s.dy_lines + v.first_row / (kPairs ? 2 : 1) * line, line,
                        v.shape.value_size, v.value_sums(), columns);
    return;
  }
  const Problem& problem = v.problem();
  carefully(v, true, [&](int64_t r, int64_t j) {
    const int64_t at = v.sequence().out + v.head_of(r) * problem.out.head + v.index_of(r) * problem.out.row;
    const float* dy = as_floats(v.gradients.dy, at, v.shape.value_size, problem.type, v.s.rows);
    add_value(weight_of<kPairs>(v.s.p, r, j), dy, v.shape.value_size, v.value_sums() + j * columns);
  });
}

template <bool kPairs>
static void add_keys(const Visit& v, Window all) {
  const int64_t columns = v.shape.columns();
  if (v.queries_finite()) {
    const int64_t line = v.shape.line();
    add_to_keys<kPairs>(v, all, v.s.ds, v.s.query_lines + v.first_row / (kPairs ? 2 : 1) * line, line,
                        v.shape.numbers, v.key_sums(), columns);
    return;
  }
  carefully(v, false, [&](int64_t r, int64_t j) {
    const float* query = query_row(v.problem(), v.sequence(), v.head_of(r), v.index_of(r), v.s.rows);
    add_value(weight_of<kPairs>(v.s.ds, r, j), query, v.shape.numbers, v.key_sums() + j * columns);
  });
}

template <bool kPairs>
static void add_queries(const Visit& v) {
  if (v.keys_finite) {
    add_to_queries<kPairs>(v);
    return;
  }
  const int64_t columns = v.shape.columns();
  carefully(v, false, [&](int64_t r, int64_t j) {
    const float* key = key_row(v.problem(), v.sequence(), v.pair.key_head, v.first_key + j, v.s.rows);
    add_value(weight_of<kPairs>(v.s.ds, r, j), key, v.shape.numbers, v.query_sums() + r * columns);
  });
}

template <bool kPairs>
static void visit(const Visit& v, Window all) {
  const Shape& shape = v.shape;
  const int64_t row = shape.row();
  const int64_t value_row = shape.value_row();
  // Tile by tile, so that the scores are in the first-level cache when they are softened.
  for (int64_t r = 0; r < v.rows; r += kMicroRows) {
    const int64_t count = smaller(kMicroRows, v.rows - r);
    const Window window = v.s.windows[r / kMicroRows];
    const int64_t at = v.first_row + r;
    products<kPairs>(v, count, RowsOf{v.s.queries + at * row, row}, window, v.s.keys_across, shape.depth(),
                     shape.across(), v.s.p + r * kScoreRow);
    if (v.wants_ds()) {
      products<kPairs>(v, count, RowsOf{v.s.dys + at * value_row, value_row}, window, v.s.values_across,
                       shape.value_depth(), shape.value_across(), v.s.ds + r * kScoreRow);
    }
    soften<kPairs>(v, all, r, r + count);
  }
  if (v.gradients.value != nullptr) add_values<kPairs>(v, all);
  if (v.gradients.wants_key()) add_keys<kPairs>(v, all);
  if (v.gradients.wants_query()) add_queries<kPairs>(v);
}

// While a block's products run, the part's next block is asked for.
static void look_ahead(const Problem& problem, const Pair& pair, int64_t block, Upcoming& upcoming) {
  upcoming.clear();
  const int64_t first = (block + pair.parts) * pair.block_keys;
  const Sequence& sequence = *pair.sequence;
  if (first >= sequence.key_length) return;
  const RowSpan rows{pair.key_head, 1, first, smaller(sequence.key_length, first + pair.block_keys)};
  upcoming.add(problem.key, problem.type, sequence.key, rows, problem.head_size);
  upcoming.add(problem.value, problem.type, sequence.value, rows, problem.value_size);
}

// One part of a pair in one wave.
template <bool kPairs>
static void run_part(const Gradients& gradients, const Shape& shape, const Pair& pair, int64_t part, const Wave& wave,
                     const Scratch& s, const RowSums& sums) {
  const Sequence& sequence = *pair.sequence;
  const int64_t rows = wave.rows();
  read_wave<kPairs>(gradients, sequence, shape, wave, s);
  for (int64_t n = 0; n < rows * shape.columns(); ++n) sums.query[n] = 0;
  for (int64_t r = 0; r < rows; ++r) sums.dots[r] = 0;
  bool see_all = false;
  for (int64_t r = 0; r < rows; ++r) see_all = see_all || s.empty[r] != 0 || s.fill[r] != 0;
  const KeyRange seen = banded(sequence, wave.begin, wave.end - 1);
  Upcoming upcoming;
  for (int64_t block = part; block < pair.blocks; block += pair.parts) {
    const int64_t first = block * pair.block_keys;
    const int64_t keys = smaller(pair.block_keys, sequence.key_length - first);
    if (!see_all && (first >= seen.end || first + keys <= seen.begin)) continue;
    look_ahead(gradients.problem, pair, block, upcoming);
    bool packed = false;
    bool finite = true;
    for (int64_t begin = 0; begin < rows; begin += wave.block_rows()) {
      const int64_t count = smaller(wave.block_rows(), rows - begin);
      Visit v{gradients, shape, pair, wave, s, sums, first, keys, begin, count, upcoming};
      const Window all = look(v);
      if (all.empty()) continue;
      if (!packed) finite = pack_block<kPairs>(gradients.problem, sequence, shape, pair.key_head, first, keys, s);
      packed = true;
      v.keys_finite = finite;
      visit<kPairs>(v, all);
    }
  }
}

}  // namespace fa::FA_ISA::grad
