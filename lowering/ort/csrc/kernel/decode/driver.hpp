// Decoding: tasks are given to threads, and whoever ends the last chunk of an entry's heads joins them.
#pragma once

#include "attend.hpp"
#include "int8.hpp"

namespace fa::FA_ISA {

class Decoder {
 public:
  Decoder(const Decode& decode, const Runtime& runtime)
      : d_(decode), runtime_(runtime), plan_(decode), group_(decode.group()),
        columns_(blocks_of(decode.size, kLanes) * kLanes),
        state_floats_(State::floats(group_, columns_)) {}

  Outcome run() {
    clear_results();
    if (d_.query_cell == Cell::int8) {
      tasks_ = d_.entry_count * d_.heads;
      return work_off();
    }
    // For each entry: the end of its tasks, then the tasks left of each of its parts (some heads).
    const size_t counters = static_cast<size_t>(d_.entry_count * (1 + plan_.head_tasks)) * sizeof(int64_t);
    int64_t states = 0;
    for (int64_t i = 0; i < d_.entry_count; ++i) states += plan_.chunks(d_.entries[i]) * d_.key_heads;
    void* memory = runtime_.allocate(runtime_.self, counters + static_cast<size_t>(states * state_floats_) * 4 + 64);
    if (memory == nullptr) return Outcome::out_of_memory;
    ends_ = static_cast<int64_t*>(memory);
    left_ = ends_ + d_.entry_count;
    states_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(left_ + d_.entry_count * plan_.head_tasks) + 63) / 64 * 64);
    for (int64_t i = 0; i < d_.entry_count; ++i) {
      const int64_t chunks = plan_.chunks(d_.entries[i]);
      tasks_ += chunks * plan_.head_tasks;
      ends_[i] = tasks_;
      for (int64_t part = 0; part < plan_.head_tasks; ++part) left_[i * plan_.head_tasks + part] = chunks;
    }
    const Outcome outcome = work_off();
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

  Outcome work_off() {
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
    while (task < decoder.tasks_) {
      decoder.run_task(task, memory);
      task = __atomic_fetch_add(&decoder.next_, 1, __ATOMIC_RELAXED);
    }
    decoder.runtime_.release(decoder.runtime_.self, memory);
  }

  int64_t task_rows() const { return plan_.heads_at_once * group_; }

  size_t scratch_bytes() const {
    if (d_.query_cell != Cell::int8) return DecodeScratch::bytes(task_rows(), plan_.token_row(), columns_);
    int64_t longest = 0;
    for (int64_t i = 0; i < d_.entry_count; ++i) longest = larger(longest, d_.entries[i].length);
    return IntegerScratch::bytes(longest, d_.size);
  }

