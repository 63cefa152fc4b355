// SparseFlashAttentionGrad: the rows of a chunk compute P, dS and dQ; then scatter.hpp adds their dK and dV.
#pragma once

#include "attention.hpp"
#include "scatter.hpp"

namespace fa::FA_ISA {

// exp for arguments that exceed 0 if the statistics belong to other keys. Beyond float's range the result stays large.
FA_INLINE Vec exp_any(Vec x) {
  const Vec most = splat(88.0f);
  return exp_nonpositive(x > most ? most : x);
}

// Writes a row of gradients to its plain and its rope part. Either is null if nobody reads it.
FA_INLINE void write_numbers(void* plain, void* rope, const Rows& like, int64_t row, const float* from) {
  if (plain != nullptr) write_floats(plain, row * like.size, from, like.size, like.type);
  if (rope != nullptr) write_floats(rope, row * like.rope_size, from + like.size, like.rope_size, like.type);
}

// Computes P, dS and dQ of rows of one call, one after the other, in the memory of one thread.
template <class Layout>
class RowGradient {
 public:
  RowGradient(const sparse::Gradient& g, const Runtime& runtime)
      : g_(g), a_(g.attention), group_(a_.group()), padded_heads_(Layout::padded_heads(group_)), shared_(shares_key(a_)),
        columns_(columns_of(a_.query.numbers())),
        floats_(runtime, query_floats(a_.query) + query_floats(g.d_out) + key_floats() + value_floats() +
                Layout::weighted_sum_floats(group_) + padded_heads_ * columns_ + 4 * padded_heads_ +
                2 * larger(a_.query.numbers(), a_.value.size)),
        keys_(a_.key), values_(a_.value) {
    if (!floats_) return;
    query_ = floats_.data();
    d_out_ = query_ + query_floats(a_.query);
    key_copies_ = d_out_ + query_floats(g.d_out);
    value_copies_ = key_copies_ + key_floats();
    weights_ = value_copies_ + value_floats();
    d_query_ = weights_ + Layout::weighted_sum_floats(group_);
    max_ = d_query_ + padded_heads_ * columns_;
    inverse_sum_ = max_ + padded_heads_;
    delta_ = inverse_sum_ + padded_heads_;
    ones_ = delta_ + padded_heads_;
    row_ = ones_ + padded_heads_;
  }

  explicit operator bool() const { return static_cast<bool>(floats_); }

  // Floats of the weights of a block of keys: P, then dS.
  static int64_t block_floats(int64_t group) { return 2 * Layout::padded_heads(group) * kGatherKeys; }

  // `sinks` gets what the row adds to the gradient of each head's sink; null if nobody reads it.
  void run(int64_t row, int64_t head, ListedRow& listed, double* sinks) {
    const sparse::Sequence& sequence = sequence_of(a_.batch, row);
    const int64_t token = sequence.query + row;
    selected_tokens(a_.batch, a_.lists, sequence, row, a_.lists.heads == 1 ? 0 : head, listed.tokens);
    listed.token = token;
    listed.head = head;
    prepare(sequence, row, token, head);
    for (int64_t h = 0; h < group_ && sinks != nullptr; ++h) {
      sinks[h] = -delta_[h] * exp_any(splat(a_.sinks[head * group_ + h] - max_[h]))[0] * inverse_sum_[h];
    }
    for (int64_t i = 0; i < group_ * columns_; ++i) d_query_[i] = 0;
    for (int64_t first = 0; first < listed.count; first += kGatherKeys) {
      block(listed.tokens + first, listed.count - first, head,
            listed.weights + first / kGatherKeys * block_floats(group_));
    }
    for (int64_t h = 0; h < group_; ++h) {
      write_numbers(g_.query, g_.query_rope, a_.query, token * a_.query.heads + head * group_ + h,
                    d_query_ + h * columns_);
    }
  }

 private:
  int64_t query_floats(const Rows& rows) const { return Layout::query_floats(group_, rows.numbers()); }
  int64_t key_floats() const { return GatheredRows<Layout::kPairs>::floats(a_.key); }
  int64_t value_floats() const { return shared_ ? 0 : GatheredRows<Layout::kPairs>::floats(a_.value); }

