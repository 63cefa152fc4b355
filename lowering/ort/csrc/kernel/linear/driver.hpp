// Runs linear attention: divides it into tasks and spreads them over threads.
//
// A task is some panels of the state of one head, in one sequence or in all of them. No result depends on how the panels are
// divided. Sequences are tasks of their own only if none of them uses a state that another one writes.
#pragma once

#include "../prefetch.hpp"
#include "state.hpp"
#include "step.hpp"

namespace fa::FA_ISA::lin {

// A problem that reads and writes fewer bytes of states, or multiplies fewer numbers (about 20 microseconds), stays on one
// thread: waking others costs more than it gives.
inline constexpr int64_t kInlineBytes = 1 << 18;
inline constexpr double kInlineProducts = 1 << 20;

class Driver {
 public:
  Driver(const Problem& problem, const Runtime& runtime)
      : p_(problem), runtime_(runtime), shape_(problem), step_(step_tokens_of<2>(problem)) {}

  Outcome run() {
    const bool apart = independent();
    sequence_tasks_ = apart ? p_.sequence_count : smaller(1, p_.sequence_count);
    sequences_of_task_ = apart ? 1 : p_.sequence_count;
    const int64_t states = sequence_tasks_ * p_.heads;
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

  void run_tasks() {
    const int64_t tasks = sequence_tasks_ * p_.heads * parts_;
    int64_t task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
    if (task >= tasks) return;
    const int64_t panels = ceil_div(shape_.panels, parts_);
    void* memory = runtime_.allocate(runtime_.self, Scratch::bytes(p_, shape_, panels) + kCacheLine);
    if (memory == nullptr) {
      __atomic_store_n(&failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    const Scratch scratch(p_, shape_, panels, reinterpret_cast<float*>((address + kCacheLine - 1) / kCacheLine * kCacheLine));
    for (; task < tasks; task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) {
      const int64_t part = task % parts_;
      const int64_t head = task / parts_ % p_.heads;
      const int64_t first = task / parts_ / p_.heads * sequences_of_task_;
      for (int64_t n = first; n < first + sequences_of_task_; ++n) {
        run_head(p_.sequences[n], head, shape_.panels * part / parts_, shape_.panels * (part + 1) / parts_, scratch);
      }
    }
    runtime_.release(runtime_.self, memory);
  }

  // Panels [first, end) of one head of a sequence.
  void run_head(const linear::Sequence& sequence, int64_t head, int64_t first, int64_t end, Scratch s) const {
    for (int64_t n = first; n < end; ++n) {
      read_panel(p_.past, sequence.past, head, shape_, n, s.rows, s.states[0] + (n - first) * shape_.panel_floats());
    }
    for (int64_t done = 0; done < sequence.tokens; done += kChunk) {
      run_chunk(sequence.first + done, smaller(kChunk, sequence.tokens - done), head, first, end, s);
    }
    if (p_.present.data == nullptr) return;
    for (int64_t n = first; n < end; ++n) {
      write_panel(p_.present, sequence.present, head, shape_, n, s.states[0] + (n - first) * shape_.panel_floats(), s.rows);
    }
  }

  void run_chunk(int64_t token, int64_t count, int64_t head, int64_t first, int64_t end, const Scratch& s) const {
    read_tokens(p_, shape_, head, token, count, s);
    for (int64_t n = first; n < end; ++n) {
      const Lines state{s.states[0] + (n - first) * shape_.panel_floats()};
      read_values(token, count, head, n, s.values);
      step_(shape_, s, count, state, state, p_.out.data != nullptr);
      write_results(token, count, head, n, s.results);
    }
  }

  void read_values(int64_t token, int64_t count, int64_t head, int64_t panel, float* to) const {
    const int64_t columns = shape_.columns(panel);
    linear::Rows rows = p_.value;
    for (int64_t t = 0; t < count; ++t, to += kPanel) {
      const int64_t at = (token + t) * rows.token + head * rows.head + panel * kPanel;
      const float* from = as_floats(rows.data, at, columns, rows.type, to);
      if (from != to) __builtin_memcpy(to, from, static_cast<size_t>(columns) * sizeof(float));
      for (int64_t c = columns; c < kPanel; ++c) to[c] = 0;
    }
  }

  void write_results(int64_t token, int64_t count, int64_t head, int64_t panel, float* results) const {
    if (p_.out.data == nullptr) return;
    for (int64_t n = 0; n < shape_.group; ++n) {
      float* from = results + n * kChunk * kPanel;
      for (int64_t t = 0; t < count; ++t, from += kPanel) {
#pragma GCC unroll 2
        for (int64_t c = 0; c < kPanel; c += kLanes) store(from + c, load(from + c) * p_.scale);
        const int64_t at = (token + t) * p_.out.token + (head * shape_.group + n) * p_.out.head + panel * kPanel;
        write_floats(const_cast<void*>(p_.out.data), at, from, shape_.columns(panel), p_.out.type);
      }
    }
  }

  const Problem& p_;
  const Runtime& runtime_;
  const Shape shape_;
  const StepTokens step_;
  int64_t sequence_tasks_ = 0, sequences_of_task_ = 1, parts_ = 1;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace fa::FA_ISA::lin
