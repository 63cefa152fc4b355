// A block of query rows against one block of keys after another: the tile of flash attention.
#pragma once

#include "microkernel.hpp"
#include "pack.hpp"
#include "softmax.hpp"
#include "view.hpp"

namespace fa::FA_ISA {

// Query rows of one task: a multiple of every kTileRows. 96 rows read a packed block of K and V (128 KB
// at head size 64) once for 96 * 256 scores, and their own scores and sums stay in the second-level cache.
inline constexpr int64_t kBlockRows = 96;

// Floats from one score row to the next: not a power of two, whose rows would share a cache set.
inline constexpr int64_t kScoreRow = kBlockKeys + 16;

// One key head of one sequence, packed.
struct PackedHead {
  const Sequence* sequence;
  int64_t head;
  float* data;
  uint8_t* finite;  // one flag for each block of values
};

// Query rows of one sequence that share a key head: rows [begin, end) of heads [first_head, last_head].
struct RowSpan {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t count() const { return head_count * per_head(); }
};

// The memory of one worker.
struct Scratch {
  float* queries;        // [kBlockRows / kTileRows][head_size][kTileRows]
  float* scores;         // [kBlockRows][kScoreRow]
  float* sums;           // [kBlockRows][value_columns]: sum of P V so far
  float* mean;           // [value_columns]
  float* row;            // one converted row of query, value or bias
  float* shrink;         // [kBlockRows]
  RowState* states;      // [kBlockRows]
  View* views;           // [kBlockRows]
  uint8_t* hidden;       // [kBlockKeys]
  uint8_t* empty;        // [kBlockRows]

  static size_t row_floats(const Problem& problem) {
    return static_cast<size_t>(larger(larger(problem.head_size, problem.value_size), kBlockKeys));
  }
  static size_t bytes(const Problem& problem, const PackShape& shape) {
    const size_t floats = kBlockRows * static_cast<size_t>(problem.head_size + kScoreRow + shape.value_columns() + 1) +
                          static_cast<size_t>(shape.value_columns()) + row_floats(problem);
    return floats * sizeof(float) + kBlockRows * (sizeof(RowState) + sizeof(View) + 1) + kBlockKeys;
  }
  Scratch(void* memory, const Problem& problem, const PackShape& shape) {
    views = static_cast<View*>(memory);
    states = reinterpret_cast<RowState*>(views + kBlockRows);
    queries = reinterpret_cast<float*>(states + kBlockRows);
    scores = queries + kBlockRows * problem.head_size;
    sums = scores + kBlockRows * kScoreRow;
    mean = sums + kBlockRows * shape.value_columns();
    shrink = mean + shape.value_columns();
    row = shrink + kBlockRows;
    hidden = reinterpret_cast<uint8_t*>(row + row_floats(problem));
    empty = hidden + kBlockKeys;
  }
};

class Tile {
 public:
  Tile(const Problem& problem, const PackShape& shape, const PackedHead& packed, const RowSpan& span,
       const Scratch& scratch)
      : problem_(problem), shape_(shape), packed_(packed), sequence_(*packed.sequence), span_(span), s_(scratch),
        columns_(shape.value_columns()) {}

