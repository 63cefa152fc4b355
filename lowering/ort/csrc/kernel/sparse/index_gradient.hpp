// LightningIndexerGrad and SparseLightningIndexerGradKLLoss: the rows of a chunk make dS, dq and dw, then scatter.hpp adds
// dk. What comes back to a score is given, or the difference of the indexer's distribution to attention's.
#pragma once

#include "gradient.hpp"

namespace fa::FA_ISA {

// Listed keys that a row uses; all of them are keys of its sequence.
FA_INLINE int64_t listed_keys(const sparse::IndexGradient& g, const sparse::Sequence& sequence, int64_t row) {
  if (!g.index.batch.causal) return g.lists.count;
  return smaller(g.lists.count, visible_keys(g.index.batch, sequence, row));
}

// Floats that a block leaves: dS, and behind it a number for each key, p or what comes back to its score.
template <class Form>
FA_INLINE int64_t index_left_floats(int64_t heads) {
  return (Form::padded(heads) + 1) * kGatherKeys;
}

// The mean over attention's heads of their probabilities of the listed keys; with sinks, their sum over what the sinks leave
// of the heads, so that it adds up to 1. Where that is less than kLeastLeft of them, the difference has lost its digits to
// the rounding of the statistics, and the probabilities of the listed keys are divided by their own sum.
template <class Form>
class RowTarget {
 public:
  RowTarget(const sparse::Attention& a, const Runtime& runtime)
      : a_(a), heads_(a.query.heads), padded_(Form::padded(heads_)),
        floats_(runtime, Form::query_floats(heads_, a.query.numbers()) + Listed<Form::kPairs>::floats(a.key) + padded_ * kGatherKeys +
                             3 * padded_ + a.query.numbers()),
        keys_(a.key) {
    if (!floats_) return;
    query_ = floats_.data();
    copies_ = query_ + Form::query_floats(heads_, a.query.numbers());
    scores_ = copies_ + Listed<Form::kPairs>::floats(a.key);
    top_ = scores_ + padded_ * kGatherKeys;
    share_ = top_ + padded_;
    largest_ = share_ + padded_;
    row_ = largest_ + padded_;
  }

  explicit operator bool() const { return static_cast<bool>(floats_); }

  // Into `out`, a block's keys every `step` floats.
  void run(const sparse::Sequence& sequence, int64_t row, const Left& left, float* out, int64_t step) {
    Form::pack_query(a_.query, left.token, 0, heads_, query_, row_);
    const int64_t statistics = sequence.statistics + row * heads_;
    double heads = static_cast<double>(heads_);
    for (int64_t h = 0; h < heads_ && a_.sinks != nullptr; ++h) {
      heads -= __builtin_exp(double{a_.sinks[h]} - a_.softmax_max[statistics + h]) / a_.softmax_sum[statistics + h];
    }
    const bool lost = a_.sinks != nullptr && heads < sparse::kLeastLeft * static_cast<double>(heads_);
    for (int64_t h = 0; h < padded_; ++h) {
      top_[h] = h < heads_ ? a_.softmax_max[statistics + h] : 0;
      share_[h] = h < heads_ ? static_cast<float>(1.0 / (a_.softmax_sum[statistics + h] * heads)) : 0;
    }
    const Vec scale = splat(a_.scale);
    float level = 0;
    if (lost) {
      level = -kInfinity;
      take_logarithms(statistics);
      each_block(left, [&](int64_t, int64_t count) {
        Form::each(scores_, heads_, count, [&](Vec s, int64_t h, int64_t) {
          return rounded(s * scale) - Form::of_heads(top_, h);
        });
        Form::largest(scores_, heads_, count, largest_);
        for (int64_t h = 0; h < heads_; ++h) level = largest_[h] > level || is_nan(largest_[h]) ? largest_[h] : level;
      });
    }
    each_block(left, [&](int64_t first, int64_t count) {
      Form::over_heads(scores_, heads_, count, out + first / kGatherKeys * step, [&](Vec s, int64_t h) {
        return exp_any((rounded(s * scale) - Form::of_heads(top_, h)) - level) * Form::of_heads(share_, h);
      });
    });
    if (lost) normalise(left.count, out, step);
  }

