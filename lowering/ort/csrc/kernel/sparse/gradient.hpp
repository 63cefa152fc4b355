// SparseFlashAttentionGrad: the rows of a chunk make P, dS and dQ, then scatter.hpp adds dK and dV.
#pragma once

#include "attention.hpp"
#include "scatter.hpp"

namespace fa::FA_ISA {

// exp for arguments that may exceed 0 where the statistics come from other keys; beyond float's range it stays large.
FA_INLINE Vec exp_any(Vec x) {
  const Vec most = splat(88.0f);
  return exp_nonpositive(x > most ? most : x);
}

// Writes a row of gradients of a plain and a rope part (null if nobody reads them).
FA_INLINE void write_numbers(void* plain, void* rope, const Rows& like, int64_t row, const float* from) {
  if (plain != nullptr) write_floats(plain, row * like.size, from, like.size, like.type);
  if (rope != nullptr) write_floats(rope, row * like.rope_size, from + like.size, like.rope_size, like.type);
}

template <class Form>
class RowGradient {
 public:
  RowGradient(const sparse::Gradient& g, const Runtime& runtime)
      : g_(g), a_(g.attention), group_(a_.group()), padded_(Form::padded(group_)), shared_(shares_key(a_)),
        columns_(columns_of(a_.query.numbers())),
        floats_(runtime, query_floats(a_.query) + query_floats(g.d_out) + key_floats() + value_floats() +
                             Form::weigh_floats(group_) + padded_ * columns_ + 4 * padded_ + 2 * larger(a_.query.numbers(), a_.value.size)),
        keys_(a_.key), values_(a_.value) {
    if (!floats_) return;
    query_ = floats_.data();
    d_out_ = query_ + query_floats(a_.query);
    key_copies_ = d_out_ + query_floats(g.d_out);
    value_copies_ = key_copies_ + key_floats();
    weights_ = value_copies_ + value_floats();
    d_query_ = weights_ + Form::weigh_floats(group_);
    top_ = d_query_ + padded_ * columns_;
    share_ = top_ + padded_;
    dot_ = share_ + padded_;
    ones_ = dot_ + padded_;
    row_ = ones_ + padded_;
  }

  explicit operator bool() const { return static_cast<bool>(floats_); }

  // Floats that a block of keys leaves: P and behind it dS.
  static int64_t left_floats(int64_t group) { return 2 * Form::padded(group) * kGatherKeys; }

  // `sinks`: what each head's sink gets of the row, null if nobody reads it.
  void run(int64_t row, int64_t head, Left& left, double* sinks) {
    const sparse::Sequence& sequence = sequence_of(a_.batch, row);
    const int64_t token = sequence.query + row;
    selected_tokens(a_.batch, a_.lists, sequence, row, a_.lists.heads == 1 ? 0 : head, left.tokens);
    left.token = token;
    left.head = head;
    prepare(sequence, row, token, head);
    for (int64_t h = 0; h < group_ && sinks != nullptr; ++h) {
      sinks[h] = -dot_[h] * exp_any(splat(a_.sinks[head * group_ + h] - top_[h]))[0] * share_[h];
    }
    for (int64_t i = 0; i < group_ * columns_; ++i) d_query_[i] = 0;
    for (int64_t first = 0; first < left.count; first += kGatherKeys) {
      block(left.tokens + first, left.count - first, head,
            left.weights + first / kGatherKeys * left_floats(group_));
    }
    for (int64_t h = 0; h < group_; ++h) {
      write_numbers(g_.query, g_.query_rope, a_.query, token * a_.query.heads + head * group_ + h,
                    d_query_ + h * columns_);
    }
  }

 private:
  int64_t query_floats(const Rows& rows) const { return Form::query_floats(group_, rows.numbers()); }
  int64_t key_floats() const { return Listed<Form::kPairs>::floats(a_.key); }
  int64_t value_floats() const { return shared_ ? 0 : Listed<Form::kPairs>::floats(a_.value); }

  void prepare(const sparse::Sequence& sequence, int64_t row, int64_t token, int64_t head) {
    Form::pack_query(a_.query, token, head * group_, group_, query_, row_);
    Form::pack_query(g_.d_out, token, head * group_, group_, d_out_, row_);
    const int64_t size = a_.value.size;
    const int64_t statistics = sequence.statistics + head * a_.statistics_head + row * group_;
    for (int64_t h = 0; h < padded_; ++h) {
      top_[h] = share_[h] = dot_[h] = 0;
      ones_[h] = 1;
      if (h >= group_) continue;
      top_[h] = a_.softmax_max[statistics + h];
      share_[h] = 1.0f / a_.softmax_sum[statistics + h];
      float* other = row_ + larger(a_.query.numbers(), size);
      read_numbers(g_.d_out, token, head * group_ + h, 0, size, row_);
      read_numbers(g_.out, token, head * group_ + h, 0, size, other);
      for (int64_t d = 0; d < size; ++d) dot_[h] += row_[d] * other[d];
    }
  }

