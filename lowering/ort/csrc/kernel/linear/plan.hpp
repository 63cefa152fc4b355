// The sizes of a problem of linear attention, the scratch memory of a worker, and the rows of some tokens in it.
//
// A state is kept as floats in panels: panel n has the value dimensions from n kPanel on, a line of kPanel numbers for each
// key dimension. The columns of a state do not depend on each other, so panels are computed one after the other, or by
// different threads.
#pragma once

#include "../../linear.hpp"
#include "../convert.hpp"
#include "../exp.hpp"

namespace fa::FA_ISA::lin {

using linear::Correction;
using linear::Gate;
using linear::Problem;

// Tokens of a chunk: a multiple of every kMicroRows.
inline constexpr int64_t kChunk = 48;
static_assert(kChunk % kMicroRows == 0);

// Tokens of a chunk, filled up to panels.
inline constexpr int64_t kTokenPanels = (kChunk + kPanel - 1) / kPanel;
inline constexpr int64_t kTokenRow = kTokenPanels * kPanel;

// Lines of kPanel or more numbers, `stride` floats apart.
struct Lines {
  float* data;
  int64_t stride = kPanel;
};

struct Shape {
  int64_t keys;    // key dimensions
  int64_t values;  // value dimensions
  int64_t row;     // floats of a row of key dimensions, and lines of a panel: `keys`, filled up to vectors
  int64_t panels;  // of a whole state
  int64_t group;   // query heads that read one state

  explicit Shape(const Problem& p)
      : keys(p.key_size), values(p.value_size), row(ceil_div(p.key_size, kLanes) * kLanes),
        panels(ceil_div(p.value_size, kPanel)), group(p.out_heads / p.heads) {}

  int64_t panel_floats() const { return row * kPanel; }
  // The value dimensions of a panel.
  int64_t columns(int64_t panel) const { return smaller(kPanel, values - panel * kPanel); }
};

// The memory of a worker that computes at most `panels` panels of a state.
struct Scratch {
  float* states[2];  // [panels][row][kPanel]: before and after a chunk
  float* keys;       // [kChunk][row]
  float* queries;    // [group][kChunk][row]
  float* factors;    // e^g: [kChunk][row], or for Gate::head [kChunk]
  float* writes;     // [kChunk][row], for Correction::general
  float* reads;      // [kChunk][row]: what the rows before the decay are multiplied by to read them after it
  float* betas;      // [kChunk]
  float* values;     // [kChunk][kPanel]
  float* results;    // [group][kChunk][kPanel]
  float* rows;       // [kPanel][row]: conversions of states

  Scratch(const Problem& problem, const Shape& shape, int64_t panels, float* memory) : memory_(memory) {
    const int64_t rows_of_chunk = kChunk * shape.row;
    states[0] = take(panels * shape.panel_floats());
    states[1] = take(panels * shape.panel_floats());
    keys = take(rows_of_chunk);
    queries = take(shape.group * rows_of_chunk);
    factors = take(problem.gate == Gate::key ? rows_of_chunk : kChunk);
    writes = take(problem.correction == Correction::general ? rows_of_chunk : 0);
    reads = take(problem.correction == Correction::none ? 0 : rows_of_chunk);
    betas = take(kChunk);
    values = take(kChunk * kPanel);
    results = take(shape.group * kChunk * kPanel);
    rows = take(kPanel * shape.row);
  }

  static size_t bytes(const Problem& problem, const Shape& shape, int64_t panels) {
    return static_cast<size_t>(Scratch(problem, shape, panels, nullptr).floats_) * sizeof(float);
  }

 private:
  // Each part begins with a cache line.
  float* take(int64_t count) {
    float* part = memory_ == nullptr ? nullptr : memory_ + floats_;
    floats_ += ceil_div(count, kAlignment) * kAlignment;
    return part;
  }

  static constexpr int64_t kAlignment = 16;
  float* memory_;
  int64_t floats_ = 0;
};

// e^x for every x.
FA_INLINE Vec exp_any(Vec x) {
  const Vec small = exp_nonpositive(minimum(x, Vec{}));
  const IntVec grows = x > 0.0f;
  if (Isa::all(~grows)) return x != x ? x : small;
  const Vec root = 1.0f / exp_nonpositive(maximum(x, Vec{}) * -0.5f);
  return grows ? root * root : (x != x ? x : small);
}

// Row `token` of a tensor, filled up with 0 to `room` floats.
FA_INLINE void read_row(const linear::Rows& rows, int64_t token, int64_t head, int64_t count, int64_t room, float* to) {
  const float* from = as_floats(rows.data, token * rows.token + head * rows.head, count, rows.type, to);
  if (from != to) __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
  for (int64_t d = count; d < room; ++d) to[d] = 0;
}

// Reads the rows of tokens [first, first + count) of state `head`.
static void read_tokens(const Problem& p, const Shape& shape, int64_t head, int64_t first, int64_t count, const Scratch& s) {
  const int64_t key_head = head * p.key_heads / p.heads;
  for (int64_t t = 0; t < count; ++t) {
    read_row(p.key, first + t, key_head, shape.keys, shape.row, s.keys + t * shape.row);
    if (p.correction == Correction::delta) read_row(p.beta, first + t, head, 1, 1, s.betas + t);
    if (p.correction == Correction::general) {
      read_row(p.write, first + t, head, shape.keys, shape.row, s.writes + t * shape.row);
      read_row(p.read, first + t, head, shape.keys, shape.row, s.reads + t * shape.row);
    }
    if (p.gate == Gate::head) read_row(p.decay, first + t, head, 1, 1, s.factors + t);
    if (p.gate == Gate::key) read_row(p.decay, first + t, head, shape.keys, shape.row, s.factors + t * shape.row);
  }
  for (int64_t n = 0; n < shape.group && p.out.data != nullptr; ++n) {
    const int64_t query_head = (head * shape.group + n) * p.query_heads / p.out_heads;
    for (int64_t t = 0; t < count; ++t) {
      read_row(p.query, first + t, query_head, shape.keys, shape.row, s.queries + (n * kChunk + t) * shape.row);
    }
  }
  const int64_t numbers = p.gate == Gate::none ? 0 : p.gate == Gate::head ? count : count * shape.row;
  for (int64_t n = 0; n < numbers; n += kLanes) store(s.factors + n, exp_any(load(s.factors + n)));
  for (int64_t t = 0; t < count && p.correction != Correction::none; ++t) {
    const float* from = (p.correction == Correction::delta ? s.keys : s.reads) + t * shape.row;
    float* to = s.reads + t * shape.row;
    for (int64_t d = 0; d < shape.row; d += kLanes) {
      Vec x = load(from + d);
      if (p.gate == Gate::head) x *= s.factors[t];
      if (p.gate == Gate::key) x *= load(s.factors + t * shape.row + d);
      store(to + d, x);
    }
  }
}

}  // namespace fa::FA_ISA::lin
