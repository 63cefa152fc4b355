// The recurrence, token by token, on some vectors of columns of a state.
#pragma once

#include "../prefetch.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::lin {

// One token. The state before it is `from` and the state after it `to`, which may be the same memory. `value` and `out` have
// kVectors vectors; `query` and `out` are null if nobody reads the result.
template <Gate kGate, Correction kCorrection, int kVectors>
FA_INLINE void step(const Shape& shape, const Scratch& s, int64_t t, Lines from, Lines to, const float* value,
                    const float* query, float* out) {
  const float* key = s.keys + t * shape.row;
  const float* factors = kGate == Gate::key ? s.factors + t * shape.row : s.factors + t;
  const float* writes = s.writes + t * shape.row;
  const auto factor = [&](int64_t d) { return kGate == Gate::none ? 1.0f : factors[kGate == Gate::key ? d : 0]; };
  // What is read of the state, and what is written with the key.
  Vec read[kVectors] = {}, added[kVectors];
  if constexpr (kCorrection != Correction::none) {
    const float* reads = s.reads + t * shape.row;
    constexpr int kBeside = 2;  // independent sums, so that none waits for the one before
    Vec sums[kBeside][kVectors] = {};
    const auto add = [&](int64_t d, Vec(&sum)[kVectors]) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v] += load(from.data + d * from.stride + v * kLanes) * reads[d];
    };
    int64_t d = 0;
    for (; d + 1 < shape.keys; d += kBeside) {
      add(d, sums[0]);
      add(d + 1, sums[1]);
    }
    if (d < shape.keys) add(d, sums[0]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) read[v] = sums[0][v] + sums[1][v];
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    added[v] = load(value + v * kLanes);
    if constexpr (kCorrection == Correction::delta) added[v] = (added[v] - read[v]) * s.betas[t];
  }
  Vec result[kVectors] = {};
  for (int64_t d = 0; d < shape.keys; ++d) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec x = load(from.data + d * from.stride + v * kLanes);
      if constexpr (kGate != Gate::none) x *= factor(d);
      if constexpr (kCorrection == Correction::general) x += read[v] * writes[d];
      x += added[v] * key[d];
      store(to.data + d * to.stride + v * kLanes, x);
      if (query != nullptr) result[v] += x * query[d];
    }
  }
  if (query == nullptr) return;
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, result[v]);
}

// out = query . state
template <int kVectors>
FA_INLINE void read_state(const Shape& shape, Lines state, const float* query, float* out) {
  Vec result[kVectors] = {};
  for (int64_t d = 0; d < shape.keys; ++d) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) result[v] += load(state.data + d * state.stride + v * kLanes) * query[d];
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, result[v]);
}

// `count` tokens with the values s.values; the results are s.results. Both have lines of kVectors vectors, and the tokens of
// each query head have room for kChunk of them.
template <Gate kGate, Correction kCorrection, int kVectors>
static void step_tokens(const Shape& shape, const Scratch& s, int64_t count, Lines from, Lines to, bool reads) {
  constexpr int64_t kLine = kVectors * kLanes;
  for (int64_t t = 0; t < count; ++t) {
    const float* query = s.queries + t * shape.row;
    float* out = s.results + t * kLine;
    if (reads) {
      step<kGate, kCorrection, kVectors>(shape, s, t, from, to, s.values + t * kLine, query, out);
    } else {
      step<kGate, kCorrection, kVectors>(shape, s, t, from, to, s.values + t * kLine, nullptr, nullptr);
    }
    for (int64_t n = 1; n < shape.group && reads; ++n) {
      read_state<kVectors>(shape, to, query + n * kChunk * shape.row, out + n * kChunk * kLine);
    }
    from = to;
  }
}

// Lines of a state that are computed at once where it is computed in place.
inline constexpr int kLinesAtOnce = 4;

// sums += weights . kLines lines
template <int kLines>
FA_INLINE void add_lines(const float* from, int64_t stride, const float* weights, int64_t columns, float* sums) {
  Vec weight[kLines];
#pragma GCC unroll 4
  for (int r = 0; r < kLines; ++r) weight[r] = splat(weights[r]);
  for (int64_t c = 0; c < columns; c += kLanes) {
    Vec sum = load(sums + c);
#pragma GCC unroll 4
    for (int r = 0; r < kLines; ++r) sum += load(from + r * stride + c) * weight[r];
    store(sums + c, sum);
  }
}

static void add_all_lines(const Shape& shape, Lines state, const float* weights, int64_t columns, float* sums) {
  __builtin_memset(sums, 0, static_cast<size_t>(columns) * sizeof(float));
  int64_t d = 0;
  for (; d + kLinesAtOnce <= shape.keys; d += kLinesAtOnce) {
    add_lines<kLinesAtOnce>(state.data + d * state.stride, state.stride, weights + d, columns, sums);
  }
  for (; d < shape.keys; ++d) add_lines<1>(state.data + d * state.stride, state.stride, weights + d, columns, sums);
}