 private:
  // Calls f(first, count) for each block of keys with their products in scores_.
  template <class F>
  void each_block(const Left& left, F f) {
    for (int64_t first = 0; first < left.count; first += kGatherKeys) {
      const int64_t count = smaller(kGatherKeys, left.count - first);
      keys_.take(left.tokens + first, count, 0, copies_);
      const int64_t next = smaller(kGatherKeys, left.count - first - count);
      ask_for(a_.key, left.tokens + first + count, next, 0, !Listed<Form::kPairs>::in_place(a_.key));
      Form::scores(query_, heads_, keys_, a_.key.numbers(), count, scores_);
      f(first, count);
    }
  }

  // top_ becomes what is subtracted from a score for the logarithm of its probability, less the smallest such number: they
  // may be large, and only their differences matter.
  void take_logarithms(int64_t statistics) {
    const auto of_head = [&](int64_t h) {
      return a_.softmax_max[statistics + h] + __builtin_log(double{a_.softmax_sum[statistics + h]});
    };
    double lowest = of_head(0);
    for (int64_t h = 1; h < heads_; ++h) lowest = of_head(h) < lowest ? of_head(h) : lowest;
    for (int64_t h = 0; h < heads_; ++h) {
      top_[h] = static_cast<float>(of_head(h) - lowest);
      share_[h] = 1;
    }
  }

  static void normalise(int64_t count, float* out, int64_t step) {
    const auto at = [&](int64_t j) -> float& { return out[j / kGatherKeys * step + j % kGatherKeys]; };
    double sum = 0;
    for (int64_t j = 0; j < count; ++j) sum += at(j);
    for (int64_t j = 0; j < count; ++j) at(j) = static_cast<float>(at(j) / sum);
  }

  const sparse::Attention& a_;
  int64_t heads_, padded_;
  Scratch<float> floats_;
  Listed<Form::kPairs> keys_;
  float *query_ = nullptr, *copies_ = nullptr, *scores_ = nullptr, *top_ = nullptr, *share_ = nullptr, *largest_ = nullptr,
        *row_ = nullptr;
};

template <class Form>
class RowIndexGradient {
 public:
  RowIndexGradient(const sparse::IndexGradient& g, const Runtime& runtime)
      : g_(g), heads_(g.index.query.heads), padded_(Form::padded(heads_)), depth_(g.index.query.size),
        columns_(columns_of(depth_)), step_(index_left_floats<Form>(heads_)),
        floats_(runtime, Form::query_floats(heads_, depth_) + Listed<Form::kPairs>::floats(g.index.key) + padded_ * columns_ +
                             Form::weigh_floats(heads_) + 3 * padded_ + depth_ + blocks_of(g.lists.count, kGatherKeys) * kGatherKeys),
        keys_(g.index.key) {
    if (!floats_) return;
    query_ = floats_.data();
    copies_ = query_ + Form::query_floats(heads_, depth_);
    pairs_ = copies_ + Listed<Form::kPairs>::floats(g.index.key);
    d_query_ = pairs_ + Form::weigh_floats(heads_);
    weights_ = d_query_ + padded_ * columns_;
    d_weights_ = weights_ + padded_;
    ones_ = d_weights_ + padded_;
    row_ = ones_ + padded_;
    scores_ = row_ + depth_;
  }

  explicit operator bool() const { return static_cast<bool>(floats_); }

