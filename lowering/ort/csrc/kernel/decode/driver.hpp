// Runs IncreFlashAttention: plans the tasks and spreads them over threads. The thread that finishes the last split of an
// entry's key heads merges them.
#pragma once

#include "../finite.hpp"
#include "byte_products.hpp"
#include "int8.hpp"

namespace fa::FA_ISA {

class Decoder {
 public:
  Decoder(const Decode& decode, const Runtime& runtime)
      : d_(decode), runtime_(runtime), plan_(decode), group_(decode.group()),
        columns_(ceil_div(decode.size, kLanes) * kLanes),
        state_floats_(SoftmaxState::floats(group_, columns_)) {}

  Outcome run() {
    clear_results();
    if (d_.query_cell == Cell::int8) {
      tasks_ = d_.entry_count * d_.heads;
      return run_tasks();
    }
    // For each entry: the end of its tasks; then, for each of its groups of key heads, the splits that are not done.
    const size_t counters = static_cast<size_t>(d_.entry_count * (1 + plan_.tasks_per_entry)) * sizeof(int64_t);
    int64_t states = 0;
    for (int64_t i = 0; i < d_.entry_count; ++i) states += plan_.splits(d_.entries[i]) * d_.key_heads;
    void* memory = runtime_.allocate(runtime_.self, counters + static_cast<size_t>(states * state_floats_) * 4 + 64);
    if (memory == nullptr) return Outcome::out_of_memory;
    task_ends_ = static_cast<int64_t*>(memory);
    splits_left_ = task_ends_ + d_.entry_count;
    states_ = reinterpret_cast<float*>(
        (reinterpret_cast<uintptr_t>(splits_left_ + d_.entry_count * plan_.tasks_per_entry) + 63) / 64 * 64);
    for (int64_t i = 0; i < d_.entry_count; ++i) {
      const int64_t splits = plan_.splits(d_.entries[i]);
      tasks_ += splits * plan_.tasks_per_entry;
      task_ends_[i] = tasks_;
      for (int64_t head_group = 0; head_group < plan_.tasks_per_entry; ++head_group) {
        splits_left_[i * plan_.tasks_per_entry + head_group] = splits;
      }
    }
    const Outcome outcome = run_tasks();
    runtime_.release(runtime_.self, memory);
    return outcome;
  }

 private:
  static constexpr int64_t kWorkers = 64;

  // An entry without tokens gives 0, also in int8.
  void clear_results() {
    const int64_t bytes = d_.heads * d_.size * bytes_of(d_.out_cell);
    for (int64_t i = 0; i < d_.entry_count; ++i) {
      if (d_.entries[i].length == 0) {
        __builtin_memset(static_cast<char*>(d_.out) + i * bytes, 0, static_cast<size_t>(bytes));
      }
    }
  }

