// A span of query rows against one block of keys after another: the tile of flash attention.
#pragma once

#include "direct.hpp"
#include "microkernel.hpp"
#include "pack.hpp"
#include "softmax.hpp"
#include "view.hpp"

namespace fa::FA_ISA {

// Query rows of one task: a multiple of every kTileRows. Each row tile reads a packed block again, from the second-level
// cache; 48 rows are as fast at 512 x 512 and 5 % slower where few rows meet many keys, 144 and 192 rows are no faster.
inline constexpr int64_t kBlockRows = 96;

// Floats from one score row to the next: an odd number of cache lines, as kQueryRow.
inline constexpr int64_t kScoreRow = kBlockKeys + 16;

// One key head of one sequence. `data` is null if its query rows are few: then it is not packed.
struct PackedHead {
  const Sequence* sequence;
  int64_t head;
  float* data;
  uint8_t* finite;  // one flag for each block of values
};

// Query rows [begin, end) of some heads that share a key head.
struct RowSpan {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t count() const { return head_count * per_head(); }
};

// Columns of a block that some row of a tile of kTileRows sees; begins at a panel.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
};

// The memory of one worker.
struct Scratch {
  float* queries;   // [kBlockRows][kQueryRow]
  float* scores;    // [kBlockRows][kScoreRow], then the probabilities in their place
  float* sums;      // [kBlockRows][value_columns]: sum of P V so far
  float* kept;      // [kDirectRows][value_columns]
  float* rows;      // kLanes converted rows of K, or one of query, value or bias
  float* max;       // [kBlockRows]: the largest score so far
  float* total;     // [kBlockRows]: sum of exp(score - max) so far
  float* part;      // [kBlockRows]: the same of this block
  float* shrink;    // [kBlockRows]: by this block, the factor of what was summed before
  View* views;      // [kBlockRows]
  Window* windows;  // [kBlockRows / kTileRows]
  uint8_t* hidden;  // [kScoreRow]
  uint8_t* empty;   // [kBlockRows]

  static size_t row_floats(const Problem& problem) {
    return static_cast<size_t>(
        larger(larger(problem.head_size * kLanes, problem.value_size), larger(kScoreRow, kLanes)));
  }
  static size_t bytes(const Problem& problem, const PackShape& shape) {
    const size_t columns = static_cast<size_t>(shape.value_columns());
    const size_t floats = kBlockRows * (kQueryRow + kScoreRow + columns + 4) + kDirectRows * columns +
                          row_floats(problem);
    return floats * sizeof(float) + kBlockRows * (sizeof(View) + sizeof(Window) + 1) + kScoreRow;
  }
  Scratch(void* memory, const Problem& problem, const PackShape& shape) {
    queries = static_cast<float*>(memory);
    scores = queries + kBlockRows * kQueryRow;
    sums = scores + kBlockRows * kScoreRow;
    kept = sums + kBlockRows * shape.value_columns();
    max = kept + kDirectRows * shape.value_columns();
    total = max + kBlockRows;
    part = total + kBlockRows;
    shrink = part + kBlockRows;
    rows = shrink + kBlockRows;
    views = reinterpret_cast<View*>(rows + row_floats(problem));
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    hidden = reinterpret_cast<uint8_t*>(windows + kBlockRows);
    empty = hidden + kScoreRow;
  }
};

class Tile {
 public:
  Tile(const Problem& problem, const PackShape& shape, const PackedHead& packed, const RowSpan& span,
       const Scratch& scratch)
      : problem_(problem), shape_(shape), packed_(packed), sequence_(*packed.sequence), span_(span),
        rows_(span.count()), columns_(shape.value_columns()), s_(scratch) {}