  // Packs the query and dO of a row; computes what the softmax's gradient needs of each head.
  void prepare(const sparse::Sequence& sequence, int64_t row, int64_t token, int64_t head) {
    Layout::pack_query(a_.query, token, head * group_, group_, query_, row_);
    Layout::pack_query(g_.d_out, token, head * group_, group_, d_out_, row_);
    const int64_t size = a_.value.size;
    const int64_t statistics = sequence.statistics + head * a_.statistics_head + row * group_;
    for (int64_t h = 0; h < padded_heads_; ++h) {
      max_[h] = inverse_sum_[h] = delta_[h] = 0;
      ones_[h] = 1;
      if (h >= group_) continue;
      max_[h] = a_.softmax_max[statistics + h];
      inverse_sum_[h] = 1.0f / a_.softmax_sum[statistics + h];
      float* other = row_ + larger(a_.query.numbers(), size);
      read_numbers(g_.d_out, token, head * group_ + h, 0, size, row_);
      read_numbers(g_.out, token, head * group_ + h, 0, size, other);
      for (int64_t d = 0; d < size; ++d) delta_[h] += row_[d] * other[d];
    }
  }

  // The next block of the `remaining` selected keys.
  void block(const int64_t* tokens, int64_t remaining, int64_t head, float* p) {
    const int64_t count = smaller(kGatherKeys, remaining);
    const int64_t numbers = a_.key.numbers();
    prefetch(a_.key, tokens + count, smaller(kGatherKeys, remaining - count), head,
             !GatheredRows<Layout::kPairs>::in_place(a_.key));
    if (!shared_) prefetch(a_.value, tokens + count, smaller(kGatherKeys, remaining - count), head, true);
    float* ds = p + padded_heads_ * kGatherKeys;
    keys_.gather(tokens, count, head, key_copies_);
    if (!shared_) values_.gather(tokens, count, head, value_copies_);
    Layout::scores(query_, group_, keys_, numbers, count, p);
    Layout::scores(d_out_, group_, shared_ ? keys_ : values_, a_.value.size, count, ds);
    const Vec scale = splat(a_.scale);
    Layout::each(p, group_, count, [&](Vec s, int64_t h, int64_t) {
      return exp_any(rounded(s * scale) - Layout::of_heads(max_, h)) * Layout::of_heads(inverse_sum_, h);
    });
    Layout::each(ds, group_, count, [&](Vec dp, int64_t h, int64_t place) {
      return load(p + place) * (dp - Layout::of_heads(delta_, h)) * scale;
    });
    Layout::weighted_sum(ds, group_, keys_, numbers, count, d_query_, ones_, weights_);
    Layout::pack_weights(p, group_, count);
    Layout::pack_weights(ds, group_, count);
  }

