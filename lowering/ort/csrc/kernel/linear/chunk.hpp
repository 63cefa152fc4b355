// The chunked form: the tokens of a chunk are computed together, by matrix products. With G_i, the sum of the log decays of
// the chunk's tokens up to i, and S_0, the state before the chunk,
//
//     V' = (I - A)^-1 diag(beta) (V - (K e^G) S_0)  A_ij = -beta_i sum over d of k_id k_jd e^(G_id - G_jd) for j < i, else 0
//     O  = (Q e^G) S_0 + P V'                       P_ij = sum over d of q_id k_jd e^(G_id - G_jd) for j <= i, else 0
//     S  = diag(e^G_C) S_0 + (K e^(G_C - G))^T V'
//
// (Yang et al., "Gated Delta Networks", 2024, and "Parallelizing Linear Transformers with the Delta Rule", 2024). Without a
// correction, V' is V. A, P and the decayed keys and queries are made once for a head; then each panel of the state is computed by itself.
//
// No factor is e^-G, which would overflow. With one decay for each head, e^(G_i - G_j) is a product of decays: a row of these
// numbers is the row before it times the decay of token i. With a decay for each key dimension, the keys before a block of
// kBlock tokens are decayed up to where the block begins, and the rows of the block from there on.
//
// The result of a product is NaN at other places than in the recurrence: 0 times NaN of a later token is NaN. So where a
// number of a panel is not finite, the recurrence computes the panel again.
//
// With kPairs the products that read a state or make one, and A and P of one decay for each head, are products of bfloat16 two at a
// time (pairs.hpp). A V', A and P with a decay for each key dimension, and all sums are of floats.
#pragma once

#include "../transpose.hpp"
#include "product.hpp"
#include "state.hpp"

namespace fa::FA_ISA::lin {

// Tokens of a block, which are a vector of columns.
inline constexpr int64_t kBlock = kLanes;

// A panel of the state before and after a chunk, its values and its results. Each line has kPanel numbers.
struct Panel {
  const float* before;
  float* after;
  const float* values;
  int64_t value_stride;  // floats between tokens
  float* out;
  int64_t out_stride;
  int64_t out_head;  // floats between query heads of the group
  float scale;
};

template <Gate kGate, bool kDelta, bool kPairs>
class Chunk {
 public:
  Chunk(const Shape& shape, const Scratch& scratch, int64_t count, bool reads)
      : shape_(shape), s_(scratch), count_(count), reads_(reads) {
    prefetches_.clear();
  }

  // Makes A, P, and the decayed keys, also transposed, and queries.
  void prepare() {
    transpose_keys();
    if constexpr (kGate == Gate::key) {
      decay_by_blocks();
    } else {
      find_decays();
      if constexpr (kPairs) {
        narrow_lines_to_pairs<kTokenRow>(s_.columns, kTokenRow, shape_.keys, s_.key_pairs);
        round_rows();
      }
      multiply_tokens(s_.keys, kDelta, s_.triangle);
      for (int64_t n = 0; n < shape_.group && reads_; ++n) {
        multiply_tokens(s_.queries + n * kChunk * shape_.row, true, s_.weights + n * kChunk * kTokenRow);
      }
    }
    for (int64_t i = 0; i < count_; ++i) weigh(i);
    if constexpr (kGate == Gate::head) decay_to_end();
    if constexpr (kPairs) {
      if constexpr (kGate == Gate::key) round_rows();
      round_columns_and_weights();
    }
  }

  // Computes a panel. False if a number is not finite.
  bool run(const Panel& panel) {
    FiniteCheck check;
    if constexpr (kPairs) narrow_lines_to_pairs(panel.before, kPanel, shape_.keys, s_.state_pairs);
    if constexpr (kDelta) each_tile(count_, Solve{*this, panel, check});
    if constexpr (kPairs) narrow_lines_to_pairs(values_of(panel), value_stride(panel), count_, s_.value_pairs);
    for (int64_t n = 0; n < shape_.group && reads_; ++n) each_tile(count_, Read{*this, panel, n, check});
    each_tile(shape_.keys, Write{*this, panel, check});
    return check.holds();
  }

 private:
  static int64_t rows_from(int64_t first, int64_t end) { return smaller(kMicroRows, end - first); }

