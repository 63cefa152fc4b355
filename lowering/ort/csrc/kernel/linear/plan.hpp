// The sizes of a problem of linear attention, the scratch memory of a worker, and the rows of some tokens in it.
//
// A state is kept as floats in panels: panel n has the value dimensions from n kPanel on, a line of kPanel numbers for each
// key dimension. The columns of a state do not depend on each other, so panels are computed one after the other, or by
// different threads.
#pragma once

#include "../../linear.hpp"
#include "../exp.hpp"
#include "../pairs.hpp"

namespace fa::FA_ISA::lin {

using linear::Correction;
using linear::Gate;
using linear::Problem;

// Tokens of a chunk: about 24, whole micro-tiles. The products within a chunk grow with it, and what is done once for each chunk
// takes a smaller part. Measured on Zen 4 with sizes of 128: with AVX-512, 48 tokens take up to 8 % longer and 36 up to 9 %; with
// AVX2, 12 and 36 tokens take up to 7 % longer.
inline constexpr int64_t kChunk = (24 + kMicroRows - 1) / kMicroRows * kMicroRows;

// Fewer tokens are computed one after the other.
inline constexpr int64_t kLeastChunk = 10;
static_assert(kLeastChunk <= kChunk);

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

// Whether the products of chunks are products of bfloat16 two at a time: where query, key and value are bfloat16. The state,
// V' and the probabilities are rounded to bfloat16 as operands, as those of attention are, and summed and kept as floats.
FA_INLINE bool multiplies_pairs(const Problem& p) {
  return kHasPairs && p.query.type == Type::bfloat16 && p.key.type == Type::bfloat16 && p.value.type == Type::bfloat16;
}

// The memory of a worker that computes at most `panels` panels of a state.
struct Scratch {
  float* states[2];  // [panels][row][kPanel]: before and after a chunk
  float* keys;       // [kChunk][row]
  float* queries;    // [group][kChunk][row]
  float* factors;    // e^g: [kChunk][row], or for Gate::head [kChunk]
  float* writes;     // [kChunk][row], for Correction::general
  float* reads;      // [kChunk][row]: what the rows before the decay are multiplied by
  float* betas;      // [kChunk]
  float* values;     // [kChunk][kPanel], or [kLeastChunk][columns]
  float* results;    // [group][kChunk][kPanel], or [group][kLeastChunk][columns]
  float* read;       // [columns]: this and the next one for step_lines()
  float* added;      // [columns]
  float* rows;       // [kPanel][row]: conversions of states
  // For chunks (chunk.hpp):
  float* columns;     // [row][kTokenRow]: keys, transposed
  float* triangle;    // [kChunk][kTokenRow]: A
  float* weights;     // [group][kChunk][kTokenRow]: P
  float* decays;      // [kChunk][kTokenRow]: e^(G_i - G_j), for one decay a head
  float* from_start;  // e^G: [kChunk], or with Gate::key [row] of the present block
  float* from_values; // [kChunk]: what the part of V' that S_0 gives is multiplied by
  float* in_block;    // [row]: the decay since the block began
  float* redo;        // [panels]: whether the recurrence has to compute a panel
  // For products of pairs (pairs.hpp), each number two bfloat16:
  float* state_pairs; // [row / 2][kPanel]: the lines of a panel, two by two
  float* value_pairs; // [kChunk / 2][kPanel]: V'
  float* key_pairs;   // [row / 2][kTokenRow]: `columns`, two by two; not with Gate::key

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
    const int64_t lines = larger(kChunk, kLeastChunk * panels);
    values = take(lines * kPanel);
    results = take(shape.group * lines * kPanel);
    read = take(panels * kPanel);
    added = take(panels * kPanel);
    rows = take(kPanel * shape.row);
    columns = take(shape.row * kTokenRow);
    triangle = take(kChunk * kTokenRow);
    weights = take(shape.group * kChunk * kTokenRow);
    decays = take(kChunk * kTokenRow);
    from_start = take(larger(kChunk, shape.row));
    from_values = take(kChunk);
    in_block = take(shape.row);
    redo = take(panels);
    const bool pairs = multiplies_pairs(problem);
    state_pairs = take(pairs ? shape.row / 2 * kPanel : 0);
    value_pairs = take(pairs ? kChunk / 2 * kPanel : 0);
    key_pairs = take(pairs && problem.gate != Gate::key ? shape.row / 2 * kTokenRow : 0);
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

// `count` numbers from element `at` on as floats, filled up with 0 to `room`, a multiple of vectors.
FA_INLINE void read_numbers(const void* data, int64_t at, Type type, int64_t count, int64_t room, float* to) {
  if (type == Type::float32) {
    const float* from = static_cast<const float*>(data) + at;
    int64_t d = 0;
    for (; d + kLanes <= count; d += kLanes) store(to + d, load(from + d));
    for (; d < room; d += kLanes) store(to + d, Isa::load_first(from + d, larger(0, count - d)));
    return;
  }
  as_floats(data, at, count, type, to);
  for (int64_t d = count; d < room; ++d) to[d] = 0;
}

// Writes `count` <= kPanel numbers.
FA_INLINE void write_numbers(void* data, int64_t at, Type type, int64_t count, const float* from) {
  if (type != Type::float32 || count < kPanel) return write_floats(data, at, from, count, type);
  store(static_cast<float*>(data) + at, load(from));
  store(static_cast<float*>(data) + at + kLanes, load(from + kLanes));
}

// Row `token` of a tensor.
FA_INLINE void read_row(const linear::Rows& rows, int64_t token, int64_t head, int64_t count, int64_t room, float* to) {
  read_numbers(rows.data, token * rows.token + head * rows.head, rows.type, count, room, to);
}

// The number of a token and head.
FA_INLINE float read_number(const linear::Rows& rows, int64_t token, int64_t head) {
  float buffer;
  return *as_floats(rows.data, token * rows.token + head * rows.head, 1, rows.type, &buffer);
}

// Reads the rows of tokens [first, first + count) of state `head`.
static void read_tokens(const Problem& p, const Shape& shape, int64_t head, int64_t first, int64_t count, const Scratch& s) {
  const int64_t key_head = head * p.key_heads / p.heads;
  for (int64_t t = 0; t < count; ++t) {
    read_row(p.key, first + t, key_head, shape.keys, shape.row, s.keys + t * shape.row);
    if (p.correction == Correction::delta) s.betas[t] = read_number(p.beta, first + t, head);
    if (p.correction == Correction::general) {
      read_row(p.write, first + t, head, shape.keys, shape.row, s.writes + t * shape.row);
      read_row(p.read, first + t, head, shape.keys, shape.row, s.reads + t * shape.row);
    }
    if (p.gate == Gate::head) s.factors[t] = read_number(p.decay, first + t, head);
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
}

// Makes s.reads of the keys or of the rows that read the state, for the recurrence: a row that reads the state after the
// decay is decayed, and reads the state before it.
static void decay_reads(const Problem& p, const Shape& shape, int64_t count, const Scratch& s) {
  for (int64_t t = 0; t < count && p.correction != Correction::none; ++t) {
    const float* from = (p.correction == Correction::delta ? s.keys : s.reads) + t * shape.row;
    float* to = s.reads + t * shape.row;
    for (int64_t d = 0; d < shape.row; d += kLanes) {
      Vec x = load(from + d);
      if (p.gate == Gate::head && !p.reads_before_decay) x *= s.factors[t];
      if (p.gate == Gate::key && !p.reads_before_decay) x *= load(s.factors + t * shape.row + d);
      store(to + d, x);
    }
  }
}

}  // namespace fa::FA_ISA::lin