  const sparse::Gradient& g_;
  const sparse::Attention& a_;
  int64_t group_, padded_heads_;
  bool shared_;
  int64_t columns_;
  Scratch<float> floats_;
  GatheredRows<Layout::kPairs> keys_, values_;
  float *query_ = nullptr, *d_out_ = nullptr, *key_copies_ = nullptr, *value_copies_ = nullptr, *weights_ = nullptr,
        *d_query_ = nullptr,
        *max_ = nullptr, *inverse_sum_ = nullptr, *delta_ = nullptr, *ones_ = nullptr, *row_ = nullptr;
};

// Computes rows [first, last): their dQ, and the weights that `listed` keeps. `sinks` [rows][heads] is null if nobody reads
// it.
template <class Layout>
static Outcome compute_rows(const sparse::Gradient& g, const Runtime& runtime, ListedRow* listed, int64_t first,
                            int64_t last, double* sinks) {
  const int64_t heads = g.attention.key.heads, group = g.attention.group();
  Failure failure;
  auto part = [&](int64_t from, int64_t to) {
    RowGradient<Layout> rows(g, runtime);
    if (!rows) return failure.set();
    for (int64_t i = from; i < to; ++i) {
      double* of_row = sinks != nullptr ? sinks + (first + i) * group : nullptr;
      rows.run((first + i) / heads, (first + i) % heads, listed[i], of_row);
    }
  };
  in_parallel(runtime, last - first, 1, part);
  return failure.outcome();
}

// Adds `count` rows to dK and dV. If key and value are merged, dV is added to the columns of dK that it shares.
template <class Layout>
static Outcome add_rows(const sparse::Gradient& g, const Runtime& runtime, const ListedRow* listed, int64_t count,
                        KeySums& d_key, KeySums& d_value) {
  const sparse::Attention& a = g.attention;
  const int64_t group = a.group(), step = RowGradient<Layout>::block_floats(group);
  Failure failure;
  auto part = [&](int64_t first, int64_t last) {
    Scratch<float> scratch(runtime, Layout::padded_heads(group) * kPanel);
    if (!scratch) return failure.set();
    for (int64_t p = first; p < last; ++p) {
      const bool of_key = p < d_key.panels();
      const int64_t panel = of_key ? p : p - d_key.panels();
      if (of_key) d_key.add<Layout>(listed, count, a.query, group, step / 2, step, panel, scratch.data());
      if (of_key && !(g.merged && panel * kPanel < a.value.size)) continue;
      (of_key ? d_key : d_value).template add<Layout>(listed, count, g.d_out, group, 0, step, panel, scratch.data());
    }
  };
  in_parallel(runtime, d_key.panels() + d_value.panels(), 1, part);
  return failure.outcome();
}

// Adds up what the rows add to the gradient of the sinks. `sinks` is [rows][heads].
static void write_sinks(const sparse::Gradient& g, const double* sinks) {
  const int64_t heads = g.attention.query.heads;
  for (int64_t h = 0; h < heads && g.sinks != nullptr; ++h) {
    double sum = 0;
    for (int64_t row = 0; row < g.attention.batch.rows; ++row) sum += sinks[row * heads + h];
    g.sinks[h] = static_cast<float>(sum);
  }
}

template <class Layout>
static Outcome gradient_of(const sparse::Gradient& g, const Runtime& runtime) {
  const sparse::Attention& a = g.attention;
  const int64_t heads = a.key.heads, tokens = a.batch.key_tokens;
  const bool wants_key = g.key != nullptr || g.key_rope != nullptr, wants_value = g.value != nullptr;
  KeySums d_key(runtime, wants_key ? a.key.numbers() : 0, heads, tokens);
  KeySums d_value(runtime, wants_value ? a.value.size : 0, heads, tokens);
  Scratch<double> sinks(runtime, g.sinks != nullptr ? a.batch.rows * a.query.heads : 0);
  if (!d_key || !d_value || !sinks) return Outcome::out_of_memory;
  d_key.clear(runtime);
  d_value.clear(runtime);
  const auto count_keys = [&](int64_t i) {
    int64_t row = i / heads;
    const sparse::Sequence& sequence = sequence_of(a.batch, row);
    return selected_tokens(a.batch, a.lists, sequence, row, a.lists.heads == 1 ? 0 : i % heads, nullptr);
  };
  const auto make = [&](ListedRow* listed, int64_t first, int64_t last) {
    return compute_rows<Layout>(g, runtime, listed, first, last, g.sinks != nullptr ? sinks.data() : nullptr);
  };
  const auto add = [&](const ListedRow* listed, int64_t count) {
    return add_rows<Layout>(g, runtime, listed, count, d_key, d_value);
  };
  const int64_t step = RowGradient<Layout>::block_floats(a.group());
  const Outcome outcome = run_in_chunks(runtime, a.batch.rows * heads, step, count_keys, make, add);
  if (outcome != Outcome::done) return outcome;
  if (wants_key) d_key.write(runtime, g.key, a.key.size, g.key_rope, a.key.type);
  if (wants_value) d_value.write(runtime, g.value, a.value.size, nullptr, a.value.type);
  write_sinks(g, sinks.data());
  return Outcome::done;
}

static Outcome sparse_gradient(const sparse::Gradient& g, const Runtime& runtime) {
  Outcome outcome = Outcome::done;
  auto with = [&](auto layout) { outcome = gradient_of<decltype(layout)>(g, runtime); };
  with_layout(g.attention.group(), multiplies_pairs(g.attention), with);
  return outcome;
}

}  // namespace fa::FA_ISA
