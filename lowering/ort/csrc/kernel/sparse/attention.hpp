// SparseFlashAttention: each row of each key head by itself, its selected keys block by block, with a running maximum.
//
// Time is rows x selected keys; memory is one block of keys and the results of one row for each thread.
#pragma once

#include "../online_softmax.hpp"
#include "score_block.hpp"
#include "scratch.hpp"

namespace fa::FA_ISA {

inline constexpr int64_t kRowsOfTask = 4;  // rows x key heads; each is hundreds of microseconds at full size

// Whether value is the beginning of key, as where both are one latent: then its rows need not be gathered again. Whole
// vectors of it, for a product along the rows would meet the rope part with zeros, which do not hide an infinity.
FA_INLINE bool shares_key(const sparse::Attention& a) {
  return a.key.plain == a.value.plain && a.key.size == a.value.size && (a.key.size % kLanes == 0 || a.key.rope_size == 0);
}

template <class Form>
class RowAttention {
 public:
  RowAttention(const sparse::Attention& a, const Runtime& runtime)
      : a_(a), runtime_(runtime), group_(a.group()), padded_(Form::padded(group_)), shared_(shares_key(a)),
        tokens_(runtime, a.lists.room),
        floats_(runtime, query_floats() + key_floats() + value_floats() + padded_ * kGatherKeys +
                             Form::weigh_floats(group_) + padded_ * columns_of(a.value.size) + 4 * padded_ +
                             larger(a.query.numbers(), a.value.size)),
        keys_(a.key), values_(a.value) {
    if (!floats_) return;
    query_ = floats_.data();
    key_copies_ = query_ + query_floats();
    value_copies_ = key_copies_ + key_floats();
    scores_ = value_copies_ + value_floats();
    weights_ = scores_ + padded_ * kGatherKeys;
    out_ = weights_ + Form::weigh_floats(group_);
    top_ = out_ + padded_ * columns_of(a.value.size);
    sum_ = top_ + padded_;
    alpha_ = sum_ + padded_;
    change_ = alpha_ + padded_;
    row_ = change_ + padded_;
  }

  explicit operator bool() const { return tokens_ && floats_; }

  // False where there is no memory for it.
  bool run(int64_t row, int64_t head) {
    const sparse::Sequence& sequence = sequence_of(a_.batch, row);
    const int64_t token = sequence.query + row;
    const int64_t list = a_.lists.heads == 1 ? 0 : head;
    const int64_t count = selected_tokens(a_.batch, a_.lists, sequence, row, list, tokens_.data());
    if (count == 0) {
      empty(sequence, row, head);
      return true;
    }
    Form::pack_query(a_.query, token, head * group_, group_, query_, row_);
    for (int64_t h = 0; h < padded_; ++h) {
      const bool sink = a_.sinks != nullptr && h < group_;
      top_[h] = sink ? a_.sinks[head * group_ + h] : -kInfinity;
      sum_[h] = sink ? 1.0f : 0.0f;
    }
    for (int64_t i = 0; i < group_ * columns_of(a_.value.size); ++i) out_[i] = 0;
    for (int64_t first = 0; first < count; first += kGatherKeys) {
      add_block(tokens_.data() + first, count - first, head);
    }
    bool finite = true;
    for (int64_t h = 0; h < group_; ++h) {
      float* out = out_ + h * columns_of(a_.value.size);
      const float factor = 1.0f / sum_[h];
      float check = 0;  // inf * 0 and NaN * 0 are NaN
      for (int64_t d = 0; d < a_.value.size; ++d) check += (out[d] *= factor) * 0.0f;
      finite = finite && (check == 0 || is_nan(sum_[h]));
    }
    if (a_.out != nullptr && !finite && !add_again(tokens_.data(), count, head)) return false;
    for (int64_t h = 0; h < group_; ++h) {
      if (a_.out == nullptr) break;
      const float* out = out_ + h * columns_of(a_.value.size);
      write_floats(a_.out, (token * a_.query.heads + head * group_ + h) * a_.value.size, out, a_.value.size,
                   a_.query.type);
    }
    statistics(sequence, row, head, top_, sum_);
    return true;
  }

 private:
  int64_t query_floats() const { return Form::query_floats(group_, a_.query.numbers()); }
  int64_t key_floats() const { return Listed<Form::kPairs>::floats(a_.key); }
  int64_t value_floats() const { return shared_ ? 0 : Listed<Form::kPairs>::floats(a_.value); }

  // The next keys of `left` ones.
  void add_block(const int64_t* tokens, int64_t left, int64_t head) {
    const int64_t count = smaller(kGatherKeys, left);
    ask_for(a_.key, tokens + count, smaller(kGatherKeys, left - count), head, !Listed<Form::kPairs>::in_place(a_.key));
    if (!shared_) ask_for(a_.value, tokens + count, smaller(kGatherKeys, left - count), head, true);
    keys_.take(tokens, count, head, key_copies_);
    if (!shared_) values_.take(tokens, count, head, value_copies_);
    make_scores(count);
    Form::largest(scores_, group_, count, change_);
    for (int64_t h = 0; h < padded_; ++h) raise(h);
    make_exponentials(count);
    Form::sums(scores_, group_, count, change_);
    for (int64_t h = 0; h < padded_; ++h) sum_[h] = sum_[h] * alpha_[h] + change_[h];
    if (a_.out == nullptr) return;
    Form::weigh(scores_, group_, shared_ ? keys_ : values_, a_.value.size, count, out_, alpha_, weights_);
  }

  void make_scores(int64_t count) {
    Form::scores(query_, group_, keys_, a_.key.numbers(), count, scores_);
    const Vec scale = splat(a_.scale);
    Form::each(scores_, group_, count, [&](Vec s, int64_t, int64_t) { return s * scale; });
  }

