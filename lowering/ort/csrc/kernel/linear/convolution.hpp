// The short causal convolution. Each channel is computed by itself, in vectors of tokens or of channels.
#pragma once

#include "../convert.hpp"
#include "../exp.hpp"
#include "../../linear.hpp"

namespace fa::FA_ISA::lin {

using linear::Activation;
using linear::Convolution;

// x / (1 + e^-x)
FA_INLINE Vec silu(Vec x) {
  const IntVec negative = x < 0.0f;
  const Vec e = exp_nonpositive(negative ? x : -x);
  const Vec weight = 1.0f / (1.0f + e);
  return x * (negative ? e * weight : weight);
}

// Numbers of one type in memory. load_some() and store_some() access `count` <= kLanes numbers and no memory beyond them.
template <Type kType>
struct Cells {
  using Number = uint16_t;
  FA_INLINE Vec widen(HalfVec v) {
    if constexpr (kType == Type::bfloat16) return widen_bfloat16s(v);
    return widen_float16s(v);
  }
  FA_INLINE HalfVec narrow(Vec v) {
    if constexpr (kType == Type::bfloat16) return narrow_bfloat16s(v);
    return narrow_float16s(v);
  }
  FA_INLINE Vec load(const Number* p) { return widen(load_as<HalfVec>(p)); }
  FA_INLINE void store(Number* p, Vec v) { store_as(p, narrow(v)); }
  FA_INLINE Vec load_some(const Number* p, int64_t count) {
    HalfVec v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(Number));
    return widen(v);
  }
  FA_INLINE void store_some(Number* p, Vec v, int64_t count) {
    const HalfVec narrowed = narrow(v);
    __builtin_memcpy(p, &narrowed, static_cast<size_t>(count) * sizeof(Number));
  }
  FA_INLINE float number(Number x) { return kType == Type::bfloat16 ? widen_bfloat16(x) : widen_float16(x); }
};

template <>
struct Cells<Type::float32> {
  using Number = float;
  FA_INLINE Vec load(const Number* p) { return fa::FA_ISA::load(p); }
  FA_INLINE void store(Number* p, Vec v) { fa::FA_ISA::store(p, v); }
  FA_INLINE Vec load_some(const Number* p, int64_t count) { return Isa::load_first(p, count); }
  FA_INLINE void store_some(Number* p, Vec v, int64_t count) {
    __builtin_memcpy(p, &v, static_cast<size_t>(count) * sizeof(Number));
  }
  FA_INLINE float number(Number x) { return x; }
};

// Channels of a task.
inline constexpr int64_t kTaskChannels = 64;
static_assert(kTaskChannels % kLanes == 0);

// Bytes of a call that stays on one thread.
inline constexpr int64_t kInlineConvolution = 1 << 18;

template <Type kType>
class Convolver {
  using Cell = Cells<kType>;
  using Number = typename Cell::Number;

 public:
  Convolver(const Convolution& convolution, const Runtime& runtime)
      : c_(convolution), runtime_(runtime), history_(convolution.width - 1),
        parts_(ceil_div(convolution.channels, kTaskChannels)) {}

