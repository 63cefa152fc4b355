// LightningIndexer: computes the scores of all visible keys for a few rows at a time, then selects the best keys of each
// row.
//
// The keys of a sequence are packed once, in panels of kPanel keys. relu, weights and the sum over heads are applied to the
// registers that hold the products, so that the scores of a single head are never stored. With kPairs the numbers of queries
// and keys are bfloat16, two in each float, and the depth is half as long.
#pragma once

#include "score_block.hpp"
#include "scratch.hpp"
#include "top_k.hpp"

namespace fa::FA_ISA {

inline constexpr int64_t kIndexRows = 8;  // rows that use a panel while it is in the first-level cache

// out[kPanel] += sum over kRows heads of weights[head] relu(q[head] . k). The heads of a micro-tile are packed as
// [number][kRows].
template <int kRows, bool kPairs>
FA_INLINE void add_index_scores(const float* q, const float* keys, int64_t depth, const float* weights, float* out) {
  Vec sum[kRows][2] = {};
  for (int64_t d = 0; d < depth; ++d) {
    const Vec k0 = load(keys), k1 = load(keys + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = add_products<kPairs>(sum[r][0], q[r], k0);
      sum[r][1] = add_products<kPairs>(sum[r][1], q[r], k1);
    }
    q += kRows;
    keys += kPanel;
  }
  Vec out0 = load(out), out1 = load(out + kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    // A NaN stays: 0 > NaN is false.
    out0 += maximum(Vec{}, sum[r][0]) * weights[r];
    out1 += maximum(Vec{}, sum[r][1]) * weights[r];
  }
  store(out, out0);
  store(out + kLanes, out1);
}

// The same for `heads` from 1 to kMicroRows.
template <bool kPairs, int kRows = kMicroRows>
static void index_scores(int64_t heads, const float* q, const float* keys, int64_t depth, const float* weights, float* out) {
  if constexpr (kRows > 1) {
    if (heads < kRows) return index_scores<kPairs, kRows - 1>(heads, q, keys, depth, weights, out);
  }
  add_index_scores<kRows, kPairs>(q, keys, depth, weights, out);
}

// Heads of a micro-tile, such that all micro-tiles are nearly equal.
FA_INLINE int64_t tile_heads(int64_t heads) { return ceil_div(heads, ceil_div(heads, kMicroRows)); }

// Selects the keys of up to kIndexRows rows at a time, in the memory of one thread. `packed` are the keys of the sequence.
template <bool kPairs>
class RowSelection {
 public:
  RowSelection(const sparse::Selection& s, const Runtime& runtime, const float* packed, int64_t most)
      : s_(s), heads_(s.index.query.heads), depth_(GatheredRows<kPairs>::operand_floats(s.index.query.size)),
        tile_(tile_heads(heads_)), packed_(packed), row_floats_(ceil_div(most, kPanel) * kPanel),
        room_(smaller(s.count, most)),
        floats_(runtime, kIndexRows * (row_floats_ + heads_ * depth_ + heads_) + larger(s.index.query.size, s.count)),
        chosen_(runtime, 2 * room_) {}

  explicit operator bool() const { return floats_ && chosen_; }

  // Rows [first, last) of a sequence, at most kIndexRows.
  void run(const sparse::Sequence& sequence, int64_t first, int64_t last) {
    const int64_t rows = last - first;
    float* scores = floats_.data();
    float* queries = scores + kIndexRows * row_floats_;
    float* weights = queries + kIndexRows * heads_ * depth_;
    float* spare = weights + kIndexRows * heads_;
    const int64_t most = visible_keys(s_.index.batch, sequence, last - 1);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t token = sequence.query + first + i;
      pack(token, queries + i * heads_ * depth_, weights + i * heads_, spare);
      __builtin_memset(scores + i * row_floats_, 0, static_cast<size_t>(ceil_div(most, kPanel) * kPanel) * sizeof(float));
    }
    for (int64_t key = 0; key < most; key += kPanel) {
      for (int64_t i = 0; i < rows; ++i) {
        if (key >= visible_keys(s_.index.batch, sequence, first + i)) continue;
        for (int64_t h = 0; h < heads_; h += tile_) {
          index_scores<kPairs>(smaller(tile_, heads_ - h), queries + (i * heads_ + h) * depth_, packed_ + key * depth_,
                               depth_, weights + i * heads_ + h, scores + i * row_floats_ + key);
        }
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      list(sequence.query + first + i, scores + i * row_floats_, visible_keys(s_.index.batch, sequence, first + i), spare);
    }
  }

