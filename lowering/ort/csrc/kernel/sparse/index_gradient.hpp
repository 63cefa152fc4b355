// LightningIndexerGrad and SparseLightningIndexerGradKLLoss: the rows of a chunk compute dS, dq and dw; then scatter.hpp
// adds their dk. The gradient of an index score is given, or it is the difference of the indexer's distribution and
// attention's.
#pragma once

#include "gradient.hpp"

namespace fa::FA_ISA {

// How many listed keys a row uses. All of them are keys of its sequence.
FA_INLINE int64_t listed_keys(const sparse::IndexGradient& g, const sparse::Sequence& sequence, int64_t row) {
  if (!g.index.batch.causal) return g.lists.count;
  return smaller(g.lists.count, visible_keys(g.index.batch, sequence, row));
}

// Of the two kinds of numbers of a row, the first are dS, [head][key] in blocks of this many floats. The second are a number
// for each key, p or the given gradient of its score.
template <class Layout>
FA_INLINE int64_t index_block_floats(int64_t heads) {
  return Layout::padded_heads(heads) * kGatherKeys;
}

// Attention's distribution p over the listed keys: the mean of its heads' probabilities. With sinks it is the sum of the
// probabilities divided by what the sinks leave of the heads, so that p adds up to 1. If that is less than kLeastLeft of the
// heads, the difference has lost its digits to the rounding of the statistics. The sum is then divided by its own total.
template <class Layout>
class RowTarget {
 public:
  RowTarget(const sparse::IndexGradient& g, const Runtime& runtime)
      : a_(*g.attention), heads_(a_.query.heads), padded_heads_(Layout::padded_heads(heads_)),
        floats_(runtime, Layout::query_floats(heads_, a_.query.numbers()) + GatheredRows<Layout::kPairs>::floats(a_.key) +
                padded_heads_ * kGatherKeys + 3 * padded_heads_ + a_.query.numbers()),
        keys_(a_.key) {
    if (!floats_) return;
    query_ = floats_.data();
    key_copies_ = query_ + Layout::query_floats(heads_, a_.query.numbers());
    scores_ = key_copies_ + GatheredRows<Layout::kPairs>::floats(a_.key);
    max_ = scores_ + padded_heads_ * kGatherKeys;
    inverse_sum_ = max_ + padded_heads_;
    block_max_ = inverse_sum_ + padded_heads_;
    row_ = block_max_ + padded_heads_;
  }

  explicit operator bool() const { return static_cast<bool>(floats_); }

  // Writes p beside the row's tokens.
  void run(const sparse::Sequence& sequence, int64_t row, const ListedRow& listed, const int64_t*) {
    float* out = listed.weights[1];
    Layout::pack_query(a_.query, listed.token, 0, heads_, query_, row_);
    const int64_t statistics = sequence.statistics + row * heads_;
    double heads = static_cast<double>(heads_);
    for (int64_t h = 0; h < heads_ && a_.sinks != nullptr; ++h) {
      heads -= __builtin_exp(double{a_.sinks[h]} - a_.softmax_max[statistics + h]) / a_.softmax_sum[statistics + h];
    }
    const bool sinks_take_all = a_.sinks != nullptr && heads < sparse::kLeastLeft * static_cast<double>(heads_);
    for (int64_t h = 0; h < padded_heads_; ++h) {
      max_[h] = h < heads_ ? a_.softmax_max[statistics + h] : 0;
      inverse_sum_[h] = h < heads_ ? static_cast<float>(1.0 / (a_.softmax_sum[statistics + h] * heads)) : 0;
    }
    const Vec scale = splat(a_.scale);
    float log_max = 0;
    if (sinks_take_all) {
      log_max = -kInfinity;
      subtract_log_sums(statistics);
      each_block(listed, [&](int64_t, int64_t count) {
        Layout::each(scores_, heads_, count, [&](Vec s, int64_t h, int64_t) {
          return rounded(s * scale) - Layout::of_heads(max_, h);
        });
        Layout::largest(scores_, heads_, count, block_max_);
        for (int64_t h = 0; h < heads_; ++h)
          log_max = block_max_[h] > log_max || is_nan(block_max_[h]) ? block_max_[h] : log_max;
      });
    }
    each_block(listed, [&](int64_t first, int64_t count) {
      Layout::over_heads(scores_, heads_, count, out + first, [&](Vec s, int64_t h) {
        return exp_any((rounded(s * scale) - Layout::of_heads(max_, h)) - log_max) * Layout::of_heads(inverse_sum_, h);
      });
    });
    if (sinks_take_all) normalise(listed.count, out);
  }