  Outcome run() {
    const int64_t tasks = c_.batch * parts_;
    const int64_t bytes = c_.batch * c_.channels * (c_.tokens + history_) * static_cast<int64_t>(sizeof(Number));
    const int64_t workers = bytes < kInlineConvolution ? smaller(1, tasks) : smaller(runtime_.most_workers, tasks);
    if (workers == 1) {
      work(this, 0);
    } else if (workers > 1) {
      runtime_.parallel(runtime_.self, work, this, static_cast<size_t>(workers));
    }
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  // Tokens that are computed at once where vectors are of channels.
  static constexpr int64_t kTileTokens = 16;

  static void work(void* self, size_t) {
    Convolver& convolver = *static_cast<Convolver*>(self);
    const int64_t tasks = convolver.c_.batch * convolver.parts_;
    int64_t task = __atomic_fetch_add(&convolver.next_, 1, __ATOMIC_RELAXED);
    if (task >= tasks) return;
    void* memory = convolver.runtime_.allocate(convolver.runtime_.self, convolver.floats() * sizeof(float));
    if (memory == nullptr) {
      __atomic_store_n(&convolver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    for (; task < tasks; task = __atomic_fetch_add(&convolver.next_, 1, __ATOMIC_RELAXED)) {
      const int64_t first = task % convolver.parts_ * kTaskChannels;
      convolver.run_channels(task / convolver.parts_, first, smaller(convolver.c_.channels, first + kTaskChannels),
                             static_cast<float*>(memory));
    }
    convolver.runtime_.release(convolver.runtime_.self, memory);
  }

  // The memory of a worker: kLanes channels of weights, bias, the past and the first tokens, or one channel of them.
  size_t floats() const {
    return static_cast<size_t>((c_.width + 1 + 2 * history_ + kTileTokens) * kLanes + c_.width + 2 * history_ + 4 * kLanes);
  }

  const Number* numbers(const void* data) const { return static_cast<const Number*>(data); }

  void run_channels(int64_t entry, int64_t first, int64_t end, float* memory) const {
    const bool by_tokens = !c_.channels_last && c_.tokens >= kTileTokens;
    for (int64_t channel = first; channel < end; channel += by_tokens ? 1 : kLanes) {
      if (by_tokens) run_channel(entry, channel, memory);
      else run_lanes(entry, channel, smaller(kLanes, end - channel), memory);
    }
  }

  FA_INLINE Vec activated(Vec x, bool silu_too) { return silu_too ? silu(x) : x; }

  // One channel, in vectors of tokens. Its first tokens, and the past before them, are computed from a copy.
  void run_channel(int64_t entry, int64_t channel, float* memory) const {
    const int64_t row = entry * c_.channels + channel;
    const Number* in = numbers(c_.input) + row * c_.tokens;
    float* weights = memory;
    for (int64_t j = 0; j < c_.width; ++j) weights[j] = Cell::number(numbers(c_.weight)[channel * c_.width + j]);
    const float bias = c_.bias == nullptr ? 0.0f : Cell::number(numbers(c_.bias)[channel]);
    // The past, then the first `begin` tokens.
    float* begin_row = memory + c_.width;
    for (int64_t t = 0; t < history_; ++t) {
      begin_row[t] = c_.past == nullptr ? 0.0f : Cell::number(numbers(c_.past)[row * history_ + t]);
    }
    const int64_t begin = smaller(c_.tokens, ceil_div(history_, kLanes) * kLanes);
    for (int64_t t = 0; t < begin; ++t) begin_row[history_ + t] = Cell::number(in[t]);
    if (c_.out != nullptr) {
      Number* out = static_cast<Number*>(c_.out) + row * c_.tokens;
      for (int64_t t = 0; t < begin; t += kLanes) {
        const int64_t count = smaller(kLanes, begin - t);
        Vec sum = splat(bias);
        for (int64_t j = 0; j < c_.width; ++j) sum += load(begin_row + t + j) * weights[j];
        Cell::store_some(out + t, activated(sum, c_.activation == Activation::silu), count);
      }
      const bool silu_too = c_.activation == Activation::silu;
      switch (c_.width) {
        case 2: filter<2>(in, out, begin, weights, bias, silu_too); break;
        case 3: filter<3>(in, out, begin, weights, bias, silu_too); break;
        case 4: filter<4>(in, out, begin, weights, bias, silu_too); break;
        default: filter<0>(in, out, begin, weights, bias, silu_too);
      }
    }
    if (c_.present == nullptr) return;
    Number* present = static_cast<Number*>(c_.present) + row * history_;
    const Number* past = c_.past == nullptr ? nullptr : numbers(c_.past) + row * history_;
    for (int64_t t = 0; t < history_; ++t) {  // ascending, because the past may be the same memory
      const int64_t from = c_.tokens - history_ + t;
      present[t] = from >= 0 ? in[from] : past == nullptr ? Number{} : past[from + history_];
    }
  }

  // Tokens [begin, tokens) of a channel. kWidth is the width, or 0 for any.
  template <int kWidth>
  void filter(const Number* in, Number* out, int64_t begin, const float* weights, float bias, bool silu_too) const {
    const int64_t width = kWidth == 0 ? c_.width : kWidth;
    in -= width - 1;
    int64_t t = begin;
    for (; t + kLanes <= c_.tokens; t += kLanes) {
      Vec sum = splat(bias);
#pragma GCC unroll 4
      for (int64_t j = 0; j < width; ++j) sum += Cell::load(in + t + j) * weights[j];
      Cell::store(out + t, activated(sum, silu_too));
    }
    const int64_t count = c_.tokens - t;
    if (count == 0) return;
    Vec sum = splat(bias);
    for (int64_t j = 0; j < width; ++j) sum += Cell::load_some(in + t + j, count) * weights[j];
    Cell::store_some(out + t, activated(sum, silu_too), count);
  }

  // Token t of `count` <= kLanes channels.
  Vec input(int64_t entry, int64_t channel, int64_t count, int64_t t) const {
    if (c_.channels_last) {
      const Number* from = numbers(c_.input) + (entry * c_.tokens + t) * c_.channels + channel;
      return count == kLanes ? Cell::load(from) : Cell::load_some(from, count);
    }
    return strided(c_.input, (entry * c_.channels + channel) * c_.tokens + t, c_.tokens, count);
  }

  // `count` <= kLanes numbers that are `stride` elements apart.
  static Vec strided(const void* data, int64_t at, int64_t stride, int64_t count) {
    alignas(sizeof(Vec)) float lanes[kLanes] = {};
    for (int64_t n = 0; n < count; ++n) lanes[n] = Cell::number(static_cast<const Number*>(data)[at + n * stride]);
    return load(lanes);
  }

  void put(void* data, int64_t at, int64_t stride, int64_t count, Vec v) const {
    Number lanes[kLanes];
    Cell::store(lanes, v);
    for (int64_t n = 0; n < count; ++n) static_cast<Number*>(data)[at + n * stride] = lanes[n];
  }

  void output(int64_t entry, int64_t channel, int64_t count, int64_t t, Vec v) const {
    if (c_.channels_last) {
      Number* to = static_cast<Number*>(c_.out) + (entry * c_.tokens + t) * c_.channels + channel;
      if (count == kLanes) return Cell::store(to, v);
      return Cell::store_some(to, v, count);
    }
    put(c_.out, (entry * c_.channels + channel) * c_.tokens + t, c_.tokens, count, v);
  }

  // Some channels, in vectors of them.
  void run_lanes(int64_t entry, int64_t channel, int64_t count, float* memory) const {
    float* weights = memory;
    float* window = memory + c_.width * kLanes;  // the last history_ tokens, then those of a tile
    for (int64_t j = 0; j < c_.width; ++j) {
      store(weights + j * kLanes, strided(c_.weight, channel * c_.width + j, c_.width, count));
    }
    const Vec bias = c_.bias == nullptr ? Vec{} : strided(c_.bias, channel, 1, count);
    const int64_t row = (entry * c_.channels + channel) * history_;
    for (int64_t t = 0; t < history_; ++t) {
      store(window + t * kLanes, c_.past == nullptr ? Vec{} : strided(c_.past, row + t, history_, count));
    }
    const bool silu_too = c_.activation == Activation::silu;
    for (int64_t first = 0; first < c_.tokens; first += kTileTokens) {
      const int64_t tokens = smaller(kTileTokens, c_.tokens - first);
      for (int64_t t = 0; t < tokens; ++t) {
        store(window + (history_ + t) * kLanes, input(entry, channel, count, first + t));
        if (c_.out == nullptr) continue;
        Vec sum = bias;
        for (int64_t j = 0; j < c_.width; ++j) sum += load(window + (t + j) * kLanes) * load(weights + j * kLanes);
        output(entry, channel, count, first + t, activated(sum, silu_too));
      }
      for (int64_t t = 0; t < history_; ++t) store(window + t * kLanes, load(window + (tokens + t) * kLanes));
    }
    for (int64_t t = 0; t < history_ && c_.present != nullptr; ++t) {
      put(c_.present, row + t, history_, count, load(window + t * kLanes));
    }
  }

  const Convolution& c_;
  const Runtime& runtime_;
  const int64_t history_, parts_;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace fa::FA_ISA::lin