  // The next keys of `left` ones.
  void block(const int64_t* tokens, int64_t left, int64_t head, float* p) {
    const int64_t count = smaller(kGatherKeys, left);
    const int64_t numbers = a_.key.numbers();
    ask_for(a_.key, tokens + count, smaller(kGatherKeys, left - count), head, !Listed<Form::kPairs>::in_place(a_.key));
    if (!shared_) ask_for(a_.value, tokens + count, smaller(kGatherKeys, left - count), head, true);
    float* ds = p + padded_ * kGatherKeys;
    keys_.take(tokens, count, head, key_copies_);
    if (!shared_) values_.take(tokens, count, head, value_copies_);
    Form::scores(query_, group_, keys_, numbers, count, p);
    Form::scores(d_out_, group_, shared_ ? keys_ : values_, a_.value.size, count, ds);
    const Vec scale = splat(a_.scale);
    Form::each(p, group_, count, [&](Vec s, int64_t h, int64_t) {
      return exp_any(rounded(s * scale) - Form::of_heads(top_, h)) * Form::of_heads(share_, h);
    });
    Form::each(ds, group_, count, [&](Vec dp, int64_t h, int64_t place) {
      return load(p + place) * (dp - Form::of_heads(dot_, h)) * scale;
    });
    Form::weigh(ds, group_, keys_, numbers, count, d_query_, ones_, weights_);
    Form::leave(p, group_, count);
    Form::leave(ds, group_, count);
  }

  const sparse::Gradient& g_;
  const sparse::Attention& a_;
  int64_t group_, padded_;
  bool shared_;
  int64_t columns_;
  Scratch<float> floats_;
  Listed<Form::kPairs> keys_, values_;
  float *query_ = nullptr, *d_out_ = nullptr, *key_copies_ = nullptr, *value_copies_ = nullptr, *weights_ = nullptr,
        *d_query_ = nullptr,
        *top_ = nullptr, *share_ = nullptr, *dot_ = nullptr, *ones_ = nullptr, *row_ = nullptr;
};

template <class Form>
static Outcome gradient_of(const sparse::Gradient& g, const Runtime& runtime) {
  const sparse::Attention& a = g.attention;
  const int64_t heads = a.key.heads, group = a.group(), tokens = a.batch.key_tokens;
  const int64_t step = RowGradient<Form>::left_floats(group);
  const bool wants_key = g.key != nullptr || g.key_rope != nullptr, wants_value = g.value != nullptr;
  KeySums d_key(runtime, wants_key ? a.key.numbers() : 0, heads, tokens);
  KeySums d_value(runtime, wants_value ? a.value.size : 0, heads, tokens);
  Scratch<double> sinks(runtime, g.sinks != nullptr ? a.batch.rows * a.query.heads : 0);
  if (!d_key || !d_value || !sinks) return Outcome::out_of_memory;
  d_key.clear(runtime);
  d_value.clear(runtime);
  const auto need = [&](int64_t i) {
    int64_t row = i / heads;
    const sparse::Sequence& sequence = sequence_of(a.batch, row);
    return selected_tokens(a.batch, a.lists, sequence, row, a.lists.heads == 1 ? 0 : i % heads, nullptr);
  };
  const auto make = [&](Left* left, int64_t first, int64_t last) {
    Failure failure;
    auto part = [&](int64_t from, int64_t to) {
      RowGradient<Form> rows(g, runtime);
      if (!rows) return failure.set();
      for (int64_t i = from; i < to; ++i) {
        double* of_row = g.sinks != nullptr ? sinks.data() + (first + i) * group : nullptr;
        rows.run((first + i) / heads, (first + i) % heads, left[i], of_row);
      }
    };
    in_parallel(runtime, last - first, 1, part);
    return failure.outcome();
  };
  const auto add = [&](const Left* left, int64_t count) {
    Failure failure;
    auto part = [&](int64_t first, int64_t last) {
      Scratch<float> scratch(runtime, Form::padded(group) * kPanel);
      if (!scratch) return failure.set();
      for (int64_t p = first; p < last; ++p) {
        const bool of_key = p < d_key.panels();
        const int64_t panel = of_key ? p : p - d_key.panels();
        if (of_key) d_key.add<Form>(left, count, a.query, group, step / 2, step, panel, scratch.data());
        if (of_key && !(g.merged && panel * kPanel < a.value.size)) continue;
        (of_key ? d_key : d_value).template add<Form>(left, count, g.d_out, group, 0, step, panel, scratch.data());
      }
    };
    in_parallel(runtime, d_key.panels() + d_value.panels(), 1, part);
    return failure.outcome();
  };
  const Outcome outcome = in_chunks(runtime, a.batch.rows * heads, step, need, make, add);
  if (outcome != Outcome::done) return outcome;
  if (wants_key) d_key.write(runtime, g.key, a.key.size, g.key_rope, a.key.type);
  if (wants_value) d_value.write(runtime, g.value, a.value.size, nullptr, a.value.type);
  for (int64_t h = 0; h < a.query.heads && g.sinks != nullptr; ++h) {
    double sum = 0;
    for (int64_t row = 0; row < a.batch.rows; ++row) sum += sinks.data()[row * a.query.heads + h];
    g.sinks[h] = static_cast<float>(sum);
  }
  return Outcome::done;
}

static Outcome sparse_gradient(const sparse::Gradient& g, const Runtime& runtime) {
  Outcome outcome = Outcome::done;
  auto with = [&](auto form) { outcome = gradient_of<decltype(form)>(g, runtime); };
  with_form(g.attention.group(), takes_pairs(g.attention), with);
  return outcome;
}

}  // namespace fa::FA_ISA