  Outcome run_tasks() {
    const int64_t workers = plan_.bytes(d_) < kSerialBytes ? smaller(1, tasks_) : smaller(kWorkers, tasks_);
    if (workers == 1) {
      work(this, 0);
    } else if (workers > 1) {
      runtime_.parallel(runtime_.self, work, this, static_cast<size_t>(workers));
    }
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

  static void work(void* self, size_t) {
    Decoder& decoder = *static_cast<Decoder*>(self);
    int64_t task = __atomic_fetch_add(&decoder.next_, 1, __ATOMIC_RELAXED);
    if (task >= decoder.tasks_) return;
    void* memory = decoder.runtime_.allocate(decoder.runtime_.self, decoder.scratch_bytes());
    if (memory == nullptr) {
      __atomic_store_n(&decoder.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    bool prefetched = false;
    while (task < decoder.tasks_) {
      // A thread reserves its next task only if there are many: the others could not help with the last ones.
      const bool reserves = decoder.tasks_ - task > kTasks;
      const int64_t next = reserves ? __atomic_fetch_add(&decoder.next_, 1, __ATOMIC_RELAXED) : decoder.tasks_;
      prefetched = decoder.run_task(task, next, prefetched, memory);
      task = reserves ? next : __atomic_fetch_add(&decoder.next_, 1, __ATOMIC_RELAXED);
    }
    decoder.runtime_.release(decoder.runtime_.self, memory);
  }

  int64_t task_rows() const { return plan_.task_key_heads * group_; }

  // The memory of a worker is that of DecodeScratch, and in calls that multiply bytes that of ByteScratch after it.
  size_t float_scratch_bytes() const { return DecodeScratch::bytes(task_rows(), plan_.token_stride(), columns_); }
  int64_t step_state_floats() const { return plan_.task_key_heads * state_floats_; }

  size_t scratch_bytes() const {
    if (d_.query_cell != Cell::int8) {
      if (!multiplies_bytes(d_)) return float_scratch_bytes();
      return float_scratch_bytes() + ByteScratch::bytes(plan_.task_key_heads, group_, d_.size, step_state_floats());
    }
    int64_t longest = 0;
    for (int64_t i = 0; i < d_.entry_count; ++i) longest = larger(longest, d_.entries[i].length);
    return Int8Scratch::bytes(longest, d_.size);
  }

  // Some tokens of one group of key heads of an entry.
  struct Split {
    int64_t index;       // of the entry
    int64_t head_group;
    int64_t splits;      // of this group
    int64_t first;       // token
    int64_t end;
    float* states;       // of its first split
    float* own;
  };

  Split split_of(int64_t task) const {
    int64_t index = 0;
    while (task_ends_[index] <= task) ++index;
    const int64_t begin = index == 0 ? 0 : task_ends_[index - 1];
    const int64_t splits = (task_ends_[index] - begin) / plan_.tasks_per_entry;
    const int64_t head_group = (task - begin) / splits;
    const int64_t split = (task - begin) % splits;
    const DecodeEntry& entry = d_.entries[index];
    const int64_t first = split * plan_.split_tokens(entry);
    float* states = states_ + (begin + head_group * splits) * step_state_floats();
    return {index, head_group, splits, first, smaller(entry.length, first + plan_.split_tokens(entry)), states,
            states + split * step_state_floats()};
  }

  // Runs one task, and merges the splits of its heads if it is the last one of them. `prefetched`: whether the task before has
  // prefetched its first keys. Returns the same of the task `next`, if there is one.
  bool run_task(int64_t task, int64_t next, bool prefetched, void* memory) {
    if (d_.query_cell == Cell::int8) {
      const int64_t entry = task / d_.heads;
      if (d_.entries[entry].length > 0) attend_int8(d_, entry, task % d_.heads, memory);
      return false;
    }
    const DecodeScratch scratch(memory, task_rows(), plan_.token_stride(), columns_);
    const Split split = split_of(task);
    bool prefetches = false;
    if (kHasByteProducts && has_byte_products(split)) {
      const ByteScratch bytes(static_cast<char*>(memory) + float_scratch_bytes(), plan_.task_key_heads, group_, d_.size);
      if (!prefetched) prefetch_first_keys(task_of(split, split.own, 1.0f, scratch), split.first, bytes);
      read_queries(split, scratch);
      if (set_byte_queries(scratch, bytes)) {
        const Split after = next < tasks_ ? split_of(next) : split;
        prefetches = next < tasks_ && has_byte_products(after);
        const DecodeTask next_task = task_of(after, after.own, 1.0f, scratch);
        attend(split, split.first, split.own, false, 1.0f, scratch, {&bytes, prefetches ? &next_task : nullptr, after.first});
      } else {
        attend(split, split.first, split.own, false, 1.0f, scratch, ByteTask{});
      }
    } else {
      read_queries(split, scratch);
      attend(split, split.first, split.own, false, 1.0f, scratch, ByteTask{});
    }
    int64_t* left = splits_left_ + split.index * plan_.tasks_per_entry + split.head_group;
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) finish(split, scratch);
    return prefetches;
  }

  bool has_byte_products(const Split& split) const {
    return multiplies_bytes(d_) && d_.entries[split.index].length >= kByteTokens;
  }

  // The queries of a task as operands of the products: pairs, or floats. They are multiplied by the scale of quantised keys.
  // The numbers beyond the head size are 0.
  void read_queries(const Split& split, const DecodeScratch& s) const {
    const int64_t first_head = split.head_group * task_rows();
    for (int64_t r = 0; r < task_rows(); ++r) {
      const int64_t head = first_head + r;
      const int64_t at = (split.index * d_.heads + head) * d_.size;
      float* to = s.queries + r * columns_;
      if (kHasPairs && d_.cell == Cell::bfloat16) {
        const size_t bytes = static_cast<size_t>(d_.size) * sizeof(uint16_t);
        __builtin_memcpy(to, static_cast<const uint16_t*>(d_.query) + at, bytes);
        __builtin_memset(reinterpret_cast<char*>(to) + bytes, 0, static_cast<size_t>(columns_) * sizeof(float) - bytes);
        continue;
      }
      const float* from = as_floats(d_.query, at, d_.size, type_of(d_.query_cell), to);
      if (from != to) __builtin_memcpy(to, from, static_cast<size_t>(d_.size) * sizeof(float));
      for (int64_t i = d_.size; i < columns_; ++i) to[i] = 0;
      float constant = 0;
      if (d_.key_scale != nullptr) {
        for (int64_t i = 0; i < d_.size; ++i) {
          const int64_t channel = d_.antiquant_per_channel ? head / group_ * d_.size + i : 0;
          to[i] *= d_.key_scale[channel];
          if (d_.key_offset != nullptr) constant += to[i] * d_.key_offset[channel];
        }
      }
      s.constants[r] = constant;
    }
  }

  // The digits of the queries of a task. False if some row has none.
  bool set_byte_queries(const DecodeScratch& s, const ByteScratch& bytes) const {
    const int64_t head_rows = ByteQueries::groups(group_) * kByteRows;  // of a key head, whole groups
    const ByteQueries queries(bytes.queries, plan_.task_key_heads * head_rows, d_.size);
    for (int64_t r = 0; r < task_rows(); ++r) {
      if (!queries.set(r / group_ * head_rows + r % group_, s.queries + r * columns_, d_.size)) return false;
    }
    return true;
  }

  DecodeTask task_of(const Split& split, float* states, float overflow_scale, const DecodeScratch& s) const {
    return {d_, d_.entries[split.index], split.head_group * plan_.task_key_heads, plan_.task_key_heads, group_, split.end,
            columns_, s.queries, s.constants, s.scores, plan_.token_stride(), states, state_floats_, overflow_scale};
  }

  // What a task needs that multiplies bytes. `memory` is null if the products are of floats.
  struct ByteTask {
    const ByteScratch* memory = nullptr;
    const DecodeTask* next = nullptr;  // the task whose first keys are prefetched at the end
    int64_t next_first = 0;            // its first token
  };

  // Attends the tokens of the split from `begin` on.
  void attend(const Split& split, int64_t begin, float* states, bool masks_score, float overflow_scale,
              const DecodeScratch& s, const ByteTask& bytes) const {
    const DecodeEntry& entry = d_.entries[split.index];
    const DecodeTask heads = task_of(split, states, overflow_scale, s);
    for (int64_t n = 0; n < heads.count; ++n) heads.state(n).clear(group_, columns_);
    for (int64_t first = begin; first < split.end; first += plan_.tokens) {
      DecodeStep tokens{first, smaller(plan_.tokens, split.end - first), nullptr, masks_score};
      if (entry.mask != nullptr && read_mask(entry.mask + first, tokens, s.hidden)) continue;
      if (kHasByteProducts && bytes.memory != nullptr) {
        attend_byte_step(heads, tokens, s, *bytes.memory, bytes.next, bytes.next_first);
      } else {
        step(heads, tokens, s);
      }
    }
  }

  // Reads the mask of a step. Returns true if the whole step is left out.
  static bool read_mask(const uint8_t* mask, DecodeStep& tokens, uint8_t* hidden) {
    uint8_t any = 0;
    uint8_t all = 1;
    for (int64_t j = 0; j < tokens.count; ++j) {
      any |= mask[j];
      all &= static_cast<uint8_t>(mask[j] != 0);
    }
    if (any != 0) {
      __builtin_memcpy(hidden, mask, static_cast<size_t>(tokens.count));
      tokens.hidden = hidden;
    }
    return all != 0 && !tokens.masks_score;
  }

  // The query is bfloat16 as well, so products of pairs round nothing. With pairs of values the weights would be rounded.
  using Bfloat16Keys = PairsOr<kHasPairs, StoredBfloat16>;

  // Runs one step with the types that the keys and values are stored in.
  void step(const DecodeTask& h, const DecodeStep& t, const DecodeScratch& s) const {
    switch (d_.cell) {
      case Cell::float32: return step_of<Cell::float32, StoredFloats, StoredFloats>(h, t, s);
      case Cell::float16: return step_of<Cell::float16, StoredFloat16, StoredFloat16>(h, t, s);
      case Cell::bfloat16:
        // In narrower vectors, merging the sums of even and odd numbers costs more than it saves.
        if (kLanes < 16 || d_.size % StoredEvenOdd::kPerLoad != 0) {
          return step_of<Cell::bfloat16, Bfloat16Keys, StoredBfloat16>(h, t, s);
        }
        return step_of<Cell::bfloat16, Bfloat16Keys, StoredEvenOdd>(h, t, s);
      case Cell::int8: return step_of<Cell::int8, StoredInt8, StoredInt8>(h, t, s);
    }
  }

  template <Cell kCell, class Keys, class Values>
  void step_of(const DecodeTask& h, const DecodeStep& t, const DecodeScratch& s) const {
    if constexpr (kDecodes<kCell>) {
      if (prefetches_pages(d_)) {
        attend_step<Paged<Keys>, Paged<Values>>(h, t, s);
      } else {
        attend_step<Keys, Values>(h, t, s);
      }
    }
  }

  // Merges the splits and writes the result. Some entries are computed again: those whose masked tokens have weight, and
  // those whose sums of values overflow.
  void finish(const Split& last, const DecodeScratch& s) const {
    float* states = last.states;
    for (int64_t split = 1; split < last.splits; ++split) {
      float* from = states + split * step_state_floats();
      for (int64_t n = 0; n < plan_.task_key_heads; ++n) {
        merge(SoftmaxState(states + n * state_floats_, group_), SoftmaxState(from + n * state_floats_, group_), group_,
              columns_);
      }
    }
    Split all = last;
    all.end = d_.entries[last.index].length;
    const bool masks_score = d_.entries[last.index].mask != nullptr && masked_tokens_matter(states);
    if (masks_score) attend(all, 0, states, true, 1.0f, s, ByteTask{});
    float overflow_scale = 1.0f;
    if (overflowed(states)) {
      overflow_scale = overflow_scale_for(all.end);
      attend(all, 0, states, masks_score, overflow_scale, s, ByteTask{});
    }
    write(last.index, task_of(all, states, overflow_scale, s), s.row);
  }

  // Whether a sum of values is inf or NaN although the sum of the row's weights is a number.
  bool overflowed(const float* states) const {
    for (int64_t n = 0; n < plan_.task_key_heads; ++n) {
      const SoftmaxState state(const_cast<float*>(states) + n * state_floats_, group_);
      for (int64_t r = 0; r < group_; ++r) {
        if (!is_nan(state.sum[r]) && !all_finite(state.sums + r * columns_, d_.size)) return true;
      }
    }
    return false;
  }

  // Whether a masked token has weight in some row. It has a score, too, but a very low one.
  bool masked_tokens_matter(const float* states) const {
    for (int64_t n = 0; n < plan_.task_key_heads; ++n) {
      const SoftmaxState state(const_cast<float*>(states) + n * state_floats_, group_);
      for (int64_t r = 0; r < group_; ++r) {
        if (!(state.max[r] > kMaskMatters) && !is_nan(state.sum[r])) return true;
      }
    }
    return false;
  }

  // Writes the rows of a group: sums divided by the total weight, with the scale of quantised values.
  void write(int64_t index, const DecodeTask& h, float* row) const {
    for (int64_t n = 0; n < h.count; ++n) {
      for (int64_t r = 0; r < group_; ++r) {
        const float sum = h.state(n).sum[r];
        // the sum is 0 if every score is -inf
        const float factor = sum == 0 ? __builtin_nanf("") : 1.0f / sum / h.overflow_scale;
        const float* sums = h.state(n).sums + r * columns_;
        for (int64_t i = 0; i < d_.size; ++i) row[i] = sums[i] * factor;
        if (d_.value_scale != nullptr) {
          for (int64_t i = 0; i < d_.size; ++i) {
            const int64_t channel = d_.antiquant_per_channel ? (h.first + n) * d_.size + i : 0;
            const float offset = d_.value_offset == nullptr ? 0.0f : d_.value_offset[channel];
            row[i] = (row[i] + offset) * d_.value_scale[channel];
          }
        }
        write_result(d_, (index * d_.heads + h.head(n, r)) * d_.size, h.head(n, r), row);
      }
    }
  }

  const Decode& d_;
  const Runtime& runtime_;
  const DecodePlan plan_;
  const int64_t group_;
  const int64_t columns_;
  const int64_t state_floats_;
  int64_t tasks_ = 0;
  int64_t next_ = 0;
  bool failed_ = false;
  int64_t* task_ends_ = nullptr;
  int64_t* splits_left_ = nullptr;
  float* states_ = nullptr;
};

}  // namespace fa::FA_ISA