  void transpose_keys() {
    for (int64_t t = 0; t < count_; t += kLanes) {
      const float* from[kLanes];  // rows beyond the last token repeat it, unused
      for (int64_t n = 0; n < kLanes; ++n) from[n] = s_.keys + smaller(t + n, count_ - 1) * shape_.row;
      for (int64_t d = 0; d < shape_.row; d += kLanes) transpose_square(from, d, s_.columns + d * kTokenRow + t, kTokenRow);
    }
  }

  // e^(G_i - G_j) for one decay a head, 0 for j > i, and e^G_i.
  void find_decays() {
    float start = 1;
    for (int64_t i = 0; i < count_; ++i) {
      const float factor = kGate == Gate::none ? 1.0f : s_.factors[i];
      float* row = s_.decays + i * kTokenRow;
      for (int64_t j = 0; j < kTokenRow; j += kLanes) store(row + j, i == 0 ? Vec{} : load(row - kTokenRow + j) * factor);
      row[i] = 1;
      s_.from_start[i] = start *= factor;
    }
  }

  // out_ij = row i . key j for j <= i.
  void multiply_tokens(const float* rows, bool wanted, float* out) {
    for (int64_t i = 0; i < count_ && wanted; i += kMicroRows) {
      const int64_t count = rows_from(i, count_);
      for (int64_t j = 0; j < i + count; j += kPanel) {
        multiply_columns(count, rows + i * shape_.row, j, i + count, out + i * kTokenRow);
      }
    }
  }

  // The same for keys of a panel from j on, up to `end`.
  void multiply_columns(int64_t rows, const float* from, int64_t j, int64_t end, float* out) {
    // With a decay for each key dimension, keys that are not rounded yet are decayed between two blocks.
    constexpr bool kRounded = kPairs && kGate != Gate::key;
    const RowMajor a{from, shape_.row};
    const PanelB b{(kRounded ? s_.key_pairs : s_.columns) + j, kTokenRow};
    const Output c{out + j, kTokenRow};
    const int64_t depth = kRounded ? depth_of(shape_.keys) : shape_.keys;
    if (end - j > kLanes) multiply<2, Beta::zero, kRounded>(rows, a, b, depth, c, prefetches_);
    else multiply<1, Beta::zero, kRounded>(rows, a, b, depth, c, prefetches_);
  }

  // Gives A and P of token i their decays, unless they have them, and A its sign and beta. P is 0 for later tokens.
  void weigh(int64_t i) const {
    const float beta = kDelta ? -s_.betas[i] : 0.0f;
    if constexpr (kDelta) s_.from_values[i] = kGate == Gate::key ? beta : beta * s_.from_start[i];
    float* triangle = s_.triangle + i * kTokenRow;
    const float* decays = s_.decays + i * kTokenRow;
    for (int64_t j = 0; j < i && kDelta; j += kLanes) {
      const Vec x = load(triangle + j) * beta;
      store(triangle + j, kGate == Gate::key ? x : x * load(decays + j));
    }
    for (int64_t n = 0; n < shape_.group && reads_; ++n) {
      float* weights = s_.weights + (n * kChunk + i) * kTokenRow;
      for (int64_t j = 0; j < kTokenRow; j += kLanes) {
        const Vec x = load(weights + j);
        const Vec decayed = kGate == Gate::key ? x : x * load(decays + j);
        // Behind the last token nobody wrote a number. With a decay for each key dimension, or as half of a pair, it is read.
        store(weights + j, kGate == Gate::key || kPairs ? (Vec)((IntVec)decayed & first_lanes(i + 1 - j)) : decayed);
      }
    }
  }

  // Decays the columns to the end of the chunk.
  void decay_to_end() const {
    const float* to_end = s_.decays + (count_ - 1) * kTokenRow;
    for (int64_t d = 0; d < shape_.keys; ++d) {
      float* column = s_.columns + d * kTokenRow;
      for (int64_t j = 0; j < count_; j += kLanes) store(column + j, load(column + j) * load(to_end + j));
    }
  }

  // Rounds keys and queries to pairs.
  void round_rows() const {
    for (int64_t i = 0; i < count_; ++i) {
      narrow_vectors_to_pairs(s_.keys + i * shape_.row, shape_.row);
      for (int64_t n = 0; n < shape_.group && reads_; ++n) {
        narrow_vectors_to_pairs(s_.queries + (n * kChunk + i) * shape_.row, shape_.row);
      }
    }
  }