  void make_exponentials(int64_t count) {
    Form::each(scores_, group_, count, [&](Vec s, int64_t h, int64_t) {
      return exp_nonpositive(s - Form::of_heads(top_, h));
    });
  }

  // The means of the values in double: some value is inf or NaN, or a sum of floats overflows although the mean is one.
  bool add_again(const int64_t* tokens, int64_t count, int64_t head) {
    const int64_t size = a_.value.size;
    Scratch<double> sums(runtime_, group_ * size);
    if (!sums) return false;
    for (int64_t i = 0; i < group_ * size; ++i) sums.data()[i] = 0;
    for (int64_t first = 0; first < count; first += kGatherKeys) {
      const int64_t keys = smaller(kGatherKeys, count - first);
      keys_.take(tokens + first, keys, head, key_copies_);
      make_scores(keys);
      make_exponentials(keys);
      for (int64_t j = 0; j < keys; ++j) {
        read_numbers(a_.value, tokens[first + j], head, 0, size, row_);
        for (int64_t h = 0; h < group_; ++h) {
          const double p = Form::at(scores_, h, j);
          for (int64_t d = 0; d < size; ++d) sums.data()[h * size + d] += p * row_[d];
        }
      }
    }
    for (int64_t h = 0; h < group_; ++h) {
      float* out = out_ + h * columns_of(size);
      for (int64_t d = 0; d < size; ++d) out[d] = static_cast<float>(sums.data()[h * size + d] / sum_[h]);
    }
    return true;
  }

  void raise(int64_t h) {
    const float old = top_[h];
    top_[h] = change_[h] > old || is_nan(change_[h]) ? change_[h] : old;
    alpha_[h] = old == -kInfinity ? 0.0f : exp_nonpositive(splat(old - top_[h]))[0];
    // Scores of -inf alone made NaN so far, which would outlive the factor 0.
    if (old == -kInfinity && top_[h] > -kInfinity && h < group_) {
      sum_[h] = 0;
      float* out = out_ + h * columns_of(a_.value.size);
      for (int64_t d = 0; d < columns_of(a_.value.size); ++d) out[d] = 0;
    }
  }

  void statistics(const sparse::Sequence& sequence, int64_t row, int64_t head, const float* top, const float* sum) {
    const int64_t at = sequence.statistics + head * a_.statistics_head + row * group_;
    for (int64_t h = 0; h < group_; ++h) {
      if (a_.softmax_max != nullptr) a_.softmax_max[at + h] = top[h];
      if (a_.softmax_sum != nullptr) a_.softmax_sum[at + h] = sum[h];
    }
  }

  void empty(const sparse::Sequence& sequence, int64_t row, int64_t head) {
    const int64_t size = a_.value.size;
    float* mean = out_;
    const EmptyRows rule = sequence.keys == 0 ? EmptyRows::zero : a_.empty_rows;
    for (int64_t d = 0; d < size; ++d) mean[d] = rule == EmptyRows::nan ? __builtin_nanf("") : 0.0f;
    if (rule == EmptyRows::mean) {
      const auto add_up = [&](float unit) {
        float check = 0;  // inf * 0 and NaN * 0 are NaN
        for (int64_t d = 0; d < size; ++d) mean[d] = 0;
        for (int64_t place = 0; place < sequence.keys; ++place) {
          read_numbers(a_.value, key_token(a_.batch, sequence, place), head, 0, size, row_);
          for (int64_t d = 0; d < size; ++d) mean[d] += row_[d] * unit;
        }
        for (int64_t d = 0; d < size; ++d) check += (mean[d] /= static_cast<float>(sequence.keys) * unit) * 0.0f;
        return check == 0;
      };
      if (!add_up(1.0f)) add_up(unit_for(sequence.keys));
    }
    for (int64_t h = 0; h < group_; ++h) {
      const int64_t q = head * group_ + h;
      if (a_.out != nullptr) {
        write_floats(a_.out, ((sequence.query + row) * a_.query.heads + q) * size, mean, size, a_.query.type);
      }
      top_[h] = a_.sinks != nullptr ? a_.sinks[q] : sparse::kEmptyMax;
      sum_[h] = a_.sinks != nullptr ? 1.0f : 0.0f;
    }
    statistics(sequence, row, head, top_, sum_);
  }

  const sparse::Attention& a_;
  const Runtime& runtime_;
  int64_t group_, padded_;
  bool shared_;
  Scratch<int64_t> tokens_;
  Scratch<float> floats_;
  Listed<Form::kPairs> keys_, values_;
  float *query_ = nullptr, *key_copies_ = nullptr, *value_copies_ = nullptr, *scores_ = nullptr, *weights_ = nullptr,
        *out_ = nullptr, *top_ = nullptr, *sum_ = nullptr, *alpha_ = nullptr, *change_ = nullptr, *row_ = nullptr;
};

static Outcome sparse_attention(const sparse::Attention& a, const Runtime& runtime) {
  Failure failure;
  auto with = [&](auto form) {
    using Form = decltype(form);
    const int64_t heads = a.key.heads;
    auto part = [&](int64_t first, int64_t last) {
      RowAttention<Form> rows(a, runtime);
      if (!rows) return failure.set();
      for (int64_t i = first; i < last; ++i) {
        if (!rows.run(i / heads, i % heads)) return failure.set();
      }
    };
    in_parallel(runtime, a.batch.rows * heads, kRowsOfTask, part);
  };
  with_form(a.group(), takes_pairs(a), with);
  return failure.outcome();
}

}  // namespace fa::FA_ISA