 private:
  // Calls f(first, count) for each block of keys, with their products in scores_.
  template <class F>
  void each_block(const ListedRow& listed, F f) {
    for (int64_t first = 0; first < listed.count; first += kGatherKeys) {
      const int64_t count = smaller(kGatherKeys, listed.count - first);
      keys_.gather(listed.tokens + first, count, 0, key_copies_);
      const int64_t next = smaller(kGatherKeys, listed.count - first - count);
      prefetch(a_.key, listed.tokens + first + count, next, 0, !GatheredRows<Layout::kPairs>::in_place(a_.key));
      Layout::scores(query_, heads_, keys_, a_.key.numbers(), count, scores_);
      f(first, count);
    }
  }

  // Sets max_ to what turns a score into the logarithm of its probability by subtraction, less the smallest such number. The
  // numbers may be large, and only their differences matter.
  void subtract_log_sums(int64_t statistics) {
    const auto of_head = [&](int64_t h) {
      return a_.softmax_max[statistics + h] + __builtin_log(double{a_.softmax_sum[statistics + h]});
    };
    double lowest = of_head(0);
    for (int64_t h = 1; h < heads_; ++h) lowest = of_head(h) < lowest ? of_head(h) : lowest;
    for (int64_t h = 0; h < heads_; ++h) {
      max_[h] = static_cast<float>(of_head(h) - lowest);
      inverse_sum_[h] = 1;
    }
  }

  static void normalise(int64_t count, float* out) {
    double sum = 0;
    for (int64_t j = 0; j < count; ++j) sum += out[j];
    for (int64_t j = 0; j < count; ++j) out[j] = static_cast<float>(out[j] / sum);
  }

  const sparse::Attention& a_;
  int64_t heads_, padded_heads_;
  Scratch<float> floats_;
  GatheredRows<Layout::kPairs> keys_;
  float *query_ = nullptr, *key_copies_ = nullptr, *scores_ = nullptr, *max_ = nullptr, *inverse_sum_ = nullptr,
        *block_max_ = nullptr, *row_ = nullptr;
};

// Computes dS, dq and dw of rows of one call, one after the other, in the memory of one thread.
template <class Layout>
class RowIndexGradient {
 public:
  RowIndexGradient(const sparse::IndexGradient& g, const Runtime& runtime)
      : g_(g), heads_(g.index.query.heads), padded_heads_(Layout::padded_heads(heads_)), depth_(g.index.query.size),
        columns_(columns_of(depth_)), step_(index_block_floats<Layout>(heads_)),
        floats_(runtime, Layout::query_floats(heads_, depth_) + GatheredRows<Layout::kPairs>::floats(g.index.key) +
                padded_heads_ * columns_ + Layout::weighted_sum_floats(heads_) + 3 * padded_heads_ + depth_ +
                ceil_div(g.lists.count, kGatherKeys) * kGatherKeys),
        keys_(g.index.key) {
    if (!floats_) return;
    query_ = floats_.data();
    key_copies_ = query_ + Layout::query_floats(heads_, depth_);
    pairs_ = key_copies_ + GatheredRows<Layout::kPairs>::floats(g.index.key);
    d_query_ = pairs_ + Layout::weighted_sum_floats(heads_);
    weights_ = d_query_ + padded_heads_ * columns_;
    d_weights_ = weights_ + padded_heads_;
    ones_ = d_weights_ + padded_heads_;
    row_ = ones_ + padded_heads_;
    scores_ = row_ + depth_;
  }

