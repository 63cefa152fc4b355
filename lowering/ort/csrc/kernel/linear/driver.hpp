// Runs linear attention: divides it into tasks and spreads them over threads.
//
// A task is some panels of the state of one head, or some channels, in one sequence or in all of them. No result depends on how
// the panels are divided. Sequences are tasks of their own only if none of them uses a state that another one writes.
#pragma once

#include "../prefetch.hpp"
#include "channels.hpp"
#include "chunk.hpp"
#include "step.hpp"

namespace fa::FA_ISA::lin {

// A problem that reads and writes fewer bytes of states, or multiplies fewer numbers (about 20 microseconds), stays on one
// thread: waking others costs more than it gives.
inline constexpr int64_t kInlineBytes = 1 << 18;
inline constexpr double kInlineProducts = 1 << 20;

class Driver {
 public:
  Driver(const Problem& problem, const Runtime& runtime)
      : p_(problem), runtime_(runtime), shape_(problem), steps_(steps_of(problem)), channels_(are_channels(problem)),
        groups_(channels_ ? ceil_div(problem.heads, kChannels) : problem.heads) {}

  Outcome run() {
    const bool apart = independent();
    sequence_tasks_ = apart ? p_.sequence_count : smaller(1, p_.sequence_count);
    sequences_of_task_ = apart ? 1 : p_.sequence_count;
    are_steps_ = !channels_;
    for (int64_t n = 0; n < p_.sequence_count && are_steps_; ++n) are_steps_ = in_place(p_.sequences[n]);
    const int64_t states = sequence_tasks_ * groups_;
    if (states == 0 || shape_.panels == 0) return Outcome::done;
    int64_t workers = is_small() ? 1 : smaller(kMostWorkers, runtime_.most_workers);
    parts_ = larger(1, smaller(shape_.panels, ceil_div(workers, states)));
    workers = smaller(workers, states * parts_);
    if (workers == 1) {
      work(this, 0);
    } else {
      runtime_.parallel(runtime_.self, work, this, static_cast<size_t>(workers));
    }
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  static constexpr int64_t kMostWorkers = 256;

  // Whether no sequence reads or writes a state that another one writes. Only states in ascending order are seen to be so.
  bool independent() const {
    for (int64_t n = 0; n < p_.sequence_count; ++n) {
      const linear::Sequence& sequence = p_.sequences[n];
      if (p_.present.data == nullptr) continue;
      if (n > 0 && sequence.present <= p_.sequences[n - 1].present) return false;
      const bool own = p_.past.data != p_.present.data || sequence.past < 0 || sequence.past == sequence.present;
      if (!own) return false;
    }
    return true;
  }

  bool is_small() const {
    int64_t tokens = 0;
    for (int64_t n = 0; n < p_.sequence_count; ++n) tokens += p_.sequences[n].tokens;
    const double numbers = static_cast<double>(p_.heads * shape_.keys * shape_.values);
    return numbers * static_cast<double>(p_.sequence_count) * sizeof(float) < kInlineBytes &&
           numbers * static_cast<double>(3 * tokens) < kInlineProducts;
  }

  static void work(void* self, size_t) { static_cast<Driver*>(self)->run_tasks(); }

  int64_t take_task() { return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED); }
  int64_t head_of(int64_t task) const { return task / parts_ % groups_; }
  int64_t first_sequence_of(int64_t task) const { return task / parts_ / groups_ * sequences_of_task_; }
  int64_t first_panel_of(int64_t task) const { return shape_.panels * (task % parts_) / parts_; }
  int64_t end_panel_of(int64_t task) const { return shape_.panels * (task % parts_ + 1) / parts_; }

