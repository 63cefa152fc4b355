// SparseFlashAttention: each row of each key head attends its selected keys, block by block, with an online softmax.
//
// The time grows with rows x selected keys. Each thread holds one block of keys and the results of one row.
#pragma once

#include "../online_softmax.hpp"
#include "score_block.hpp"
#include "scratch.hpp"

namespace fa::FA_ISA {

inline constexpr int64_t kRowsOfTask = 4;  // rows x key heads; each takes hundreds of microseconds at full size

// Whether value is the first part of key, as where both are one latent vector (MLA). Its rows are then not gathered again.
// The value has to be whole vectors: a product along the rows would multiply the rope part with zeros, which do not hide an
// infinity.
FA_INLINE bool shares_key(const sparse::Attention& a) {
  return a.key.plain == a.value.plain && a.key.size == a.value.size && (a.key.size % kLanes == 0 || a.key.rope_size == 0);
}

// Computes rows of one call, one after the other, in the memory of one thread.
template <class Layout>
class RowAttention {
 public:
  RowAttention(const sparse::Attention& a, const Runtime& runtime)
      : a_(a), runtime_(runtime), group_(a.group()), padded_heads_(Layout::padded_heads(group_)), shared_(shares_key(a)),
        tokens_(runtime, a.lists.room),
        floats_(runtime, query_floats() + key_floats() + value_floats() + padded_heads_ * kGatherKeys +
                Layout::weighted_sum_floats(group_) + padded_heads_ * columns_of(a.value.size) +
                4 * padded_heads_ + larger(a.query.numbers(), a.value.size)),
        keys_(a.key), values_(a.value) {
    if (!floats_) return;
    query_ = floats_.data();
    key_copies_ = query_ + query_floats();
    value_copies_ = key_copies_ + key_floats();
    scores_ = value_copies_ + value_floats();
    weights_ = scores_ + padded_heads_ * kGatherKeys;
    out_ = weights_ + Layout::weighted_sum_floats(group_);
    max_ = out_ + padded_heads_ * columns_of(a.value.size);
    sum_ = max_ + padded_heads_;
    rescale_ = sum_ + padded_heads_;
    block_stat_ = rescale_ + padded_heads_;
    row_ = block_stat_ + padded_heads_;
  }

  explicit operator bool() const { return tokens_ && floats_; }

