// FlashAttention's backward step: a block of query rows meets a block of keys. Five products, with the gradient of the
// softmax between the first two and the last three.
#pragma once

#include "../skinny_product.hpp"
#include "../tile_product.hpp"
#include "pack.hpp"
#include "softmax_gradient.hpp"

namespace fa::FA_ISA::grad {

// A block of query rows of a chunk and a block of keys of a key head.
struct BlockPair {
  const Gradients& gradients;
  const Shape& shape;
  const KeyHeadPlan& plan;
  const QueryChunk& chunk;
  const Scratch& s;
  const RowSums& sums;
  int64_t first_key;
  int64_t keys;
  int64_t first_row;  // in the chunk
  int64_t rows;
  PrefetchQueue& prefetches;
  bool keys_finite = true;

  const Problem& problem() const { return gradients.problem; }
  const Sequence& sequence() const { return *plan.sequence; }
  int64_t head_of(int64_t r) const { return chunk.head_of(first_row + r); }
  int64_t index_of(int64_t r) const { return chunk.index_of(first_row + r); }
  bool empty(int64_t r) const { return s.empty[first_row + r] != 0; }
  bool has_masked_p(int64_t r) const { return s.masked_p[first_row + r] != 0; }
  View attended(int64_t r) const { return view_of(problem(), sequence(), head_of(r), index_of(r), first_key, keys); }
  bool queries_finite() const { return s.finite[first_row] != 0; }
  bool dys_finite() const { return s.finite[kChunkRows + first_row] != 0; }
  float* dq_sums() const { return sums.dq + first_row * shape.columns(); }
  float* dk_sums() const { return plan.dk_sums + first_key * shape.columns(); }
  float* dv_sums() const { return plan.dv_sums + first_key * shape.value_columns(); }
  bool wants_ds() const { return gradients.wants_query() || gradients.wants_key() || gradients.sink != nullptr; }
};

// Fills views and windows. Returns the columns that some row sees.
static Window find_views(const BlockPair& blocks) {
  const Scratch& s = blocks.s;
  const Problem& problem = blocks.problem();
  const Sequence& sequence = blocks.sequence();
  const bool shared_mask = rows_share_mask(problem, blocks.chunk.head_count);
  View open{0, blocks.keys, nullptr};
  if (shared_mask && problem.mask != nullptr) {
    open = without_masked(open, problem, sequence, blocks.head_of(0), blocks.index_of(0), blocks.first_key);
  }
  const auto view = [&](int64_t r) -> View {
    if (blocks.empty(r) || blocks.has_masked_p(r)) return {0, blocks.keys, nullptr};
    if (!shared_mask) return blocks.attended(r);
    if (!has_band(sequence)) return open;
    return restricted_to_band(open, problem, sequence, blocks.head_of(r), blocks.index_of(r), blocks.first_key, blocks.keys);
  };
  Window all{blocks.keys, 0};
  for (int64_t tile = 0; tile * kMicroRows < blocks.rows; ++tile) {
    Window window{blocks.keys, 0};
    for (int64_t r = tile * kMicroRows; r < smaller(blocks.rows, (tile + 1) * kMicroRows); ++r) {
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

// out[row][column] = a b for the rows of a micro-tile and the columns of its window. `b` are panels. Of a panel at the end
// of the window, one half may be enough.
template <bool kPairs>
FA_INLINE void multiply_panels(const BlockPair& blocks, int64_t count, RowMajor a, Window window, const float* b,
                               int64_t depth, int64_t depth_padded, float* out) {
  for (int64_t c = window.begin / kPanel * kPanel; c < window.end; c += kPanel) {
    const int64_t half = window.begin >= c + kLanes ? kLanes : 0;
    const PanelB lines{b + c * depth_padded + half};
    const Output target{out + c + half, kScoreStride};
    blocks.prefetches.refill();
    if (half != 0 || window.end <= c + kLanes) {
      multiply_operands<1, Beta::zero, kPairs>(count, a, lines, depth, target, blocks.prefetches);
    } else {
      multiply_operands<2, Beta::zero, kPairs>(count, a, lines, depth, target, blocks.prefetches);
    }
  }
}

// One byte for each key from the vector on that holds the view's first key, not 0 where it is masked, readable as whole
// vectors. Null if the row sees all keys of the view.
FA_INLINE const uint8_t* hidden_keys(const View& view, uint8_t* buffer) {
  if (view.mask == nullptr) return nullptr;
  const int64_t first = view.begin / kLanes * kLanes;
  if ((view.end - first) % kLanes == 0) return view.mask + first;
  __builtin_memcpy(buffer, view.mask + first, static_cast<size_t>(view.end - first));
  return buffer;
}

// The same for a row whose masked keys have probabilities, too. It is computed for all keys of the block.
FA_INLINE const uint8_t* keys_not_attended(const BlockPair& blocks, int64_t r, uint8_t* buffer) {
  const View view = blocks.attended(r);
  if (view.open(blocks.keys)) return nullptr;
  for (int64_t j = 0; j < blocks.keys; ++j) {
    const bool seen = j >= view.begin && j < view.end && (view.mask == nullptr || view.mask[j] == 0);
    buffer[j] = seen ? 0 : 1;
  }
  return buffer;
}

// Row r of the block. `side`, 0 or 1, selects its buffers. Beyond the last row there is one that sees no key.
static Row score_row(const BlockPair& blocks, int64_t r, int64_t side) {
  const Problem& problem = blocks.problem();
  const Scratch& s = blocks.s;
  Row row{s.p + r * kScoreStride, s.ds + r * kScoreStride};
  row.common = true;
  if (r >= blocks.rows || s.views[r].empty()) return row;
  const View& view = s.views[r];
  const int64_t at = blocks.first_row + r;
  row.begin = view.begin;
  row.end = view.end;
  row.max = s.max[at];
  row.weight = s.weight[at];
  row.delta = s.delta[at];
  const int64_t first = blocks.first_key + row.first();
  uint8_t* hidden = s.hidden + side * kScoreStride;
  row.zeroed = s.zeroed[at] != 0;
  row.masked_p = s.masked_p[at];
  row.empty = blocks.empty(r);
  if (row.empty) {
    const float one = 1.0f / static_cast<float>(blocks.sequence().key_length);
    row.share = problem.empty_rows == EmptyRows::mean ? one : __builtin_nanf("");
  }
  row.hidden = blocks.has_masked_p(r) ? keys_not_attended(blocks, r, hidden) : hidden_keys(view, hidden);
  if (has_bias(problem)) {
    row.bias = bias_row(problem, blocks.sequence(), blocks.head_of(r), blocks.index_of(r), first, row.end - row.first(),
                        s.row_buffer + side * kScoreStride);
  }
  if (problem.drop_mask != nullptr) row.drop = drop_bit(blocks.sequence(), blocks.head_of(r), blocks.index_of(r)) + first;
  row.common = row.hidden == nullptr && row.bias == nullptr && !row.zeroed && !row.empty &&
              problem.drop_mask == nullptr && blocks.gradients.sink == nullptr;
  return row;
}

template <Kind kKind>
struct KindOf {
  static constexpr Kind kIs = kKind;
};

// Calls body(kind) for rows of which all are common, or not.
template <class Body>
FA_INLINE void with_kind(const Problem& problem, bool common, Body body) {
  if (problem.softcap != 0) {
    body(KindOf<Kind::capped>{});
  } else if (common) {
    body(KindOf<Kind::common>{});
  } else {
    body(KindOf<Kind::general>{});
  }
}

// The gradient of the softmax for rows [begin, end). The first row is even.
template <bool kPairs>
static void softmax_gradient(const BlockPair& blocks, Window all, int64_t begin, int64_t end) {
  const Problem& problem = blocks.problem();
  const auto store_sink_dots = [&](int64_t r, Vec sink_dots) {
    if (blocks.gradients.sink != nullptr && r < blocks.rows) {
      blocks.sums.sink_dots[blocks.first_row + r] += sum_lanes(sink_dots);
    }
  };
  for (int64_t r = begin; r < end; r += kPairs ? 2 : 1) {
    float* p = blocks.s.p + r * kScoreStride;
    float* ds = blocks.s.ds + r * kScoreStride;
    Vec sink_dots{};
    const Row row = score_row(blocks, r, 0);
    if constexpr (kPairs) {
      Vec odd_sink_dots{};
      const Row odd = score_row(blocks, r + 1, 1);
      float* pairs = blocks.s.ds_pairs + r * kPairStride;
      with_kind(problem, row.common && odd.common, [&](auto kind) {
        softmax_gradient_pair<kind.kIs>(row, odd, problem, all, p, ds, pairs, pairs + kPairStride, sink_dots, odd_sink_dots);
      });
      store_sink_dots(r + 1, odd_sink_dots);
    } else {
      with_kind(problem, row.common, [&](auto kind) {
        softmax_gradient_row<kind.kIs>(row, problem, all, p, ds, sink_dots);
      });
    }
    store_sink_dots(r, sink_dots);
  }
}

// The range of rows that contains all rows that see a column of [from, to). The first row is even.
static Window rows_that_meet(const BlockPair& blocks, int64_t from, int64_t to) {
  const auto sees = [&](int64_t r) { return blocks.s.views[r].begin < to && from < blocks.s.views[r].end; };
  const auto meets = [&](int64_t r) { return blocks.s.windows[r / kMicroRows].meets(from, to); };
  Window rows{0, blocks.rows};
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

// Calls body(width, column) for panels of columns: two vectors wide, and one where that is enough.
template <class Body>
FA_INLINE void each_panel(int64_t qk_size, Body body) {
  for (int64_t c = 0; c < qk_size; c += kPanel) {
    if (qk_size - c > kLanes) {
      body(Width<2>{}, c);
    } else {
      body(Width<1>{}, c);
    }
  }
}

// An operand A whose rows are keys from `j` on, and whose depth are pairs of query rows from row `rows.begin` on. Tile registers
// read it by rows: it is then transposed into `copy`, which has room for kProductRows<kPairs> rows of kQueryPairs.
inline constexpr int64_t kQueryPairs = kBlockRows / 2 + 16;

template <bool kPairs>
FA_INLINE auto keys_of(const float* weights, Window rows, int64_t j, int64_t count, float* copy) {
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  const ColumnMajor columns{weights + rows.begin * kScoreStride + j, kUnit * kScoreStride};
  if constexpr (!kPairs || !Isa::kHasTiles) {
    return columns;
  } else {
    for (int64_t key = 0; key < count; key += kLanes) {
      for (int64_t pair = 0; 2 * pair < rows.end - rows.begin; pair += kLanes) {
        const float* from[kLanes];
        for (int64_t n = 0; n < kLanes; ++n) from[n] = columns.data + (pair + n) * columns.stride;
        transpose_square(from, key, copy + key * kQueryPairs + pair, kQueryPairs);
      }
    }
    return RowMajor{copy, kQueryPairs};
  }
}

// sums += weights^T rows: dV += (P F)^T dO, or dK += dS^T Q.
template <bool kPairs>
static void add_products_to_keys(const BlockPair& blocks, Window all, const float* weights, const float* lines, int64_t line,
                                 int64_t qk_size, float* sums, int64_t columns) {
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  constexpr int64_t kKeys = kProductRows<kPairs>;
  alignas(64) float copy[kPairs && Isa::kHasTiles ? kKeys * kQueryPairs : 1];
  for (int64_t j = all.begin; j < all.end; j += kKeys) {
    const int64_t count = smaller(kKeys, all.end - j);
    const Window rows = rows_that_meet(blocks, j, j + count);
    if (rows.empty()) continue;
    const auto a = keys_of<kPairs>(weights, rows, j, count, copy);
    each_panel(qk_size, [&](auto width, int64_t c) {
      blocks.prefetches.refill();
      multiply_operands<width.kCount, Beta::one, kPairs>(count, a, PanelB{lines + rows.begin / kUnit * line + c, line},
                                                         ceil_div(rows.end - rows.begin, kUnit),
                                                         Output{sums + j * columns + c, columns}, blocks.prefetches);
    });
  }
}

// dQ += dS K.
template <bool kPairs>
static void add_products_to_queries(const BlockPair& blocks) {
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  const int64_t columns = blocks.shape.columns();
  const int64_t line = blocks.shape.line();
  const int64_t row = kPairs ? kPairStride : kScoreStride;
  const float* ds = kPairs ? blocks.s.ds_pairs : blocks.s.ds;
  each_panel(blocks.shape.qk_size, [&](auto width, int64_t c) {
    for (int64_t r = 0; r < blocks.rows; r += kMicroRows) {
      const Window window = blocks.s.windows[r / kMicroRows];
      if (window.empty()) continue;
      const int64_t first = window.begin / kUnit;
      blocks.prefetches.refill();
      const RowMajor a{ds + r * row + first, row};
      multiply_operands<width.kCount, Beta::added, kPairs>(smaller(kMicroRows, blocks.rows - r), a,
                                                           PanelB{blocks.s.key_lines + first * line + c, line},
                                                           ceil_div(window.end - window.begin, kUnit),
                                                           Output{blocks.dq_sums() + r * columns + c, columns},
                                                           blocks.prefetches);
    }
  });
}

// The weight of row r and key j.
template <bool kPairs>
FA_INLINE float weight_of(const float* weights, int64_t r, int64_t j) {
  if constexpr (!kPairs) return weights[r * kScoreStride + j];
  const uint32_t both = to_bits(weights[r / 2 * 2 * kScoreStride + j]);
  return from_bits(r % 2 == 0 ? both << 16 : both & 0xffff0000u);
}

// Calls add(j) for the keys of row r, in products with rows that contain inf or NaN. A masked key must not be multiplied,
// because 0 * inf is NaN. `with_masked_p`: also for masked keys that have a probability.
template <class Add>
FA_INLINE void each_attended_of_row(const BlockPair& blocks, int64_t r, bool with_masked_p, Add add) {
  if (blocks.empty(r) && !with_masked_p) return;
  const View view = blocks.has_masked_p(r) && !with_masked_p ? blocks.attended(r) : blocks.s.views[r];
  for (int64_t j = view.begin; j < view.end; ++j) {
    if (view.mask == nullptr || view.mask[j] == 0) add(j);
  }
}

// Calls add(r, j) for all rows.
template <class Add>
static void each_attended(const BlockPair& blocks, bool with_masked_p, Add add) {
  for (int64_t r = 0; r < blocks.rows; ++r) {
    each_attended_of_row(blocks, r, with_masked_p, [&](int64_t j) { add(r, j); });
  }
}

// dV += (P F)^T dO. If dO contains inf or NaN, attended keys only, one by one.
template <bool kPairs>
static void add_dv(const BlockPair& blocks, Window all) {
  const int64_t columns = blocks.shape.value_columns();
  if (blocks.dys_finite()) {
    const int64_t line = blocks.shape.value_line();
    add_products_to_keys<kPairs>(blocks, all, blocks.s.p, blocks.s.dy_lines + blocks.first_row / (kPairs ? 2 : 1) * line,
                                 line, blocks.shape.value_size, blocks.dv_sums(), columns);
    return;
  }
  const Problem& problem = blocks.problem();
  each_attended(blocks, true, [&](int64_t r, int64_t j) {
    const int64_t at = blocks.sequence().out + blocks.head_of(r) * problem.out.head + blocks.index_of(r) * problem.out.row;
    const float* dy = as_floats(blocks.gradients.dy, at, blocks.shape.value_size, problem.type, blocks.s.row_buffer);
    add_value(weight_of<kPairs>(blocks.s.p, r, j), dy, blocks.shape.value_size, blocks.dv_sums() + j * columns);
  });
}

// dK += dS^T Q, likewise.
template <bool kPairs>
static void add_dk(const BlockPair& blocks, Window all) {
  const int64_t columns = blocks.shape.columns();
  if (blocks.queries_finite()) {
    const int64_t line = blocks.shape.line();
    add_products_to_keys<kPairs>(blocks, all, blocks.s.ds, blocks.s.query_lines + blocks.first_row / (kPairs ? 2 : 1) * line,
                                 line, blocks.shape.qk_size, blocks.dk_sums(), columns);
    return;
  }
  each_attended(blocks, false, [&](int64_t r, int64_t j) {
    const float* query =
        query_row(blocks.problem(), blocks.sequence(), blocks.head_of(r), blocks.index_of(r), blocks.s.row_buffer);
    add_value(weight_of<kPairs>(blocks.s.ds, r, j), query, blocks.shape.qk_size, blocks.dk_sums() + j * columns);
  });
}

// dQ += dS K, likewise.
template <bool kPairs>
static void add_dq(const BlockPair& blocks) {
  if (blocks.keys_finite) {
    add_products_to_queries<kPairs>(blocks);
    return;
  }
  const int64_t columns = blocks.shape.columns();
  float* sum = blocks.s.row_buffer + larger(blocks.shape.line(), blocks.shape.value_line());  // added up as in the product
  for (int64_t r = 0; r < blocks.rows; ++r) {
    for (int64_t d = 0; d < columns; ++d) sum[d] = 0;
    each_attended_of_row(blocks, r, false, [&](int64_t j) {
      const float* key =
          key_row(blocks.problem(), blocks.sequence(), blocks.plan.key_head, blocks.first_key + j, blocks.s.row_buffer);
      add_value(weight_of<kPairs>(blocks.s.ds, r, j), key, blocks.shape.qk_size, sum);
    });
    for (int64_t d = 0; d < columns; ++d) blocks.dq_sums()[r * columns + d] += sum[d];
  }
}

// All products of the two blocks. `all` are the columns that some row sees.
template <bool kPairs>
static void multiply_block_pair(const BlockPair& blocks, Window all) {
  const Shape& shape = blocks.shape;
  const int64_t row = shape.row();
  const int64_t value_row = shape.value_row();
  // One micro-tile of rows after another, so that the scores are still in the first-level cache when the softmax reads them.
  for (int64_t r = 0; r < blocks.rows; r += kMicroRows) {
    const int64_t count = smaller(kMicroRows, blocks.rows - r);
    const Window window = blocks.s.windows[r / kMicroRows];
    const int64_t at = blocks.first_row + r;
    multiply_panels<kPairs>(blocks, count, RowMajor{blocks.s.queries + at * row, row}, window, blocks.s.keys_transposed,
                            shape.depth(), shape.depth_padded(), blocks.s.p + r * kScoreStride);
    if (blocks.wants_ds()) {
      multiply_panels<kPairs>(blocks, count, RowMajor{blocks.s.dys + at * value_row, value_row}, window,
                              blocks.s.values_transposed, shape.value_depth(), shape.value_depth_padded(),
                              blocks.s.ds + r * kScoreStride);
    }
    softmax_gradient<kPairs>(blocks, all, r, r + count);
  }
  if (blocks.gradients.value != nullptr) add_dv<kPairs>(blocks, all);
  if (blocks.gradients.wants_key()) add_dk<kPairs>(blocks, all);
  if (blocks.gradients.wants_query()) add_dq<kPairs>(blocks);
}

// A key head, or a split of it, with one chunk of query rows.
template <bool kPairs>
class ChunkGradient {
 public:
  ChunkGradient(const Gradients& gradients, const Shape& shape, const KeyHeadPlan& plan, const QueryChunk& chunk,
                const Scratch& s)
      : gradients_(gradients), shape_(shape), plan_(plan), chunk_(chunk), block_rows_(chunk.block_rows()), s_(s),
        seen_(band_range(*plan.sequence, chunk.begin, chunk.end - 1)) {
    load_statistics(gradients, *plan.sequence, chunk, s);
    for (int64_t r = 0; r < chunk.rows(); ++r) see_all_ = see_all_ || s.empty[r] != 0 || s.masked_p[r] != 0;
  }

  // The whole key head. The sums of dQ are s.total_sums.
  void run() {
    const RowSums total(s_.total_sums, shape_, kChunkRows);
    const RowSums of_span(s_.span_sums, shape_, kChunkRows);
    clear(total);
    plan_.each_span(0, [&](int64_t span) {
      if (!sees_span(span)) return;
      if (plan_.span_blocks == 1) return run_span(span, total);  // each row gets one sum of products
      clear(of_span);
      run_span(span, of_span);
      total.add(of_span, 0, chunk_.rows(), shape_.columns());
    });
  }

  // One split of a shared key head. Each span has sums of dQ of its own.
  void run(int64_t split) {
    plan_.each_span(split, [&](int64_t span) {
      const RowSums sums = sums_of_span(plan_, span, shape_);
      *sums.used = sees_span(span) ? 1.0f : 0.0f;
      if (!sees_span(span)) return;
      clear(sums);
      run_span(span, sums);
    });
  }

 private:
  void clear(const RowSums& sums) const { sums.clear(0, chunk_.rows(), shape_.columns()); }

  bool sees(int64_t first, int64_t keys) const { return see_all_ || (first < seen_.end && first + keys > seen_.begin); }
  bool sees_span(int64_t span) const {
    const int64_t keys = plan_.span_blocks * plan_.block_keys;
    return sees(span * keys, keys);
  }

  void run_span(int64_t span, const RowSums& sums) {
    plan_.each_block(span, [&](int64_t first, int64_t keys) {
      if (sees(first, keys)) run_block(first, keys, sums);
    });
  }

  // A block of keys with all blocks of query rows. Rows are packed when they first meet a block of keys.
  void run_block(int64_t first, int64_t keys, const RowSums& sums) {
    plan_prefetches(first + keys);
    bool packed = false;
    bool finite = true;
    for (int64_t begin = 0; begin < chunk_.rows(); begin += block_rows_) {
      const int64_t end = smaller(chunk_.rows(), begin + block_rows_);
      BlockPair blocks{gradients_, shape_, plan_, chunk_, s_, sums, first, keys, begin, end - begin, prefetches_};
      const Window all = find_views(blocks);
      if (all.empty()) continue;
      if (!packed) finite = pack_block<kPairs>(gradients_.problem, *plan_.sequence, shape_, plan_.key_head, first, keys, s_);
      packed = true;
      uint8_t& rows_packed = s_.packed[begin / block_rows_];
      if (rows_packed == 0) pack_rows<kPairs>(gradients_, *plan_.sequence, shape_, chunk_, begin, end, s_);
      rows_packed = 1;
      blocks.keys_finite = finite;
      multiply_block_pair<kPairs>(blocks, all);
    }
  }

  // Queues the block that begins with key `first`, which is prefetched while the products of the block before it run. Behind a
  // span of a split another span follows.
  void plan_prefetches(int64_t first) {
    prefetches_.clear();
    const Problem& problem = gradients_.problem;
    const Sequence& sequence = *plan_.sequence;
    const bool new_span = first % (plan_.span_blocks * plan_.block_keys) == 0;
    if (first >= sequence.key_length || (new_span && plan_.splits > 1)) return;
    const RowRange rows{plan_.key_head, 1, first, smaller(sequence.key_length, first + plan_.block_keys)};
    prefetches_.enqueue(problem.key, problem.type, sequence.key, rows, problem.head_size);
    prefetches_.enqueue(problem.value, problem.type, sequence.value, rows, problem.value_size);
  }

  const Gradients& gradients_;
  const Shape& shape_;
  const KeyHeadPlan& plan_;
  const QueryChunk& chunk_;
  const int64_t block_rows_;
  const Scratch& s_;
  const KeyRange seen_;
  bool see_all_ = false;
  PrefetchQueue prefetches_;
};

}  // namespace fa::FA_ISA::grad