  // The same for the other operands. A column without a token repeats one, and meets a value of 0.
  void round_columns_and_weights() const {
    for (int64_t d = 0; d < shape_.keys; ++d) narrow_vectors_to_pairs(s_.columns + d * kTokenRow, kTokenRow);
    for (int64_t n = 0; n < shape_.group && reads_; ++n) {
      for (int64_t i = 0; i < count_; ++i) narrow_vectors_to_pairs(s_.weights + (n * kChunk + i) * kTokenRow, kTokenRow);
    }
  }

  // For a decay for each key dimension: block after block.
  void decay_by_blocks() {
    for (int64_t d = 0; d < shape_.row; ++d) s_.from_start[d] = 1;
    for (int64_t begin = 0; begin < count_; begin += kBlock) {
      const int64_t end = smaller(count_, begin + kBlock);
      for (int64_t i = begin; i < end; ++i) multiply_in_block(i, begin);
      decay_rows(begin, end);
      for (int64_t i = begin; i < end && begin > 0; i += kMicroRows) {
        const int64_t rows = rows_from(i, end);
        for (int64_t j = 0; j < begin; j += kPanel) multiply_all(i, rows, j, begin);
      }
      decay_columns(begin, end);
    }
  }

  // A and P of token i with the tokens of its block. The columns of these tokens are decayed by token i.
  void multiply_in_block(int64_t i, int64_t begin) {
    const IntVec earlier = first_lanes(i - begin);
    const float* factors = s_.factors + i * shape_.row;
    const float* key = s_.keys + i * shape_.row;
    float* columns = s_.columns + begin;
    const float* query = s_.queries + i * shape_.row;
    Vec of_key[2] = {}, of_query[2] = {};  // of even and odd dimensions
    for (int64_t d = 0; d < shape_.row; d += 2) {
#pragma GCC unroll 2
      for (int64_t odd = 0; odd < 2; ++odd) {
        float* at = columns + (d + odd) * kTokenRow;
        const Vec column = load(at) * (earlier ? splat(factors[d + odd]) : splat(1.0f));
        store(at, column);
        if constexpr (kDelta) of_key[odd] += column * key[d + odd];
        of_query[odd] += column * query[d + odd];
      }
    }
    if constexpr (kDelta) store(s_.triangle + i * kTokenRow + begin, of_key[0] + of_key[1]);
    store(s_.weights + i * kTokenRow + begin, of_query[0] + of_query[1]);
    for (int64_t n = 1; n < shape_.group && reads_; ++n) {
      query += kChunk * shape_.row;
      Vec sum{};
      for (int64_t d = 0; d < shape_.row; ++d) sum += load(columns + d * kTokenRow) * query[d];
      store(s_.weights + (n * kChunk + i) * kTokenRow + begin, sum);
    }
  }

  // Decays keys and queries of a block from where it begins.
  void decay_rows(int64_t begin, int64_t end) {
    for (int64_t d = 0; d < shape_.row; d += kLanes) {
      Vec decay = splat(1.0f);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = i * shape_.row + d;
        decay *= load(s_.factors + at);
        if constexpr (kDelta) store(s_.keys + at, load(s_.keys + at) * decay);
        for (int64_t n = 0; n < shape_.group && reads_; ++n) {
          float* query = s_.queries + n * kChunk * shape_.row + at;
          store(query, load(query) * decay);
        }
      }
      store(s_.in_block + d, decay);
    }
  }

  // A and P of rows from token i on with the keys of a panel before the block.
  void multiply_all(int64_t i, int64_t rows, int64_t j, int64_t begin) {
    const int64_t at = i * shape_.row;
    if constexpr (kDelta) multiply_columns(rows, s_.keys + at, j, begin, s_.triangle + i * kTokenRow);
    for (int64_t n = 0; n < shape_.group && reads_; ++n) {
      multiply_columns(rows, s_.queries + n * kChunk * shape_.row + at, j, begin, s_.weights + (n * kChunk + i) * kTokenRow);
    }
  }