// Prefetches lines [first, first + count) of the state that is computed next, if it is known: `size` numbers of each. A delta
// rule reads a state twice, the second time from the cache. The lines of the next state arrive meanwhile.
FA_INLINE void prefetch_state(const Lines& next, int64_t first, int64_t count, int64_t size) {
  if (next.data == nullptr) return;
  for (int64_t d = first; d < first + count; ++d) {
    prefetch_lines(reinterpret_cast<const char*>(next.data + d * next.stride), size * static_cast<int64_t>(sizeof(float)));
  }
}

// What changes lines of a state by one token, each row from the first of the lines on. `read` and `added` are as in step().
struct Change {
  const float *factors, *writes, *key, *query, *read, *added;
  float* out;
};

template <Gate kGate, Correction kCorrection, int kLines, bool kReads>
FA_INLINE void change_lines(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t columns,
                            const Change& change) {
  Vec factor[kLines], key[kLines], query[kLines], write[kLines];
#pragma GCC unroll 4
  for (int r = 0; r < kLines; ++r) {
    if constexpr (kGate != Gate::none) factor[r] = splat(change.factors[kGate == Gate::key ? r : 0]);
    if constexpr (kCorrection == Correction::general) write[r] = splat(change.writes[r]);
    key[r] = splat(change.key[r]);
    if constexpr (kReads) query[r] = splat(change.query[r]);
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    const Vec added = load(change.added + c);
    Vec sum = kReads ? load(change.out + c) : Vec{};
#pragma GCC unroll 4
    for (int r = 0; r < kLines; ++r) {
      Vec x = load(from + r * from_stride + c);
      if constexpr (kGate != Gate::none) x *= factor[r];
      if constexpr (kCorrection == Correction::general) x += load(change.read + c) * write[r];
      x += added * key[r];
      store(to + r * to_stride + c, x);
      if constexpr (kReads) sum += x * query[r];
    }
    if constexpr (kReads) store(change.out + c, sum);
  }
}

template <Gate kGate, Correction kCorrection, bool kReads>
static void change_all_lines(const Shape& shape, Lines from, Lines to, int64_t columns, const Change& whole, Lines next) {
  const auto at = [&](int64_t d) {
    Change change = whole;
    if constexpr (kGate == Gate::key) change.factors += d;
    change.writes += d;
    change.key += d;
    change.query += d;
    return change;
  };
  int64_t d = 0;
  for (; d + kLinesAtOnce <= shape.keys; d += kLinesAtOnce) {
    prefetch_state(next, d, kLinesAtOnce, columns);
    change_lines<kGate, kCorrection, kLinesAtOnce, kReads>(from.data + d * from.stride, from.stride, to.data + d * to.stride,
                                                           to.stride, columns, at(d));
  }
  for (; d < shape.keys; ++d) {
    change_lines<kGate, kCorrection, 1, kReads>(from.data + d * from.stride, from.stride, to.data + d * to.stride, to.stride,
                                                columns, at(d));
  }
}

// `count` tokens and `columns` columns of a state, whole vectors, line after line: a state in memory is read in its order. The
// values and results have lines of `columns` numbers, and each query head has room for kLeastChunk results. The last token
// prefetches `next`.
template <Gate kGate, Correction kCorrection>
static void step_lines(const Shape& shape, const Scratch& s, int64_t count, Lines from, Lines to, int64_t columns, bool reads,
                       Lines next) {
  for (int64_t t = 0; t < count; ++t) {
    const float* value = s.values + t * columns;
    const float* query = s.queries + t * shape.row;
    float *out = s.results + t * columns, *read = s.read, *added = s.added;
    if constexpr (kCorrection != Correction::none) add_all_lines(shape, from, s.reads + t * shape.row, columns, read);
    for (int64_t c = 0; c < columns; c += kLanes) {
      const Vec x = load(value + c);
      store(added + c, kCorrection == Correction::delta ? (x - load(read + c)) * s.betas[t] : x);
      store(out + c, Vec{});
    }
    const Change change{kGate == Gate::key ? s.factors + t * shape.row : s.factors + t,
                        s.writes + t * shape.row, s.keys + t * shape.row, query, read, added, out};
    const Lines ahead = t + 1 == count ? next : Lines{nullptr};
    if (reads) {
      change_all_lines<kGate, kCorrection, true>(shape, from, to, columns, change, ahead);
    } else {
      change_all_lines<kGate, kCorrection, false>(shape, from, to, columns, change, ahead);
    }
    for (int64_t n = 1; n < shape.group && reads; ++n) {
      add_all_lines(shape, to, query + n * kChunk * shape.row, columns, out + n * kLeastChunk * columns);
    }
    from = to;
  }
}