  // Returns the row's part of the loss (0 without).
  float run(const Left& left) {
    const auto& index = g_.index;
    Form::pack_query(index.query, left.token, 0, heads_, query_, row_);
    for (int64_t h = 0; h < padded_; ++h) {
      weights_[h] = d_weights_[h] = 0;
      ones_[h] = 1;
    }
    const float* given = as_floats(index.weights, left.token * heads_, heads_, index.weight_type, weights_);
    if (given != weights_) __builtin_memcpy(weights_, given, static_cast<size_t>(heads_) * sizeof(float));
    for (int64_t i = 0; i < heads_ * columns_; ++i) d_query_[i] = 0;
    float loss = 0;
    if (g_.attention != nullptr) {
      for (int64_t first = 0; first < left.count; first += kGatherKeys) {
        products(left, first);
        Form::over_heads(block(left, first), heads_, count(left, first), scores_ + first,
                         [&](Vec r, int64_t h) { return r * Form::of_heads(weights_, h); });
      }
      loss = compare(left);
    }
    for (int64_t first = 0; first < left.count; first += kGatherKeys) {
      float* r = block(left, first);
      float* back = r + padded_ * kGatherKeys;
      if (g_.attention != nullptr) {
        ask_behind(left, first);
        keys_.take(left.tokens + first, count(left, first), 0, copies_);
      } else {
        products(left, first);
        const int64_t at = left.token * g_.lists.count + first;
        const float* from = as_floats(g_.scores, at, count(left, first), index.query.type, back);
        if (from != back) __builtin_memcpy(back, from, static_cast<size_t>(count(left, first)) * sizeof(float));
      }
      Form::dot_keys(r, back, heads_, count(left, first), d_weights_);
      Form::each(r, heads_, count(left, first), [&](Vec x, int64_t h, int64_t place) {
        return clear_where(x <= 0.0f, Form::of_keys(back, place) * Form::of_heads(weights_, h));  // a NaN stays
      });
      Form::weigh(r, heads_, keys_, depth_, count(left, first), d_query_, ones_, pairs_);
      Form::leave(r, heads_, count(left, first));
    }
    for (int64_t h = 0; h < heads_; ++h) {
      write_numbers(g_.query, nullptr, index.query, left.token * heads_ + h, d_query_ + h * columns_);
    }
    if (g_.weights != nullptr) write_floats(g_.weights, left.token * heads_, d_weights_, heads_, index.weight_type);
    return loss;
  }

 private:
  float* block(const Left& left, int64_t first) const { return left.weights + first / kGatherKeys * step_; }
  static int64_t count(const Left& left, int64_t first) { return smaller(kGatherKeys, left.count - first); }

  void ask_behind(const Left& left, int64_t first) const {
    const int64_t end = first + count(left, first);
    ask_for(g_.index.key, left.tokens + end, smaller(kGatherKeys, left.count - end), 0, true);
  }

  // relu of the products with the keys of a block, which stay gathered.
  void products(const Left& left, int64_t first) {
    ask_behind(left, first);
    keys_.take(left.tokens + first, count(left, first), 0, copies_);
    Form::scores(query_, heads_, keys_, depth_, count(left, first), block(left, first));
    Form::each(block(left, first), heads_, count(left, first), [](Vec x, int64_t, int64_t) { return greater(Vec{}, x); });
  }

  // The loss of the row; p behind each block becomes y - p.
  float compare(const Left& left) {
    float top = -kInfinity;
    for (int64_t j = 0; j < left.count; ++j) top = scores_[j] > top ? scores_[j] : top;
    const float floor = g_.floor;
    double sum = 0, loss = 0, mass = 0;
    // Without a floor, from the scores: a probability may be too small for a float and its logarithm is not.
    for (int64_t j = 0; floor == 0 && j < left.count; ++j) {
      const float p = target(left, j);
      if (p == 0) continue;
      mass += p;
      loss += p * (__builtin_log(p) - (scores_[j] - top));
    }
    for (int64_t j = 0; j < left.count; j += kLanes) {
      store(scores_ + j, exp_nonpositive(load(scores_ + j) - splat(top)));
      for (int64_t n = j; n < smaller(j + kLanes, left.count); ++n) sum += scores_[n];
    }
    if (floor == 0 && mass != 0) loss += mass * __builtin_log(sum);
    for (int64_t j = 0; j < left.count; ++j) {
      float& p = target(left, j);
      const float y = static_cast<float>(scores_[j] / sum);
      const float p_floor = p < floor ? floor : p, y_floor = y < floor ? floor : y;  // a NaN stays
      if (floor != 0) loss += p_floor * (__builtin_log(p_floor) - __builtin_log(y_floor));
      p = y - p;
    }
    return static_cast<float>(loss);
  }

  float& target(const Left& left, int64_t j) const {
    return block(left, j)[padded_ * kGatherKeys + j % kGatherKeys];
  }