  // Returns false if there is no memory.
  bool run(int64_t row, int64_t head) {
    const sparse::Sequence& sequence = sequence_of(a_.batch, row);
    const int64_t token = sequence.query + row;
    const int64_t list = a_.lists.heads == 1 ? 0 : head;
    const int64_t count = selected_tokens(a_.batch, a_.lists, sequence, row, list, tokens_.data());
    if (count == 0) {
      empty(sequence, row, head);
      return true;
    }
    Layout::pack_query(a_.query, token, head * group_, group_, query_, row_);
    for (int64_t h = 0; h < padded_heads_; ++h) {
      const bool sink = a_.sinks != nullptr && h < group_;
      max_[h] = sink ? a_.sinks[head * group_ + h] : -kInfinity;
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
    if (a_.out != nullptr && !finite && !accumulate_in_double(tokens_.data(), count, head)) return false;
    for (int64_t h = 0; h < group_; ++h) {
      if (a_.out == nullptr) break;
      const float* out = out_ + h * columns_of(a_.value.size);
      write_floats(a_.out, (token * a_.query.heads + head * group_ + h) * a_.value.size, out, a_.value.size,
                   a_.query.type);
    }
    statistics(sequence, row, head, max_, sum_);
    return true;
  }

 private:
  int64_t query_floats() const { return Layout::query_floats(group_, a_.query.numbers()); }
  int64_t key_floats() const { return GatheredRows<Layout::kPairs>::floats(a_.key); }
  int64_t value_floats() const { return shared_ ? 0 : GatheredRows<Layout::kPairs>::floats(a_.value); }

  // The next block of the `remaining` selected keys.
  void add_block(const int64_t* tokens, int64_t remaining, int64_t head) {
    const int64_t count = smaller(kGatherKeys, remaining);
    prefetch(a_.key, tokens + count, smaller(kGatherKeys, remaining - count), head,
             !GatheredRows<Layout::kPairs>::in_place(a_.key));
    if (!shared_) prefetch(a_.value, tokens + count, smaller(kGatherKeys, remaining - count), head, true);
    keys_.gather(tokens, count, head, key_copies_);
    if (!shared_) values_.gather(tokens, count, head, value_copies_);
    compute_scores(count);
    Layout::largest(scores_, group_, count, block_stat_);
    for (int64_t h = 0; h < padded_heads_; ++h) update_max(h);
    compute_exponentials(count);
    Layout::sums(scores_, group_, count, block_stat_);
    for (int64_t h = 0; h < padded_heads_; ++h) sum_[h] = sum_[h] * rescale_[h] + block_stat_[h];
    if (a_.out == nullptr) return;
    Layout::weighted_sum(scores_, group_, shared_ ? keys_ : values_, a_.value.size, count, out_, rescale_, weights_);
  }

  void compute_scores(int64_t count) {
    Layout::scores(query_, group_, keys_, a_.key.numbers(), count, scores_);
    const Vec scale = splat(a_.scale);
    Layout::each(scores_, group_, count, [&](Vec s, int64_t, int64_t) { return s * scale; });
  }

  void compute_exponentials(int64_t count) {
    Layout::each(scores_, group_, count, [&](Vec s, int64_t h, int64_t) {
      return exp_nonpositive(s - Layout::of_heads(max_, h));
    });
  }

  // Computes the means of the values in double. Called if some value is inf or NaN, or if a sum of floats overflows although
  // the mean does not.
  bool accumulate_in_double(const int64_t* tokens, int64_t count, int64_t head) {
    const int64_t size = a_.value.size;
    Scratch<double> sums(runtime_, group_ * size);
    if (!sums) return false;
    for (int64_t i = 0; i < group_ * size; ++i) sums.data()[i] = 0;
    for (int64_t first = 0; first < count; first += kGatherKeys) {
      const int64_t keys = smaller(kGatherKeys, count - first);
      keys_.gather(tokens + first, keys, head, key_copies_);
      compute_scores(keys);
      compute_exponentials(keys);
      for (int64_t j = 0; j < keys; ++j) {
        read_numbers(a_.value, tokens[first + j], head, 0, size, row_);
        for (int64_t h = 0; h < group_; ++h) {
          const double p = Layout::at(scores_, h, j);
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

  // Raises head h's largest score to that of the present block, and computes the factor of its earlier sums.
  void update_max(int64_t h) {
    const float old = max_[h];
    max_[h] = block_stat_[h] > old || is_nan(block_stat_[h]) ? block_stat_[h] : old;
    rescale_[h] = old == -kInfinity ? 0.0f : exp_nonpositive(splat(old - max_[h]))[0];
    // Scores of -inf alone have made NaN so far, which the factor 0 would not remove.
    if (old == -kInfinity && max_[h] > -kInfinity && h < group_) {
      sum_[h] = 0;
      float* out = out_ + h * columns_of(a_.value.size);
      for (int64_t d = 0; d < columns_of(a_.value.size); ++d) out[d] = 0;
    }
  }

  // Writes softmax_max and softmax_sum of a row.
  void statistics(const sparse::Sequence& sequence, int64_t row, int64_t head, const float* top, const float* sum) {
    const int64_t at = sequence.statistics + head * a_.statistics_head + row * group_;
    for (int64_t h = 0; h < group_; ++h) {
      if (a_.softmax_max != nullptr) a_.softmax_max[at + h] = top[h];
      if (a_.softmax_sum != nullptr) a_.softmax_sum[at + h] = sum[h];
    }
  }

  // Writes a row that selects no key: what cpu_empty_rows says.
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
      if (!add_up(1.0f)) add_up(overflow_scale_for(sequence.keys));
    }
    for (int64_t h = 0; h < group_; ++h) {
      const int64_t q = head * group_ + h;
      if (a_.out != nullptr) {
        write_floats(a_.out, ((sequence.query + row) * a_.query.heads + q) * size, mean, size, a_.query.type);
      }
      max_[h] = a_.sinks != nullptr ? a_.sinks[q] : sparse::kEmptyMax;
      sum_[h] = a_.sinks != nullptr ? 1.0f : 0.0f;
    }
    statistics(sequence, row, head, max_, sum_);
  }

  const sparse::Attention& a_;
  const Runtime& runtime_;
  int64_t group_, padded_heads_;
  bool shared_;
  Scratch<int64_t> tokens_;
  Scratch<float> floats_;
  GatheredRows<Layout::kPairs> keys_, values_;
  float *query_ = nullptr, *key_copies_ = nullptr, *value_copies_ = nullptr, *scores_ = nullptr, *weights_ = nullptr,
        *out_ = nullptr, *max_ = nullptr, *sum_ = nullptr, *rescale_ = nullptr, *block_stat_ = nullptr, *row_ = nullptr;
};

static Outcome sparse_attention(const sparse::Attention& a, const Runtime& runtime) {
  if constexpr (kHasPairs) {
    if (!multiplies_pairs(a)) return FA_OTHERS::sparse_kernels.attention(a, runtime);
  }
  Failure failure;
  auto with = [&](auto layout) {
    using Layout = decltype(layout);
    const int64_t heads = a.key.heads;
    auto part = [&](int64_t first, int64_t last) {
      RowAttention<Layout> rows(a, runtime);
      if (!rows) return failure.set();
      for (int64_t i = first; i < last; ++i) {
        if (!rows.run(i / heads, i % heads)) return failure.set();
      }
    };
    in_parallel(runtime, a.batch.rows * heads, kRowsOfTask, part);
  };
  with_layout<kHasPairs>(a.group(), with);
  return failure.outcome();
}

}  // namespace fa::FA_ISA
