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

  // Floats of P or dS of a block of keys.
  static int64_t block_floats(int64_t group) { return Layout::padded_heads(group) * kGatherKeys; }

  // `sinks` gets what the row adds to the gradient of each head's sink; null if nobody reads it.
  void run(int64_t row, int64_t head, RangeOrder& order, ListedRow& listed, double* sinks) {
    const sparse::Sequence& sequence = sequence_of(a_.batch, row);
    const int64_t token = sequence.query + row;
    selected_tokens(a_.batch, a_.lists, sequence, row, a_.lists.heads == 1 ? 0 : head, order.list());
    order.put(listed);
    listed.token = token;
    listed.head = head;
    prepare(sequence, row, token, head);
    for (int64_t h = 0; h < group_ && sinks != nullptr; ++h) {
      sinks[h] = -delta_[h] * exp_any(splat(a_.sinks[head * group_ + h] - max_[h]))[0] * inverse_sum_[h];
    }
    for (int64_t i = 0; i < group_ * columns_; ++i) d_query_[i] = 0;
    for (int64_t first = 0; first < listed.count; first += kGatherKeys) {
      const int64_t at = first / kGatherKeys * block_floats(group_);
      block(listed.tokens + first, listed.count - first, head, listed.weights[0] + at, listed.weights[1] + at);
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
  void block(const int64_t* tokens, int64_t remaining, int64_t head, float* p, float* ds) {
    const int64_t count = smaller(kGatherKeys, remaining);
    const int64_t numbers = a_.key.numbers();
    prefetch(a_.key, tokens + count, smaller(kGatherKeys, remaining - count), head,
             !GatheredRows<Layout::kPairs>::in_place(a_.key));
    if (!shared_) prefetch(a_.value, tokens + count, smaller(kGatherKeys, remaining - count), head, true);
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

// Computes the rows of a chunk: their dQ, and what the sums of the keys need of them. `sinks` [rows][heads] is null if nobody
// reads it.
template <class Layout>
static Outcome compute_rows(const sparse::Gradient& g, const Runtime& runtime, const Chunk& chunk,
                            PackedRows<Layout>& queries, PackedRows<Layout>& d_outs, double* sinks) {
  const sparse::Attention& a = g.attention;
  const int64_t heads = a.key.heads, group = a.group();
  Failure failure;
  auto part = [&](int64_t from, int64_t to) {
    RowGradient<Layout> rows(g, runtime);
    RangeOrder order(runtime, a.batch.key_tokens, chunk);
    if (!rows || !order) return failure.set();
    for (int64_t i = from; i < to; ++i) {
      const int64_t row = chunk.first + i;
      rows.run(row / heads, row % heads, order, chunk.rows[i], sinks != nullptr ? sinks + row * group : nullptr);
      queries.pack(i, chunk.rows[i]);
      d_outs.pack(i, chunk.rows[i]);
    }
  };
  in_parallel(runtime, chunk.count, 1, part);
  return failure.outcome();
}

// Computes the rows of a chunk and adds what they add to dK and dV. If key and value are merged, dV is added to the columns
// of dK that it shares.
template <class Layout>
static Outcome add_chunk(const sparse::Gradient& g, const Runtime& runtime, const Chunk& chunk, KeySums (&sums)[2],
                         double* sinks) {
  const sparse::Attention& a = g.attention;
  const int64_t heads = a.key.heads, tokens = a.batch.key_tokens, group = a.group();
  const int64_t step = RowGradient<Layout>::block_floats(group);
  const int64_t value_numbers = larger(sums[1].numbers(), g.merged ? smaller(a.value.size, sums[0].numbers()) : 0);
  PackedRows<Layout> queries(runtime, a.query, sums[0].numbers(), group, chunk.count);
  PackedRows<Layout> d_outs(runtime, g.d_out, value_numbers, group, chunk.count);
  if (!queries || !d_outs) return Outcome::out_of_memory;
  if (compute_rows(g, runtime, chunk, queries, d_outs, sinks) != Outcome::done) return Outcome::out_of_memory;
  const Segments segments(runtime, chunk, heads, ceil_div(tokens, chunk.range_keys));
  if (!segments) return Outcome::out_of_memory;
  const auto sum = [&](const Segment* from, const Segment* to, int64_t tensor, int64_t panel, int64_t origin, float* to_sums) {
    const Factors<Layout> p{d_outs, 0}, ds{queries, 1};
    if (tensor == 0) add_segments(chunk, from, to, ds, group, step, panel, origin, to_sums);
    if (tensor == 0 && !(g.merged && panel * kPanel < a.value.size)) return;
    add_segments(chunk, from, to, p, group, step, panel, origin, to_sums);
  };
  return add_ranges(runtime, chunk, segments, heads, tokens, sums, 2, sum);
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
  KeySums sums[2] = {{runtime, a.key, g.key, g.key_rope, tokens}, {runtime, a.value, g.value, nullptr, tokens}};
  Scratch<double> sinks(runtime, g.sinks != nullptr ? a.batch.rows * a.query.heads : 0);
  if (!sinks) return Outcome::out_of_memory;
  const auto count_keys = [&](int64_t i) {
    int64_t row = i / heads;
    const sparse::Sequence& sequence = sequence_of(a.batch, row);
    return selected_tokens(a.batch, a.lists, sequence, row, a.lists.heads == 1 ? 0 : i % heads, nullptr);
  };
  const int64_t group = a.group(), step = RowGradient<Layout>::block_floats(group);
  const auto work = [&](const Chunk& chunk) {
    return add_chunk<Layout>(g, runtime, chunk, sums, g.sinks != nullptr ? sinks.data() : nullptr);
  };
  const int64_t packed = group * (a.query.numbers() + g.d_out.numbers());
  const ChunkSizes sizes{{step, step}, packed, sums[0].floats() + sums[1].floats()};
  const Outcome outcome = run_in_chunks(runtime, a.batch.rows * heads, a.batch, sizes, count_keys, work);
  if (outcome != Outcome::done) return outcome;
  write_sinks(g, sinks.data());
  return Outcome::done;
}

static Outcome sparse_gradient(const sparse::Gradient& g, const Runtime& runtime) {
  if constexpr (kHasPairs) {
    if (!multiplies_pairs(g.attention)) return FA_OTHERS::sparse_kernels.gradient(g, runtime);
  }
  Outcome outcome = Outcome::done;
  auto with = [&](auto layout) { outcome = gradient_of<decltype(layout)>(g, runtime); };
  with_layout<kHasPairs>(g.attention.group(), with);
  return outcome;
}

}  // namespace fa::FA_ISA