  const sparse::IndexGradient& g_;
  int64_t heads_, padded_, depth_, columns_, step_;
  Scratch<float> floats_;
  Listed<Form::kPairs> keys_;
  float *query_ = nullptr, *copies_ = nullptr, *pairs_ = nullptr, *d_query_ = nullptr, *weights_ = nullptr,
        *d_weights_ = nullptr, *ones_ = nullptr, *row_ = nullptr, *scores_ = nullptr;
};

// Fills in the tokens of a chunk's rows and, for the loss, the target behind each block.
static Outcome prepare_rows(const sparse::IndexGradient& g, const Runtime& runtime, Left* left, int64_t first,
                            int64_t last, int64_t offset, int64_t step) {
  const auto& batch = g.index.batch;
  for (int64_t i = first; i < last; ++i) {
    int64_t row = i;
    const sparse::Sequence& sequence = sequence_of(batch, row);
    Left& to = left[i - first];
    to.token = sequence.query + row;
    const int32_t* list = g.lists.entries + to.token * g.lists.count;
    for (int64_t j = 0; j < to.count; ++j) to.tokens[j] = key_token(batch, sequence, list[j]);
  }
  Failure failure;
  if (g.attention == nullptr) return failure.outcome();
  auto with = [&](auto form) {
    auto part = [&](int64_t from, int64_t to) {
      RowTarget<decltype(form)> rows(*g.attention, runtime);
      if (!rows) return failure.set();
      for (int64_t i = from; i < to; ++i) {
        int64_t row = first + i;
        const sparse::Sequence& sequence = sequence_of(batch, row);
        rows.run(sequence, row, left[i], left[i].weights + offset, step);
      }
    };
    in_parallel(runtime, last - first, kRowsOfTask, part);
  };
  with_form(g.attention->query.heads, whole_panels(g.attention->key, Type::bfloat16), with);
  return failure.outcome();
}

template <class Form>
static Outcome index_gradient_of(const sparse::IndexGradient& g, const Runtime& runtime) {
  const auto& batch = g.index.batch;
  const int64_t heads = g.index.query.heads, step = index_left_floats<Form>(heads);
  KeySums d_key(runtime, g.key != nullptr ? g.index.key.size : 0, 1, batch.key_tokens);
  Scratch<float> losses(runtime, batch.rows);
  if (!d_key || !losses) return Outcome::out_of_memory;
  d_key.clear(runtime);
  const auto need = [&](int64_t i) {
    const sparse::Sequence& sequence = sequence_of(batch, i);
    return listed_keys(g, sequence, i);
  };
  const auto make = [&](Left* left, int64_t first, int64_t last) {
    if (prepare_rows(g, runtime, left, first, last, Form::padded(heads) * kGatherKeys, step) != Outcome::done) {
      return Outcome::out_of_memory;
    }
    Failure failure;
    auto part = [&](int64_t from, int64_t to) {
      RowIndexGradient<Form> rows(g, runtime);
      if (!rows) return failure.set();
      for (int64_t i = from; i < to; ++i) losses.data()[first + i] = rows.run(left[i]);
    };
    in_parallel(runtime, last - first, kRowsOfTask, part);
    return failure.outcome();
  };
  const auto add = [&](const Left* left, int64_t count) {
    Failure failure;
    auto part = [&](int64_t first, int64_t last) {
      Scratch<float> scratch(runtime, Form::padded(heads) * kPanel);
      if (!scratch) return failure.set();
      for (int64_t p = first; p < last; ++p) {
        d_key.add<Form>(left, count, g.index.query, heads, 0, step, p, scratch.data());
      }
    };
    in_parallel(runtime, d_key.panels(), 1, part);
    return failure.outcome();
  };
  const Outcome outcome = in_chunks(runtime, batch.rows, step, need, make, add);
  if (outcome != Outcome::done) return outcome;
  if (g.key != nullptr) d_key.write(runtime, g.key, g.index.key.size, nullptr, g.index.key.type);
  if (g.loss != nullptr) {
    double loss = 0;
    for (int64_t i = 0; i < batch.rows; ++i) loss += losses.data()[i];
    *g.loss = static_cast<float>(loss);
  }
  return Outcome::done;
}

static Outcome index_gradient(const sparse::IndexGradient& g, const Runtime& runtime) {
  Outcome outcome = Outcome::done;
  auto with = [&](auto form) { outcome = index_gradient_of<decltype(form)>(g, runtime); };
  with_form(g.index.query.heads, whole_panels(g.index.key, Type::bfloat16), with);
  return outcome;
}

}  // namespace fa::FA_ISA