 private:
  // Packs the queries and weights of a row, micro-tile after micro-tile of heads.
  void pack(int64_t token, float* queries, float* weights, float* row) {
    for (int64_t h = 0; h < heads_; ++h) {
      const int64_t in_tile = smaller(tile_, heads_ - h / tile_ * tile_);
      float* to = queries + h / tile_ * tile_ * depth_ + h % tile_;
      read_operand<kPairs>(s_.index.query, token, h, row);
      for (int64_t d = 0; d < depth_; ++d) to[d * in_tile] = row[d];
    }
    const float* from = as_floats(s_.index.weights, token * heads_, heads_, s_.index.weight_type, weights);
    if (from != weights) __builtin_memcpy(weights, from, static_cast<size_t>(heads_) * sizeof(float));
  }

  // Writes the best keys of a row and their scores.
  void list(int64_t token, const float* scores, int64_t visible, float* values) {
    Candidate* chosen = chosen_.data();
    const uint32_t nan = s_.nan_first ? kNanFirst : kNanLast;
    const int64_t found = visible == 0 ? 0 : top_k(scores, visible, s_.count, nan, chosen, chosen + room_);
    if (s_.indices != nullptr) {
      int32_t* out = s_.indices + token * s_.count;
      for (int64_t n = 0; n < s_.count; ++n) out[n] = n < found ? chosen[n].place : -1;
    }
    if (s_.values != nullptr) {
      for (int64_t n = 0; n < s_.count; ++n) values[n] = n < found ? scores[chosen[n].place] : -kInfinity;
      write_floats(s_.values, token * s_.count, values, s_.count, s_.index.query.type);
    }
  }

  const sparse::Selection& s_;
  int64_t heads_, depth_, tile_;
  const float* packed_;
  int64_t row_floats_, room_;
  Scratch<float> floats_;
  Scratch<Candidate> chosen_;
};

template <bool kPairs>
static Outcome select_keys(const sparse::Selection& s, const Runtime& runtime) {
  Failure failure;
  const int64_t depth = GatheredRows<kPairs>::operand_floats(s.index.query.size);
  int64_t most = 1;
  for (int64_t i = 0; i < s.index.batch.count; ++i) most = larger(most, s.index.batch.sequences[i].keys);
  Scratch<float> packed(runtime, ceil_div(most, kPanel) * kPanel * depth);
  if (!packed) return Outcome::out_of_memory;
  for (int64_t i = 0; i < s.index.batch.count; ++i) {
    const sparse::Sequence& sequence = s.index.batch.sequences[i];
    auto pack = [&](int64_t first, int64_t last) {
      Scratch<float> row(runtime, s.index.query.size);
      if (!row) return failure.set();
      for (int64_t place = first; place < last; ++place) {
        float* to = packed.data() + place / kPanel * kPanel * depth + place % kPanel;
        if (place < sequence.keys) {
          read_operand<kPairs>(s.index.key, key_token(s.index.batch, sequence, place), 0, row.data());
          for (int64_t d = 0; d < depth; ++d) to[d * kPanel] = row.data()[d];
        } else {
          for (int64_t d = 0; d < depth; ++d) to[d * kPanel] = 0;
        }
      }
    };
    in_parallel(runtime, ceil_div(sequence.keys, kPanel) * kPanel, 16 * kPanel, pack);
    auto part = [&](int64_t first, int64_t last) {
      RowSelection<kPairs> rows(s, runtime, packed.data(), larger(sequence.keys, 1));
      if (!rows) return failure.set();
      rows.run(sequence, first, last);
    };
    in_parallel(runtime, sequence.queries, kIndexRows, part);
  }
  return failure.outcome();
}

static Outcome select_best_keys(const sparse::Selection& s, const Runtime& runtime) {
  if constexpr (kHasPairs) {
    if (s.index.key.type != Type::bfloat16 || s.index.key.size % 2 != 0) {
      return FA_OTHERS::sparse_kernels.select(s, runtime);
    }
  }
  return select_keys<kHasPairs>(s, runtime);
}

}  // namespace fa::FA_ISA