  void run() {
    pack_queries();
    attend(true);
    int64_t empty_rows = 0;
    for (int64_t r = 0; r < span_.count(); ++r) {
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

  void pack_queries() {
    const int64_t size = problem_.head_size;
    const int64_t rows = span_.count();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = sequence_.query + head_of(r) * problem_.query.head + index_of(r) * problem_.query.row;
      const float* q = as_floats(problem_.query.data, at, size, problem_.type, s_.row);
      float* out = s_.queries + (r / kTileRows) * kTileRows * size + r % kTileRows;
      for (int64_t d = 0; d < size; ++d) out[d * kTileRows] = q[d];
    }
  }

  // All rows over all their keys; `masked` false looks at neither the mask nor the band.
  void attend(bool masked) {
    for (int64_t r = 0; r < span_.count(); ++r) s_.states[r] = RowState{};
    for (int64_t n = 0; n < span_.count() * columns_; ++n) s_.sums[n] = 0;
    KeyRange range{0, sequence_.key_length};
    if (masked) range = banded(sequence_, span_.begin, span_.end - 1);
    for (int64_t block = range.begin / kBlockKeys; block * kBlockKeys < range.end; ++block) {
      const int64_t first = block * kBlockKeys;
      const int64_t keys = smaller(kBlockKeys, sequence_.key_length - first);
      bool seen = false;
      for (int64_t r = 0; r < span_.count(); ++r) {
        s_.views[r] = masked ? view_of(problem_, sequence_, head_of(r), index_of(r), first, keys) : View{0, keys, nullptr};
        seen = seen || !s_.views[r].empty();
      }
      if (seen) attend_block(block, first, keys);
    }
  }

  void attend_block(int64_t block, int64_t first, int64_t keys) {
    const float* packed_keys = packed_.data + shape_.block_offset(block);
    const float* packed_values = packed_keys + shape_.key_floats(keys);
    const int64_t rows = span_.count();
    for (int64_t c = 0; c < keys; c += kPanel) {
      for (int64_t r = 0; r < rows; r += kTileRows) {
        multiply<1, kTileRows, false>(smaller(kTileRows, rows - r), s_.queries + r * problem_.head_size,
                                      packed_keys + c * problem_.head_size, problem_.head_size,
                                      s_.scores + r * kScoreRow + c, kScoreRow, nullptr);
      }
    }
    for (int64_t r = 0; r < rows; ++r) s_.shrink[r] = soften_row(r, first, keys);
    if (packed_.finite[block] == 0) {
      add_values_carefully(packed_values, keys);
      return;
    }
    for (int64_t c = 0; c < columns_; c += kPanel) {
      for (int64_t r = 0; r < rows; r += kTileRows) {
        multiply<kScoreRow, 1, true>(smaller(kTileRows, rows - r), s_.scores + r * kScoreRow, packed_values + c * keys,
                                     keys, s_.sums + r * columns_ + c, columns_, s_.shrink + r);
      }
    }
  }

  float soften_row(int64_t r, int64_t first, int64_t keys) {
    float* scores = s_.scores + r * kScoreRow;
    const View& view = s_.views[r];
    const int64_t padded = blocks_of(keys, kLanes) * kLanes;
    if (view.empty()) {
      for (int64_t c = 0; c < padded; ++c) scores[c] = 0;
      return 1.0f;
    }
    const uint8_t* hidden = hidden_keys(view, keys, padded);
    const float* bias = bias_row(r, first, keys, padded);
    const float scale = problem_.scale;
    const bool inside = problem_.pse_inside_scale;
    RowState& state = s_.states[r];
    if (bias == nullptr && hidden == nullptr) {
      return soften<false, false>(scores, padded, scale, nullptr, false, nullptr, state);
    }
    if (bias == nullptr) return soften<false, true>(scores, padded, scale, nullptr, false, hidden, state);
    if (hidden == nullptr) return soften<true, false>(scores, padded, scale, bias, inside, nullptr, state);
    return soften<true, true>(scores, padded, scale, bias, inside, hidden, state);
  }

  // Null if the row sees every key and the block ends with a whole vector.
  const uint8_t* hidden_keys(const View& view, int64_t keys, int64_t padded) {
    if (keys == padded) {
      if (view.open(keys)) return nullptr;
      if (view.begin == 0 && view.end == keys) return view.mask;
    }
    for (int64_t c = 0; c < padded; ++c) s_.hidden[c] = 1;
    for (int64_t c = view.begin; c < view.end; ++c) s_.hidden[c] = view.mask != nullptr ? view.mask[c] : 0;
    return s_.hidden;
  }

  const float* bias_row(int64_t r, int64_t first, int64_t keys, int64_t padded) {
    if (problem_.pse == nullptr) return nullptr;
    const int64_t at = sequence_.pse + head_of(r) * sequence_.pse_head +
                       pse_row_offset(problem_, sequence_, index_of(r)) + first * problem_.pse_column;
    if (problem_.pse_column == 0) {
      const float value = *as_floats(problem_.pse, at, 1, problem_.pse_type, s_.row);
      for (int64_t c = 0; c < padded; ++c) s_.row[c] = value;
      return s_.row;
    }
    const float* bias = as_floats(problem_.pse, at, keys, problem_.pse_type, s_.row);
    if (keys == padded || bias == s_.row) return bias;
    for (int64_t c = 0; c < keys; ++c) s_.row[c] = bias[c];
    return s_.row;
  }

  // For values that hold inf or NaN: a key that is not attended must not be read, for 0 * inf is NaN.
  void add_values_carefully(const float* values, int64_t keys) {
    const int64_t padded = blocks_of(keys, kLanes) * kLanes;
    for (int64_t r = 0; r < span_.count(); ++r) {
      if (s_.views[r].empty()) continue;
      float* sums = s_.sums + r * columns_;
      for (int64_t d = 0; d < columns_; ++d) sums[d] *= s_.shrink[r];
      const uint8_t* hidden = hidden_keys(s_.views[r], keys, padded);
      for (int64_t j = 0; j < keys; ++j) {
        if (hidden != nullptr && hidden[j] != 0) continue;
        const float p = s_.scores[r * kScoreRow + j];
        for (int64_t d = 0; d < columns_; ++d) {
          sums[d] += p * values[d / kPanel * kPanel * keys + j * kPanel + d % kPanel];
        }
      }
    }
  }

  // No key attended, as against attended keys whose scores are all -inf.
  bool is_empty(int64_t r) const {
    const RowState& state = s_.states[r];
    if (state.max != -kInfinity || is_nan(state.sum)) return false;
    return !view_any(r);
  }

  bool view_any(int64_t r) const {
    for (int64_t first = 0; first < sequence_.key_length; first += kBlockKeys) {
      const int64_t keys = smaller(kBlockKeys, sequence_.key_length - first);
      if (!view_of(problem_, sequence_, head_of(r), index_of(r), first, keys).empty()) return true;
    }
    return false;
  }

  void write_row(int64_t r, NanRows rule) {
    float* sums = s_.sums + r * columns_;
    const float sum = s_.states[r].sum;
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
    const RowState& state = s_.states[r];
    float max = state.max;
    float sum = state.sum;
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
    EmptyRows rule = problem_.empty_rows;
    if (sequence_.key_length == 0 && rule != EmptyRows::nan) rule = EmptyRows::zero;
    if (rule == EmptyRows::unmasked) {
      attend(false);
      for (int64_t r = 0; r < span_.count(); ++r) {
        if (s_.empty[r] != 0) write_row(r, NanRows::nan);
      }
      return;
    }
    const float fill = rule == EmptyRows::nan ? __builtin_nanf("") : 0.0f;
    for (int64_t d = 0; d < columns_; ++d) s_.mean[d] = fill;
    if (rule == EmptyRows::mean) mean_of_values();
    for (int64_t r = 0; r < span_.count(); ++r) {
      if (s_.empty[r] != 0) put(r, s_.mean);
    }
  }

  void mean_of_values() {
    const int64_t length = sequence_.key_length;
    for (int64_t first = 0; first < length; first += kBlockKeys) {
      const int64_t keys = smaller(kBlockKeys, length - first);
      const float* values = packed_.data + shape_.block_offset(first / kBlockKeys) + shape_.key_floats(keys);
      for (int64_t d = 0; d < columns_; ++d) {
        const float* column = values + d / kPanel * kPanel * keys + d % kPanel;
        float sum = 0;  // of one block: shorter sums lose less
        for (int64_t j = 0; j < keys; ++j) sum += column[j * kPanel];
        s_.mean[d] += sum;
      }
    }
    for (int64_t d = 0; d < columns_; ++d) s_.mean[d] /= static_cast<float>(length);
  }

  const Problem& problem_;
  const PackShape& shape_;
  const PackedHead& packed_;
  const Sequence& sequence_;
  const RowSpan span_;
  const Scratch& s_;
  const int64_t columns_;
};

}  // namespace fa::FA_ISA