  void run() {
    read_queries();
    attend(true);
    int64_t empty_rows = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      s_.empty[r] = is_empty(r);
      empty_rows += s_.empty[r];
      write_statistics(r);
      if (s_.empty[r] == 0) write_row(r, problem_.nan_rows);
    }
    if (empty_rows > 0) write_empty_rows();
  }

 private:
  int64_t head_of(int64_t r) const { return span_.first_head + r / span_.per_head(); }
  int64_t index_of(int64_t r) const { return span_.begin + r % span_.per_head(); }

  const float* key_row(int64_t j) const {
    const int64_t at = sequence_.key + packed_.head * problem_.key.head + j * problem_.key.row;
    return as_floats(problem_.key.data, at, problem_.head_size, problem_.type, s_.rows);
  }
  const float* value_row(int64_t j) const {
    const int64_t at = sequence_.value + packed_.head * problem_.value.head + j * problem_.value.row;
    return as_floats(problem_.value.data, at, problem_.value_size, problem_.type, s_.rows);
  }

  void read_queries() {
    const int64_t size = problem_.head_size;
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t at = sequence_.query + head_of(r) * problem_.query.head + index_of(r) * problem_.query.row;
      float* out = s_.queries + r * kQueryRow;
      const float* q = as_floats(problem_.query.data, at, size, problem_.type, out);
      if (q != out) __builtin_memcpy(out, q, static_cast<size_t>(size) * sizeof(float));
    }
  }

  // ----------------------------------------------------------------------------------------------
  // The blocks of keys, one after another.

  // All rows over all their keys; `masked` false looks at neither the mask nor the band.
  void attend(bool masked) {
    for (int64_t r = 0; r < kBlockRows; ++r) {
      s_.max[r] = -kInfinity;
      s_.total[r] = 0;
    }
    for (int64_t n = 0; n < rows_ * columns_; ++n) s_.sums[n] = 0;
    KeyRange range{0, sequence_.key_length};
    if (masked) range = banded(sequence_, span_.begin, span_.end - 1);
    for (int64_t block = range.begin / kBlockKeys; block * kBlockKeys < range.end; ++block) {
      const int64_t first = block * kBlockKeys;
      const int64_t keys = smaller(kBlockKeys, sequence_.key_length - first);
      if (!look(first, keys, masked)) continue;
      if (packed_.data == nullptr) {
        attend_directly(first, keys);
      } else {
        attend_packed(block, first, keys);
      }
    }
  }

  // Fills views and windows; false if no row sees any of these keys.
  bool look(int64_t first, int64_t keys, bool masked) {
    const bool all_alike = !masked || same_view_for_all(problem_, sequence_, span_.head_count);
    bool seen = false;
    for (int64_t tile = 0; tile * kTileRows < rows_; ++tile) {
      Window window{keys, 0};
      const int64_t end = smaller(rows_, (tile + 1) * kTileRows);
      for (int64_t r = tile * kTileRows; r < end; ++r) {
        if (!masked) {
          s_.views[r] = {0, keys, nullptr};
        } else if (all_alike && r > 0) {
          s_.views[r] = s_.views[0];
        } else {
          s_.views[r] = view_of(problem_, sequence_, head_of(r), index_of(r), first, keys);
        }
        if (s_.views[r].empty()) continue;
        window.begin = smaller(window.begin, s_.views[r].begin / kPanel * kPanel);
        window.end = larger(window.end, s_.views[r].end);
      }
      s_.windows[tile] = window;
      seen = seen || !window.empty();
    }
    return seen;
  }

  void attend_packed(int64_t block, int64_t first, int64_t keys) {
    const float* packed_keys = packed_.data + shape_.block_offset(block);
    const float* packed_values = packed_keys + shape_.key_floats(keys);
    const int64_t size = problem_.head_size;
    for (int64_t c = 0; c < keys; c += kPanel) {
      for (int64_t r = 0; r < rows_; r += kTileRows) {
        const Window window = s_.windows[r / kTileRows];
        if (c < window.begin || c >= window.end) continue;
        multiply<kQueryRow, 1, false>(smaller(kTileRows, rows_ - r), s_.queries + r * kQueryRow, packed_keys + c * size,
                                      size, s_.scores + r * kScoreRow + c, kScoreRow, nullptr);
      }
    }
    soften_rows(first);
    if (packed_.finite[block] == 0) {
      add_values_carefully(first);
      return;
    }
    for (int64_t c = 0; c < columns_; c += kPanel) {
      for (int64_t r = 0; r < rows_; r += kTileRows) {
        const Window window = s_.windows[r / kTileRows];
        if (window.empty()) continue;
        multiply<kScoreRow, 1, true>(smaller(kTileRows, rows_ - r), s_.scores + r * kScoreRow + window.begin,
                                     packed_values + c * keys + window.begin * kPanel, window.end - window.begin,
                                     s_.sums + r * columns_ + c, columns_, s_.shrink + r);
      }
    }
  }

  void attend_directly(int64_t first, int64_t keys) {
    Window all{keys, 0};
    for (int64_t tile = 0; tile * kTileRows < rows_; ++tile) {
      all.begin = smaller(all.begin, s_.windows[tile].begin);
      all.end = larger(all.end, s_.windows[tile].end);
    }
    for (int64_t tile = 0; tile * kTileRows < rows_; ++tile) s_.windows[tile] = all;
    for (int64_t j = all.begin; j < all.end; ++j) {
      direct_scores(s_.queries, rows_, key_row(first + j), problem_.head_size, s_.scores + j, kScoreRow);
    }
    soften_rows(first);
    // Whether a value is inf or NaN shows only in the sums; then they are made again, carefully.
    __builtin_memcpy(s_.kept, s_.sums, static_cast<size_t>(rows_ * columns_) * sizeof(float));
    shrink_sums();
    for (int64_t j = all.begin; j < all.end; ++j) {
      direct_values(s_.scores + j, kScoreRow, rows_, value_row(first + j), problem_.value_size, s_.sums, columns_);
    }
    float check = 0;
    for (int64_t n = 0; n < rows_ * columns_; ++n) check += s_.sums[n] * 0.0f;
    if (check == 0) return;
    __builtin_memcpy(s_.sums, s_.kept, static_cast<size_t>(rows_ * columns_) * sizeof(float));
    add_values_carefully(first);
  }

  // For values that hold inf or NaN: a key that is not attended must not be read, for 0 * inf is NaN.
  void add_values_carefully(int64_t first) {
    shrink_sums();
    for (int64_t r = 0; r < rows_; ++r) {
      const View& view = s_.views[r];
      for (int64_t j = view.begin; j < view.end; ++j) {
        if (view.mask != nullptr && view.mask[j] != 0) continue;
        direct_values(s_.scores + r * kScoreRow + j, 0, 1, value_row(first + j), problem_.value_size,
                      s_.sums + r * columns_, 0);
      }
    }
  }

  void shrink_sums() {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t d = 0; d < columns_; ++d) s_.sums[r * columns_ + d] *= s_.shrink[r];
    }
  }

  // ----------------------------------------------------------------------------------------------
  // Scores to probabilities.

  void soften_rows(int64_t first) {
    for (int64_t r = 0; r < rows_; ++r) {
      const float before = s_.max[r];
      s_.part[r] = soften_row(r, first);
      s_.shrink[r] = before - exp_origin(s_.max[r]);
    }
    // Whole vectors: the memory has room, and what is computed beyond the last row is not used.
    for (int64_t r = 0; r < rows_; r += kLanes) {
      const Vec shrink = exp_nonpositive(load(s_.shrink + r));
      store(s_.shrink + r, shrink);
      store(s_.total + r, load(s_.total + r) * shrink + load(s_.part + r));
    }
  }

  // Gives the sum of the row's probabilities in this block.
  float soften_row(int64_t r, int64_t first) {
    const Window window = s_.windows[r / kTileRows];
    const View& view = s_.views[r];
    float* scores = s_.scores + r * kScoreRow;
    if (view.empty()) {
      for (int64_t c = window.begin; c < window.end; ++c) scores[c] = 0;
      return 0;
    }
    const float sum = soften_view(r, first, view, scores + view.begin);
    for (int64_t c = window.begin; c < view.begin; ++c) scores[c] = 0;
    for (int64_t c = view.end; c < window.end; ++c) scores[c] = 0;
    return sum;
  }

  float soften_view(int64_t r, int64_t first, const View& view, float* scores) {
    const int64_t count = view.end - view.begin;
    const float scale = problem_.scale;
    const bool inside = problem_.pse_inside_scale;
    float& max = s_.max[r];
    const uint8_t* hidden = hidden_keys(view);
    if (problem_.pse == nullptr) {
      if (hidden == nullptr) return soften_plain(scores, count, scale, max);
      return soften<false, true>(scores, count, scale, nullptr, false, hidden, max);
    }
    const float* bias = bias_row(r, first + view.begin, count);
    if (hidden == nullptr) return soften<true, false>(scores, count, scale, bias, inside, nullptr, max);
    return soften<true, true>(scores, count, scale, bias, inside, hidden, max);
  }

  // One byte for each key of the view, readable as whole vectors; null if the row sees them all.
  const uint8_t* hidden_keys(const View& view) {
    if (view.mask == nullptr) return nullptr;
    const int64_t count = view.end - view.begin;
    if (count % kLanes == 0) return view.mask + view.begin;
    __builtin_memcpy(s_.hidden, view.mask + view.begin, static_cast<size_t>(count));
    return s_.hidden;
  }

  // `count` floats, readable as whole vectors.
  const float* bias_row(int64_t r, int64_t first, int64_t count) {
    const int64_t at = sequence_.pse + head_of(r) * sequence_.pse_head +
                       pse_row_offset(problem_, sequence_, index_of(r)) + first * problem_.pse_column;
    if (problem_.pse_column == 0) {
      const float value = *as_floats(problem_.pse, at, 1, problem_.pse_type, s_.rows);
      for (int64_t c = 0; c < count; ++c) s_.rows[c] = value;
      return s_.rows;
    }
    const float* bias = as_floats(problem_.pse, at, count, problem_.pse_type, s_.rows);
    if (count % kLanes == 0 || bias == s_.rows) return bias;
    __builtin_memcpy(s_.rows, bias, static_cast<size_t>(count) * sizeof(float));
    return s_.rows;
  }

  // ----------------------------------------------------------------------------------------------
  // Results.

  // No key attended, as against attended keys whose scores are all -inf.
  bool is_empty(int64_t r) const {
    if (s_.max[r] != -kInfinity || is_nan(s_.total[r])) return false;
    for (int64_t first = 0; first < sequence_.key_length; first += kBlockKeys) {
      const int64_t keys = smaller(kBlockKeys, sequence_.key_length - first);
      if (!view_of(problem_, sequence_, head_of(r), index_of(r), first, keys).empty()) return false;
    }
    return true;
  }

  void write_row(int64_t r, NanRows rule) {
    float* sums = s_.sums + r * columns_;
    const float sum = s_.total[r];
    const bool all_infinite = sum == 0;  // only scores of -inf leave nothing behind
    if (all_infinite || is_nan(sum)) {
      const bool zero = rule == NanRows::zero || (rule == NanRows::infinite && all_infinite);
      for (int64_t d = 0; d < columns_; ++d) sums[d] = zero ? 0.0f : __builtin_nanf("");
    } else {
      const float factor = 1.0f / sum;
      for (int64_t d = 0; d < columns_; ++d) sums[d] *= factor;
    }
    put(r, sums);
  }

  void put(int64_t r, const float* row) {
    const int64_t at = sequence_.out + head_of(r) * problem_.out.head + index_of(r) * problem_.out.row;
    write_floats(problem_.out.data, at, row, problem_.value_size, problem_.type);
  }

  void write_statistics(int64_t r) {
    if (problem_.softmax_max == nullptr && problem_.softmax_sum == nullptr) return;
    float max = s_.max[r];
    float sum = s_.total[r];
    if (s_.empty[r] != 0) {
      max = -kLargest;
      sum = kLargest;
    } else if (is_nan(sum) && max != kInfinity) {
      max = sum;  // the maximum ignored a NaN score
    } else if (sum == 0) {
      sum = __builtin_nanf("");  // exp(-inf - -inf)
    }
    const int64_t at =
        sequence_.statistics + head_of(r) * sequence_.statistics_head + index_of(r) * sequence_.statistics_row;
    for (int64_t c = 0; c < kStatisticsWidth; ++c) {
      if (problem_.softmax_max != nullptr) problem_.softmax_max[at + c] = max;
      if (problem_.softmax_sum != nullptr) problem_.softmax_sum[at + c] = sum;
    }
  }

  void write_empty_rows() {
    const EmptyRows rule = problem_.empty_rows;
    if (rule == EmptyRows::unmasked) {
      attend(false);
      for (int64_t r = 0; r < rows_; ++r) {
        if (s_.empty[r] != 0) write_row(r, NanRows::nan);
      }
      return;
    }
    // Every row of `sums` is written out by now.
    float* row = s_.sums;
    const float fill = rule == EmptyRows::nan ? __builtin_nanf("") : 0.0f;
    for (int64_t d = 0; d < columns_; ++d) row[d] = fill;
    if (rule == EmptyRows::mean) mean_of_values(row, row + columns_);
    for (int64_t r = 0; r < rows_; ++r) {
      if (s_.empty[r] != 0) put(r, row);
    }
  }

  // Into `mean`, by way of sums of a block each: shorter sums lose less.
  void mean_of_values(float* mean, float* block) {
    const int64_t length = sequence_.key_length;
    const float one = 1.0f;
    for (int64_t first = 0; first < length; first += kBlockKeys) {
      for (int64_t d = 0; d < columns_; ++d) block[d] = 0;
      for (int64_t j = first; j < smaller(length, first + kBlockKeys); ++j) {
        direct_values(&one, 0, 1, value_row(j), problem_.value_size, block, 0);
      }
      for (int64_t d = 0; d < columns_; ++d) mean[d] += block[d];
    }
    for (int64_t d = 0; d < columns_; ++d) mean[d] /= static_cast<float>(length);
  }

  const Problem& problem_;
  const PackShape& shape_;
  const PackedHead& packed_;
  const Sequence& sequence_;
  const RowSpan span_;
  const int64_t rows_;
  const int64_t columns_;
  const Scratch& s_;
};

}  // namespace fa::FA_ISA