// One token and kRows columns of a state that lies transposed in memory: its columns are rows there, `stride` floats apart, of
// shape.keys numbers, which are whole vectors. `value` and `out` have kRows numbers.
template <Gate kGate, Correction kCorrection, int kRows>
FA_INLINE void step_columns(const Shape& shape, const Scratch& s, int64_t t, const float* from, int64_t from_stride, float* to,
                            int64_t to_stride, const float* value, const float* query, float* out) {
  const float* key = s.keys + t * shape.row;
  const float* factors = kGate == Gate::key ? s.factors + t * shape.row : s.factors + t;
  const float* writes = s.writes + t * shape.row;
  float read[kRows] = {};
  if constexpr (kCorrection != Correction::none) {
    const float* reads = s.reads + t * shape.row;
    Vec sum[kRows] = {};
    for (int64_t d = 0; d < shape.keys; d += kLanes) {
      const Vec weight = load(reads + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] += load(from + r * from_stride + d) * weight;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) read[r] = sum_lanes(sum[r]);
  }
  Vec added[kRows], corrected[kRows], result[kRows] = {};
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    added[r] = splat(kCorrection == Correction::delta ? (value[r] - read[r]) * s.betas[t] : value[r]);
    corrected[r] = splat(read[r]);
  }
  for (int64_t d = 0; d < shape.keys; d += kLanes) {
    const Vec weight = load(key + d);
    const Vec factor = kGate == Gate::key ? load(factors + d) : splat(kGate == Gate::none ? 1.0f : factors[0]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Vec x = load(from + r * from_stride + d);
      if constexpr (kGate != Gate::none) x *= factor;
      if constexpr (kCorrection == Correction::general) x += corrected[r] * load(writes + d);
      x += added[r] * weight;
      store(to + r * to_stride + d, x);
      if (query != nullptr) result[r] += x * load(query + d);
    }
  }
  if (query == nullptr) return;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) out[r] = sum_lanes(result[r]);
}

// out = query . state for kRows such columns.
template <int kRows>
FA_INLINE void read_columns_of(const Shape& shape, const float* state, int64_t stride, const float* query, float* out) {
  for (int r = 0; r < kRows; ++r) {
    Vec sum{};
    for (int64_t d = 0; d < shape.keys; d += kLanes) sum += load(state + r * stride + d) * load(query + d);
    out[r] = sum_lanes(sum);
  }
}

// `count` tokens and `columns` columns of such a state. The values and results are lines of kPanel numbers.
template <Gate kGate, Correction kCorrection, int kRows>
FA_INLINE void step_some_columns(const Shape& shape, const Scratch& s, int64_t count, Lines from, Lines to, int64_t column,
                                 bool reads) {
  const float* before = from.data + column * from.stride;
  float* after = to.data + column * to.stride;
  int64_t stride = from.stride;
  for (int64_t t = 0; t < count; ++t) {
    const float* query = s.queries + t * shape.row;
    const float* value = s.values + t * kPanel + column;
    float* out = s.results + t * kPanel + column;
    step_columns<kGate, kCorrection, kRows>(shape, s, t, before, stride, after, to.stride, value, reads ? query : nullptr, out);
    for (int64_t n = 1; n < shape.group && reads; ++n) {
      read_columns_of<kRows>(shape, after, to.stride, query + n * kChunk * shape.row, out + n * kLeastChunk * kPanel);
    }
    before = after;
    stride = to.stride;
  }
}

template <Gate kGate, Correction kCorrection>
static void step_transposed(const Shape& shape, const Scratch& s, int64_t count, Lines from, Lines to, int64_t columns,
                            bool reads, Lines next) {
  constexpr int kRows = 4;
  int64_t c = 0;
  for (; c + kRows <= columns; c += kRows) {
    prefetch_state(next, c, kRows, shape.keys);
    step_some_columns<kGate, kCorrection, kRows>(shape, s, count, from, to, c, reads);
  }
  for (; c < columns; ++c) step_some_columns<kGate, kCorrection, 1>(shape, s, count, from, to, c, reads);
}

// The functions of one gate and correction.
struct Steps {
  void (*lines)(const Shape&, const Scratch&, int64_t count, Lines from, Lines to, bool reads);
  using InPlace = void (*)(const Shape&, const Scratch&, int64_t count, Lines from, Lines to, int64_t columns, bool reads,
                           Lines next);
  InPlace in_place, transposed;
};

template <Gate kGate, Correction kCorrection>
inline constexpr Steps kSteps = {step_tokens<kGate, kCorrection, 2>, step_lines<kGate, kCorrection>,
                                 step_transposed<kGate, kCorrection>};

template <Gate kGate>
FA_INLINE Steps steps_with(Correction correction) {
  switch (correction) {
    case Correction::none: return kSteps<kGate, Correction::none>;
    case Correction::delta: return kSteps<kGate, Correction::delta>;
    case Correction::general: break;
  }
  return kSteps<kGate, Correction::general>;
}

FA_INLINE Steps steps_of(const Problem& problem) {
  switch (problem.gate) {
    case Gate::none: return steps_with<Gate::none>(problem.correction);
    case Gate::head: return steps_with<Gate::head>(problem.correction);
    case Gate::key: break;
  }
  return steps_with<Gate::key>(problem.correction);
}

}  // namespace fa::FA_ISA::lin