  void run_task(int64_t task, void* memory) {
    if (d_.query_cell == Cell::int8) {
      const int64_t entry = task / d_.heads;
      if (d_.entries[entry].length > 0) attend_integers(d_, entry, task % d_.heads, memory);
      return;
    }
    int64_t index = 0;
    while (ends_[index] <= task) ++index;
    const int64_t begin = index == 0 ? 0 : ends_[index - 1];
    const int64_t chunks = (ends_[index] - begin) / plan_.head_tasks;
    const int64_t part = (task - begin) / chunks;
    const int64_t chunk = (task - begin) % chunks;
    const DecodeScratch scratch(memory, task_rows(), plan_.token_row(), columns_);
    const DecodeEntry& entry = d_.entries[index];
    const int64_t tokens = plan_.chunk_tokens(entry);
    float* own = states_ + (begin * plan_.heads_at_once + (part * chunks + chunk) * plan_.heads_at_once) * state_floats_;
    read_queries(index, part, scratch);
    attend(index, part, chunk * tokens, smaller(entry.length, (chunk + 1) * tokens), own, false, 1.0f, scratch);
    int64_t* left = left_ + index * plan_.head_tasks + part;
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) {
      finish(index, part, chunks, own - chunk * plan_.heads_at_once * state_floats_, scratch);
    }
  }

  // The queries of a task as the keys want them: pairs, or floats with the scale of quantised keys in them. What is beyond
  // the head size is 0.
  void read_queries(int64_t index, int64_t part, const DecodeScratch& s) const {
    const int64_t first_head = part * task_rows();
    for (int64_t r = 0; r < task_rows(); ++r) {
      const int64_t head = first_head + r;
      const int64_t at = (index * d_.heads + head) * d_.size;
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

  Heads heads_of(int64_t index, int64_t part, int64_t end, float* states, float unit, const DecodeScratch& s) const {
    return {d_, d_.entries[index], part * plan_.heads_at_once, plan_.heads_at_once, group_, end, columns_, s.queries,
            s.constants, s.scores, plan_.token_row(), states, state_floats_, unit};
  }

  void attend(int64_t index, int64_t part, int64_t begin, int64_t end, float* states, bool filled, float unit,
              const DecodeScratch& s) const {
    const DecodeEntry& entry = d_.entries[index];
    const Heads heads = heads_of(index, part, end, states, unit, s);
    for (int64_t n = 0; n < heads.count; ++n) heads.state(n).clear(group_, columns_);
    for (int64_t first = begin; first < end; first += plan_.tokens) {
      Tokens tokens{first, smaller(plan_.tokens, end - first), nullptr, filled};
      if (entry.mask != nullptr && hide(entry.mask + first, tokens, s.hidden)) continue;
      step(heads, tokens, s);
    }
  }

  // Looks at the mask of a step; true if all of it is left out.
  static bool hide(const uint8_t* mask, Tokens& tokens, uint8_t* hidden) {
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
    return all != 0 && !tokens.filled;
  }

  // The query is bfloat16, too, so products of pairs round nothing. Weights would be rounded.
  using Bfloat16Keys = PairsOr<kHasPairs, StoredBfloat16>;

  void step(const Heads& h, const Tokens& t, const DecodeScratch& s) const {
    switch (d_.cell) {
      case Cell::float32: return attend_tokens<StoredFloats, StoredFloats>(h, t, s);
      case Cell::float16: return attend_tokens<StoredFloat16, StoredFloat16>(h, t, s);
      case Cell::bfloat16:
        // With narrower vectors joining the sums of even and odd numbers costs more than it saves.
        if (kLanes < 16 || d_.size % StoredApart::kStep != 0) return attend_tokens<Bfloat16Keys, StoredBfloat16>(h, t, s);
        return attend_tokens<Bfloat16Keys, StoredApart>(h, t, s);
      case Cell::int8: return attend_tokens<StoredInt8, StoredInt8>(h, t, s);
    }
  }

  void finish(int64_t index, int64_t part, int64_t chunks, float* states, const DecodeScratch& s) const {
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      float* from = states + chunk * plan_.heads_at_once * state_floats_;
      for (int64_t n = 0; n < plan_.heads_at_once; ++n) {
        join(State(states + n * state_floats_, group_), State(from + n * state_floats_, group_), group_, columns_);
      }
    }
    const int64_t length = d_.entries[index].length;
    const bool filled = d_.entries[index].mask != nullptr && masked_tokens_matter(states);
    if (filled) attend(index, part, 0, length, states, true, 1.0f, s);
    float unit = 1.0f;
    if (overflowed(states)) {
      unit = unit_for(length);
      attend(index, part, 0, length, states, filled, unit, s);
    }
    write(index, heads_of(index, part, length, states, unit, s), s.row);
  }

  // Whether a row has a sum of values that is inf or NaN although the sum of its weights is a number.
  bool overflowed(const float* states) const {
    for (int64_t n = 0; n < plan_.heads_at_once; ++n) {
      const State state(const_cast<float*>(states) + n * state_floats_, group_);
      for (int64_t r = 0; r < group_; ++r) {
        if (is_nan(state.total[r])) continue;
        float check = 0;  // inf * 0 and NaN * 0 are NaN
        for (int64_t i = 0; i < d_.size; ++i) check += state.sums[r * columns_ + i] * 0.0f;
        if (is_nan(check)) return true;
      }
    }
    return false;
  }

  // A masked token has a score, too, only a very low one.
  bool masked_tokens_matter(const float* states) const {
    for (int64_t n = 0; n < plan_.heads_at_once; ++n) {
      const State state(const_cast<float*>(states) + n * state_floats_, group_);
      for (int64_t r = 0; r < group_; ++r) {
        if (!(state.max[r] > kMaskMatters) && !is_nan(state.total[r])) return true;
      }
    }
    return false;
  }

  void write(int64_t index, const Heads& h, float* row) const {
    for (int64_t n = 0; n < h.count; ++n) {
      for (int64_t r = 0; r < group_; ++r) {
        const float total = h.state(n).total[r];
        const float factor = total == 0 ? __builtin_nanf("") : 1.0f / total / h.unit;  // 0: every score is -inf
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
  const Plan plan_;
  const int64_t group_;
  const int64_t columns_;
  const int64_t state_floats_;
  int64_t tasks_ = 0;
  int64_t next_ = 0;
  bool failed_ = false;
  int64_t* ends_ = nullptr;
  int64_t* left_ = nullptr;
  float* states_ = nullptr;
};

}  // namespace fa::FA_ISA