  explicit operator bool() const { return static_cast<bool>(floats_); }

  // Returns what the row adds to the loss, or 0 if there is none.
  float run(const ListedRow& listed) {
    const auto& index = g_.index;
    Layout::pack_query(index.query, listed.token, 0, heads_, query_, row_);
    for (int64_t h = 0; h < padded_heads_; ++h) {
      weights_[h] = d_weights_[h] = 0;
      ones_[h] = 1;
    }
    const float* given = as_floats(index.weights, listed.token * heads_, heads_, index.weight_type, weights_);
    if (given != weights_) __builtin_memcpy(weights_, given, static_cast<size_t>(heads_) * sizeof(float));
    for (int64_t i = 0; i < heads_ * columns_; ++i) d_query_[i] = 0;
    float loss = 0;
    if (g_.attention != nullptr) {
      for (int64_t first = 0; first < listed.count; first += kGatherKeys) {
        products(listed, first);
        Layout::over_heads(block(listed, first), heads_, count(listed, first), scores_ + first,
                           [&](Vec r, int64_t h) { return r * Layout::of_heads(weights_, h); });
      }
      loss = loss_and_difference(listed);
    }
    for (int64_t first = 0; first < listed.count; first += kGatherKeys) {
      float* r = block(listed, first);
      float* back = listed.weights[1] + first;
      if (g_.attention != nullptr) {
        prefetch_next_block(listed, first);
        keys_.gather(listed.tokens + first, count(listed, first), 0, key_copies_);
      } else {
        products(listed, first);
      }
      Layout::dot_keys(r, back, heads_, count(listed, first), d_weights_);
      Layout::each(r, heads_, count(listed, first), [&](Vec x, int64_t h, int64_t place) {
        return clear_where(x <= 0.0f, Layout::of_keys(back, place) * Layout::of_heads(weights_, h));  // a NaN stays
      });
      Layout::weighted_sum(r, heads_, keys_, depth_, count(listed, first), d_query_, ones_, pairs_);
      Layout::pack_weights(r, heads_, count(listed, first));
    }
    for (int64_t h = 0; h < heads_; ++h) {
      write_numbers(g_.query, nullptr, index.query, listed.token * heads_ + h, d_query_ + h * columns_);
    }
    if (g_.weights != nullptr) write_floats(g_.weights, listed.token * heads_, d_weights_, heads_, index.weight_type);
    return loss;
  }

 private:
  float* block(const ListedRow& listed, int64_t first) const { return listed.weights[0] + first / kGatherKeys * step_; }
  static int64_t count(const ListedRow& listed, int64_t first) { return smaller(kGatherKeys, listed.count - first); }

  void prefetch_next_block(const ListedRow& listed, int64_t first) const {
    const int64_t end = first + count(listed, first);
    prefetch(g_.index.key, listed.tokens + end, smaller(kGatherKeys, listed.count - end), 0, true);
  }

  // relu of the products with the keys of a block. The keys stay gathered.
  void products(const ListedRow& listed, int64_t first) {
    prefetch_next_block(listed, first);
    keys_.gather(listed.tokens + first, count(listed, first), 0, key_copies_);
    Layout::scores(query_, heads_, keys_, depth_, count(listed, first), block(listed, first));
    Layout::each(block(listed, first), heads_, count(listed, first),
                 [](Vec x, int64_t, int64_t) { return maximum(Vec{}, x); });
  }