  // A worker takes the next step before it computes one, so that it knows which state to prefetch. Longer tasks are taken when
  // a worker is free: the last ones may take long.
  void run_tasks() {
    const int64_t tasks = sequence_tasks_ * groups_ * parts_;
    int64_t task = take_task();
    if (task >= tasks) return;
    const int64_t panels = ceil_div(shape_.panels, parts_);
    const size_t bytes = channels_ ? static_cast<size_t>(ChannelScratch::floats(shape_)) * sizeof(float)
                                   : Scratch::bytes(p_, shape_, panels);
    void* memory = runtime_.allocate(runtime_.self, bytes + kCacheLine);
    if (memory == nullptr) {
      __atomic_store_n(&failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    float* const aligned = reinterpret_cast<float*>((address + kCacheLine - 1) / kCacheLine * kCacheLine);
    const Scratch scratch(p_, shape_, panels, channels_ ? nullptr : aligned);
    const ChannelScratch channel_scratch(shape_, aligned);
    while (task < tasks) {
      const int64_t next = are_steps_ ? take_task() : tasks;
      run_task(task, next < tasks ? state_of(next) : Lines{nullptr}, scratch, channel_scratch);
      task = are_steps_ ? next : take_task();
    }
    runtime_.release(runtime_.self, memory);
  }

  void run_task(int64_t task, Lines next, const Scratch& scratch, const ChannelScratch& channel_scratch) const {
    const int64_t head = head_of(task), first = first_sequence_of(task), end = first + sequences_of_task_;
    for (int64_t n = first; n < end; ++n) {
      if (channels_) {
        const int64_t channel = head * kChannels;
        Channels(p_, shape_, channel_scratch, channel, smaller(kChannels, p_.heads - channel)).run(p_.sequences[n]);
        continue;
      }
      const int64_t panel = first_panel_of(task);
      const Lines ahead = n + 1 < end && are_steps_ ? state_of(p_.sequences[n + 1], head, panel) : next;
      run_head(p_.sequences[n], head, panel, end_panel_of(task), scratch, ahead);
    }
  }

  // The state before a step, from a panel on.
  Lines state_of(const linear::Sequence& sequence, int64_t head, int64_t panel) const {
    return lines_of(p_.past, sequence.past, head, panel);
  }
  Lines state_of(int64_t task) const {
    return state_of(p_.sequences[first_sequence_of(task)], head_of(task), first_panel_of(task));
  }
  static Lines lines_of(const linear::States& states, int64_t entry, int64_t head, int64_t panel) {
    return {static_cast<float*>(states.data) + first_element(states, entry, head, panel * kPanel),
            states.value != 1 ? states.value : states.key};
  }

  // Whether a few tokens are computed on the states in memory.
  bool in_place(const linear::Sequence& sequence) const {
    const linear::States &past = p_.past, &present = p_.present;
    if (sequence.tokens == 0 || sequence.tokens >= kLeastChunk || sequence.past < 0) return false;
    if (past.data == nullptr || present.data == nullptr) return false;
    if (past.type != Type::float32 || present.type != Type::float32) return false;
    if (past.value == 1 && present.value == 1) return shape_.values % kPanel == 0;
    return past.value != 1 && present.value != 1 && shape_.keys == shape_.row;
  }

  void run_in_place(const linear::Sequence& sequence, int64_t head, int64_t first, int64_t end, const Scratch& s,
                    Lines next) const {
    const Tokens tokens{sequence.first, sequence.tokens, head};
    const bool reads = p_.out.data != nullptr, transposed = p_.past.value != 1;
    read_tokens(p_, shape_, head, tokens.first, tokens.count, s);
    decay_reads(p_, shape_, tokens.count, s);
    const int64_t panels = transposed ? 1 : end - first;
    for (int64_t n = first; n < end; n += panels) {
      read_values(tokens, n, s.values, panels);
      const Lines from = state_of(sequence, head, n), to = lines_of(p_.present, sequence.present, head, n);
      if (transposed) {
        steps_.transposed(shape_, s, tokens.count, from, to, shape_.columns(n), reads, next);
        if (next.data != nullptr) next.data += kPanel * next.stride;
      } else {
        steps_.in_place(shape_, s, tokens.count, from, to, panels * kPanel, reads, next);
      }
      write_results(tokens, n, s.results, kLeastChunk, panels);
    }
  }

  // Panels [first, end) of one head of a sequence. A step prefetches `next`.
  void run_head(const linear::Sequence& sequence, int64_t head, int64_t first, int64_t end, Scratch s, Lines next) const {
    if (in_place(sequence)) return run_in_place(sequence, head, first, end, s, next);
    for (int64_t n = first; n < end; ++n) {
      read_panel(p_.past, sequence.past, head, shape_, n, s.rows, s.states[0] + (n - first) * shape_.panel_floats());
    }
    for (int64_t done = 0; done < sequence.tokens; done += kChunk) {
      const Tokens tokens{sequence.first + done, smaller(kChunk, sequence.tokens - done), head};
      read_tokens(p_, shape_, tokens.head, tokens.first, tokens.count, s);
      if (tokens.count < kLeastChunk || p_.correction == Correction::general) {
        decay_reads(p_, shape_, tokens.count, s);
        for (int64_t n = first; n < end; ++n) run_steps(tokens, n, panel_of(s, 0, n - first), panel_of(s, 0, n - first), s);
        continue;
      }
      run_chunk(tokens, first, end, s);
      float* before = s.states[0];
      s.states[0] = s.states[1];
      s.states[1] = before;
    }
    if (p_.present.data == nullptr) return;
    for (int64_t n = first; n < end; ++n) {
      write_panel(p_.present, sequence.present, head, shape_, n, s.states[0] + (n - first) * shape_.panel_floats(), s.rows);
    }
  }

  // Some tokens that follow each other, and a head.
  struct Tokens {
    int64_t first;
    int64_t count;
    int64_t head;
  };

  float* panel_of(const Scratch& s, int state, int64_t n) const { return s.states[state] + n * shape_.panel_floats(); }

  // One panel, token by token.
  void run_steps(const Tokens& tokens, int64_t panel, float* before, float* after, const Scratch& s) const {
    read_values(tokens, panel, s.values);
    steps_.lines(shape_, s, tokens.count, {before}, {after}, p_.out.data != nullptr);
    write_results(tokens, panel, s.results);
  }

  void run_chunk(const Tokens& tokens, int64_t first, int64_t end, const Scratch& s) const {
    switch (p_.gate) {
      case Gate::none: return run_gated_chunk<Gate::none>(tokens, first, end, s);
      case Gate::head: return run_gated_chunk<Gate::head>(tokens, first, end, s);
      case Gate::key: return run_gated_chunk<Gate::key>(tokens, first, end, s);
    }
  }
  template <Gate kGate>
  void run_gated_chunk(const Tokens& tokens, int64_t first, int64_t end, const Scratch& s) const {
    const bool delta = p_.correction == Correction::delta;
    if constexpr (kHasPairs) {
      if (multiplies_pairs(p_)) {
        return delta ? run_chunk<kGate, true, true>(tokens, first, end, s) : run_chunk<kGate, false, true>(tokens, first, end, s);
      }
    }
    return delta ? run_chunk<kGate, true, false>(tokens, first, end, s) : run_chunk<kGate, false, false>(tokens, first, end, s);
  }

  // Panels [first, end), from s.states[0] to s.states[1].
  template <Gate kGate, bool kDelta, bool kPairs>
  void run_chunk(const Tokens& tokens, int64_t first, int64_t end, const Scratch& s) const {
    Chunk<kGate, kDelta, kPairs> chunk(shape_, s, tokens.count, p_.out.data != nullptr);
    prefetch_results(tokens, first);
    chunk.prepare();
    bool any = false;
    for (int64_t n = first; n < end; ++n) {
      if (n + 1 < end) prefetch_results(tokens, n + 1);
      prefetch_next(tokens, n - first, end - first);
      const bool whole = shape_.columns(n) == kPanel;
      // Without a correction each tile of the products reads the values, so they are copied together.
      const bool in_place = kDelta && whole && p_.value.type == Type::float32, out_in_place = whole && p_.out.type == Type::float32;
      if (!in_place) read_values(tokens, n, s.values);
      Panel panel{panel_of(s, 0, n - first), panel_of(s, 1, n - first), s.values, kPanel, s.results, kPanel, kChunk * kPanel, 1};
      if (in_place) {
        panel.values = static_cast<const float*>(p_.value.data) + value_at(tokens, n);
        panel.value_stride = p_.value.token;
      }
      if (out_in_place && p_.out.data != nullptr) {
        panel.out = static_cast<float*>(const_cast<void*>(p_.out.data)) + result_at(tokens, 0, n);
        panel.out_stride = p_.out.token;
        panel.out_head = p_.out.head;
        panel.scale = p_.scale;
      }
      const bool finite = chunk.run(panel);
      s.redo[n - first] = finite ? 0.0f : 1.0f;
      any = any || !finite;
      if (finite && !out_in_place) write_results(tokens, n, s.results);
    }
    if (!any) return;
    read_tokens(p_, shape_, tokens.head, tokens.first, tokens.count, s);
    decay_reads(p_, shape_, tokens.count, s);
    for (int64_t n = first; n < end; ++n) {
      if (s.redo[n - first] != 0) run_steps(tokens, n, panel_of(s, 0, n - first), panel_of(s, 1, n - first), s);
    }
  }

  // Prefetches one of `parts` parts of the chunk that follows.
  FA_INLINE void prefetch_rows(const linear::Rows& rows, int64_t token, int64_t head, int64_t count) {
    const int64_t bytes = rows.type == Type::float32 ? 4 : 2;
    prefetch_lines(static_cast<const char*>(rows.data) + (token * rows.token + head * rows.head) * bytes, count * bytes);
  }
  [[gnu::always_inline]] void prefetch_next(const Tokens& tokens, int64_t part, int64_t parts) const {
    const int64_t next = tokens.first + tokens.count;
    for (int64_t t = next + kChunk * part / parts; t < next + kChunk * (part + 1) / parts; ++t) {
      prefetch_rows(p_.key, t, tokens.head * p_.key_heads / p_.heads, shape_.keys);
      prefetch_rows(p_.query, t, tokens.head * shape_.group * p_.query_heads / p_.out_heads, shape_.keys);
      prefetch_rows(p_.value, t, tokens.head, shape_.values);
    }
  }

  // Prefetches the lines where the results of a panel go. Rows lie a page apart in many layouts, so that they would evict each
  // other, and what the products read, from the first-level cache: 5 % more time.
  [[gnu::always_inline]] void prefetch_results(const Tokens& tokens, int64_t panel) const {
    if (p_.out.data == nullptr) return;
    const int64_t bytes = p_.out.type == Type::float32 ? 4 : 2;
    for (int64_t n = 0; n < shape_.group; ++n) {
      const char* row = static_cast<const char*>(p_.out.data) + result_at(tokens, n, panel) * bytes;
      for (int64_t t = 0; t < tokens.count; ++t, row += p_.out.token * bytes) prefetch_lines(row, shape_.columns(panel) * bytes);
    }
  }

  int64_t value_at(const Tokens& tokens, int64_t panel) const {
    return tokens.first * p_.value.token + tokens.head * p_.value.head + panel * kPanel;
  }
  int64_t result_at(const Tokens& tokens, int64_t n, int64_t panel) const {
    return tokens.first * p_.out.token + (tokens.head * shape_.group + n) * p_.out.head + panel * kPanel;
  }

  // Lines of some panels.
  void read_values(const Tokens& tokens, int64_t panel, float* to, int64_t panels = 1) const {
    const int64_t columns = smaller(panels * kPanel, shape_.values - panel * kPanel);
    for (int64_t t = 0; t < tokens.count; ++t, to += panels * kPanel) {
      read_numbers(p_.value.data, value_at(tokens, panel) + t * p_.value.token, p_.value.type, columns, panels * kPanel, to);
    }
  }

  // Lines of some panels; each query head has room for `room` of them.
  void write_results(const Tokens& tokens, int64_t panel, float* results, int64_t room = kChunk, int64_t panels = 1) const {
    if (p_.out.data == nullptr) return;
    for (int64_t n = 0; n < shape_.group; ++n) {
      float* from = results + n * room * panels * kPanel;
      for (int64_t t = 0; t < tokens.count; ++t) {
        const int64_t at = result_at(tokens, n, panel) + t * p_.out.token;
        for (int64_t c = 0; c < panels; ++c, from += kPanel) {
#pragma GCC unroll 2
          for (int64_t v = 0; v < kPanel; v += kLanes) store(from + v, load(from + v) * p_.scale);
          write_numbers(const_cast<void*>(p_.out.data), at + c * kPanel, p_.out.type, shape_.columns(panel + c), from);
        }
      }
    }
  }

  const Problem& p_;
  const Runtime& runtime_;
  const Shape shape_;
  const Steps steps_;
  const bool channels_;
  const int64_t groups_;  // of heads: of one, or of channels
  int64_t sequence_tasks_ = 0, sequences_of_task_ = 1, parts_ = 1;
  bool are_steps_ = false;  // all sequences are computed in place
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace fa::FA_ISA::lin