  // Decays the columns before the block up to its end, and its rows from the start of the chunk.
  void decay_columns(int64_t begin, int64_t end) {
    for (int64_t d = 0; d < shape_.row && begin > 0; ++d) {
      const float decay = s_.in_block[d];
      float* column = s_.columns + d * kTokenRow;
      for (int64_t j = 0; j < begin; j += kLanes) store(column + j, load(column + j) * decay);
    }
    for (int64_t d = 0; d < shape_.row; d += kLanes) {
      const Vec start = load(s_.from_start + d);
      for (int64_t i = begin; i < end && begin > 0; ++i) {
        const int64_t at = i * shape_.row + d;
        if constexpr (kDelta) store(s_.keys + at, load(s_.keys + at) * start);
        for (int64_t n = 0; n < shape_.group && reads_; ++n) {
          float* query = s_.queries + n * kChunk * shape_.row + at;
          store(query, load(query) * start);
        }
      }
      store(s_.from_start + d, start * load(s_.in_block + d));
    }
  }

  // V' from V, by forward substitution: block after block of rows.
  struct Solve {
    const Chunk& chunk;
    const Panel& panel;
    FiniteCheck& check;

    template <int kRows>
    [[gnu::noinline]] void run(int64_t i) {
      const Shape& shape = chunk.shape_;
      const Scratch& s = chunk.s_;
      const float* triangle = s.triangle + i * kTokenRow;
      auto tile = Tile<kRows>::zero();
      tile.template add<kPairs>({s.keys + i * shape.row, shape.row}, chunk.state_of(panel), depth_of(shape.keys));
      tile.scale(s.from_values + i);
      tile.add_scaled(panel.values + i * panel.value_stride, panel.value_stride, s.betas + i, 1);
      tile.add({triangle, kTokenRow}, {s.values}, i);
      tile.substitute(triangle + i, kTokenRow);
      tile.store_to(s.values + i * kPanel, kPanel, check);
    }
  };

  // O of query head n of the group.
  struct Read {
    const Chunk& chunk;
    const Panel& panel;
    int64_t n;
    FiniteCheck& check;

    template <int kRows>
    [[gnu::noinline]] void run(int64_t i) {
      const Shape& shape = chunk.shape_;
      const Scratch& s = chunk.s_;
      const int64_t token = n * kChunk + i;
      auto tile = Tile<kRows>::zero();
      tile.template add<kPairs>({s.queries + token * shape.row, shape.row}, chunk.state_of(panel), depth_of(shape.keys));
      if constexpr (kGate == Gate::head) tile.scale(s.from_start + i);
      tile.template add<kPairs>({s.weights + token * kTokenRow, kTokenRow}, chunk.operand_of(panel), depth_of(i + kRows));
      tile.scale(&panel.scale, 0);
      tile.store_to(panel.out + n * panel.out_head + i * panel.out_stride, panel.out_stride, check);
    }
  };

  // The state after the chunk.
  struct Write {
    const Chunk& chunk;
    const Panel& panel;
    FiniteCheck& check;

    template <int kRows>
    [[gnu::noinline]] void run(int64_t d) {
      const Scratch& s = chunk.s_;
      auto tile = Tile<kRows>::scaled(panel.before + d * kPanel, kPanel, s.from_start + (kGate == Gate::key ? d : chunk.count_ - 1),
                                      kGate == Gate::key ? 1 : 0);
      tile.template add<kPairs>({s.columns + d * kTokenRow, kTokenRow}, chunk.operand_of(panel), depth_of(chunk.count_));
      tile.store_to(panel.after + d * kPanel, kPanel, check);
    }
  };

  // V'
  const float* values_of(const Panel& panel) const { return kDelta ? s_.values : panel.values; }
  static int64_t value_stride(const Panel& panel) { return kDelta ? kPanel : panel.value_stride; }

  // The state and V' as operands of the products, and the depth of a product of `count` numbers.
  PanelB state_of(const Panel& panel) const {
    if constexpr (kPairs) return {s_.state_pairs};
    return {panel.before};
  }
  PanelB operand_of(const Panel& panel) const {
    if constexpr (kPairs) return {s_.value_pairs};
    return {values_of(panel), value_stride(panel)};
  }
  static int64_t depth_of(int64_t count) { return kPairs ? ceil_div(count, 2) : count; }

  const Shape& shape_;
  const Scratch& s_;
  const int64_t count_;
  const bool reads_;
  PrefetchQueue prefetches_;
};

}  // namespace fa::FA_ISA::lin