  // Returns the loss of the row. p becomes y - p.
  float loss_and_difference(const ListedRow& listed) {
    float top = -kInfinity;
    for (int64_t j = 0; j < listed.count; ++j) top = scores_[j] > top ? scores_[j] : top;
    const float floor = g_.floor;
    double sum = 0, loss = 0, mass = 0;
    // Without a floor the loss is computed from the scores: a probability may be too small for a float when its logarithm is
    // not.
    for (int64_t j = 0; floor == 0 && j < listed.count; ++j) {
      const float p = listed.weights[1][j];
      if (p == 0) continue;
      mass += p;
      loss += p * (__builtin_log(p) - (scores_[j] - top));
    }
    for (int64_t j = 0; j < listed.count; j += kLanes) {
      store(scores_ + j, exp_nonpositive(load(scores_ + j) - splat(top)));
      for (int64_t n = j; n < smaller(j + kLanes, listed.count); ++n) sum += scores_[n];
    }
    if (floor == 0 && mass != 0) loss += mass * __builtin_log(sum);
    for (int64_t j = 0; j < listed.count; ++j) {
      float& p = listed.weights[1][j];
      const float y = static_cast<float>(scores_[j] / sum);
      const float p_floor = p < floor ? floor : p, y_floor = y < floor ? floor : y;  // a NaN stays
      if (floor != 0) loss += p_floor * (__builtin_log(p_floor) - __builtin_log(y_floor));
      p = y - p;
    }
    return static_cast<float>(loss);
  }

  const sparse::IndexGradient& g_;
  int64_t heads_, padded_heads_, depth_, columns_, step_;
  Scratch<float> floats_;
  GatheredRows<Layout::kPairs> keys_;
  float *query_ = nullptr, *key_copies_ = nullptr, *pairs_ = nullptr, *d_query_ = nullptr, *weights_ = nullptr,
        *d_weights_ = nullptr, *ones_ = nullptr, *row_ = nullptr, *scores_ = nullptr;
};

// The given gradients of a row's scores, in the order of its tokens.
class GivenGradients {
 public:
  GivenGradients(const sparse::IndexGradient& g, const Runtime& runtime) : g_(g), floats_(runtime, g.lists.count) {}

  explicit operator bool() const { return static_cast<bool>(floats_); }

  void run(const sparse::Sequence&, int64_t, const ListedRow& listed, const int64_t* places) {
    const int64_t at = listed.token * g_.lists.count;
    const float* given = as_floats(g_.scores, at, listed.count, g_.index.query.type, floats_.data());
    for (int64_t j = 0; j < listed.count; ++j) listed.weights[1][j] = given[places[j]];
  }

 private:
  const sparse::IndexGradient& g_;
  Scratch<float> floats_;
};

// Fills in the tokens of a chunk's rows, and a number for each: p (RowTarget), or GivenGradients.
template <class Numbers>
static Outcome prepare_rows_with(const sparse::IndexGradient& g, const Runtime& runtime, const Chunk& chunk) {
  const auto& batch = g.index.batch;
  Failure failure;
  auto part = [&](int64_t from, int64_t to) {
    RangeOrder order(runtime, batch.key_tokens, chunk);
    Numbers numbers(g, runtime);
    if (!order || !numbers) return failure.set();
    for (int64_t i = from; i < to; ++i) {
      int64_t row = chunk.first + i;
      const sparse::Sequence& sequence = sequence_of(batch, row);
      ListedRow& listed = chunk.rows[i];
      listed.token = sequence.query + row;
      const int32_t* list = g.lists.entries + listed.token * g.lists.count;
      for (int64_t j = 0; j < listed.count; ++j) order.list()[j] = key_token(batch, sequence, list[j]);
      order.put(listed);
      numbers.run(sequence, row, listed, order.places());
    }
  };
  in_parallel(runtime, chunk.count, 1, part);
  return failure.outcome();
}

static Outcome prepare_rows(const sparse::IndexGradient& g, const Runtime& runtime, const Chunk& chunk) {
  if (g.attention == nullptr) return prepare_rows_with<GivenGradients>(g, runtime, chunk);
  Outcome outcome = Outcome::done;
  auto with = [&](auto layout) { outcome = prepare_rows_with<RowTarget<decltype(layout)>>(g, runtime, chunk); };
  const int64_t heads = g.attention->query.heads;
  with_layout(heads, multiplies_pairs(heads, g.attention->key), with);
  return outcome;
}

// Computes the rows of a chunk and adds what they add to dk.
template <class Layout>
static Outcome add_index_chunk(const sparse::IndexGradient& g, const Runtime& runtime, const Chunk& chunk, KeySums* sums,
                               float* losses) {
  const int64_t heads = g.index.query.heads, tokens = g.index.batch.key_tokens, step = index_block_floats<Layout>(heads);
  if (prepare_rows(g, runtime, chunk) != Outcome::done) return Outcome::out_of_memory;
  PackedRows<Layout> queries(runtime, g.index.query, sums->numbers(), heads, chunk.count);
  if (!queries) return Outcome::out_of_memory;
  Failure failure;
  auto part = [&](int64_t from, int64_t to) {
    RowIndexGradient<Layout> rows(g, runtime);
    if (!rows) return failure.set();
    for (int64_t i = from; i < to; ++i) {
      losses[chunk.first + i] = rows.run(chunk.rows[i]);
      queries.pack(i, chunk.rows[i]);
    }
  };
  in_parallel(runtime, chunk.count, 1, part);
  const Segments segments(runtime, chunk, 1, ceil_div(tokens, chunk.range_keys));
  if (failure.outcome() != Outcome::done || !segments) return Outcome::out_of_memory;
  const auto sum = [&](const Segment* from, const Segment* to, int64_t, int64_t panel, int64_t origin, float* to_sums) {
    add_segments(chunk, from, to, Factors<Layout>{queries, 0}, heads, step, panel, origin, to_sums);
  };
  return add_ranges(runtime, chunk, segments, 1, tokens, sums, 1, sum);
}

template <class Layout>
static Outcome index_gradient_of(const sparse::IndexGradient& g, const Runtime& runtime) {
  const auto& batch = g.index.batch;
  const int64_t heads = g.index.query.heads, tokens = batch.key_tokens;
  KeySums d_key(runtime, g.index.key, g.key, nullptr, tokens);
  Scratch<float> losses(runtime, batch.rows);
  if (!losses) return Outcome::out_of_memory;
  const auto count_keys = [&](int64_t i) {
    const sparse::Sequence& sequence = sequence_of(batch, i);
    return listed_keys(g, sequence, i);
  };
  const auto work = [&](const Chunk& chunk) {
    return add_index_chunk<Layout>(g, runtime, chunk, &d_key, losses.data());
  };
  const ChunkSizes sizes{{index_block_floats<Layout>(heads), kGatherKeys}, heads * g.index.query.size, d_key.floats()};
  const Outcome outcome = run_in_chunks(runtime, batch.rows, batch, sizes, count_keys, work);
  if (outcome != Outcome::done) return outcome;
  if (g.loss != nullptr) {
    double loss = 0;
    for (int64_t i = 0; i < batch.rows; ++i) loss += losses.data()[i];
    *g.loss = static_cast<float>(loss);
  }
  return Outcome::done;
}

static Outcome index_gradient(const sparse::IndexGradient& g, const Runtime& runtime) {
  const int64_t heads = g.index.query.heads;
  if constexpr (kHasPairs) {
    if (!multiplies_pairs(heads, g.index.key)) return FA_OTHERS::sparse_kernels.index_gradient(g, runtime);
  }
  Outcome outcome = Outcome::done;
  auto with = [&](auto layout) { outcome = index_gradient_of<decltype(layout)>(g, runtime); };
  with_layout<kHasPairs>(heads, with);
  return outcome;
}

}  // namespace fa::FA_ISA
