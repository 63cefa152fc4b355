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

// Channels of a task. With the channels last a task reads a run of each token, and long runs are read faster.
inline constexpr int64_t kTaskChannels = 64, kRunChannels = 256;
static_assert(kTaskChannels % kLanes == 0 && kRunChannels % kTaskChannels == 0);

// The longest runs that leave no worker without a task.
inline int64_t channels_of_task(const Convolution& c, int64_t workers) {
  int64_t channels = kTaskChannels;
  while (c.channels_last && channels < kRunChannels && c.batch * ceil_div(c.channels, 2 * channels) >= workers) {
    channels *= 2;
  }
  return channels;
}

// Bytes of a call that stays on one thread.
inline constexpr int64_t kInlineConvolution = 1 << 18;

template <Type kType>
class Convolver {
  using Cell = Cells<kType>;
  using Number = typename Cell::Number;

 public:
  Convolver(const Convolution& convolution, const Runtime& runtime)
      : c_(convolution), runtime_(runtime), history_(convolution.width - 1),
        task_channels_(channels_of_task(convolution, runtime.most_workers)),
        parts_(ceil_div(convolution.channels, task_channels_)) {}

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
      const int64_t first = task % convolver.parts_ * convolver.task_channels_;
      const int64_t end = smaller(convolver.c_.channels, first + convolver.task_channels_);
      convolver.run_channels(task / convolver.parts_, first, end, static_cast<float*>(memory));
    }
    convolver.runtime_.release(convolver.runtime_.self, memory);
  }

  // The memory of a worker: the weights, the bias, the past and the first tokens of the channels that it has at once.
  size_t floats() const {
    const int64_t channels = c_.channels_last ? kRunChannels : kLanes;
    const int64_t one_row = c_.width + 2 * history_ + 4 * kLanes;
    return static_cast<size_t>((c_.width + 1 + 2 * history_ + kTileTokens) * channels + one_row);
  }

  const Number* numbers(const void* data) const { return static_cast<const Number*>(data); }

  void run_channels(int64_t entry, int64_t first, int64_t end, float* memory) const {
    if (c_.tokens == 1) return run_step(entry, first, end);
    if (c_.channels_last) return run_columns(entry, first, end, memory);
    const bool by_tokens = c_.tokens >= kTileTokens;
    for (int64_t channel = first; channel < end; channel += by_tokens ? 1 : kLanes) {
      if (by_tokens) run_channel(entry, channel, memory);
      else run_lanes(entry, channel, smaller(kLanes, end - channel), memory);
    }
  }

  FA_INLINE Vec activated(Vec x, bool silu_too) { return silu_too ? silu(x) : x; }

  // The number that belongs to a sum, and to the input at its token.
  FA_INLINE Vec result(Vec sum, bool silu_too, Vec input, bool adds_input) {
    const Vec x = activated(sum, silu_too);
    return adds_input ? x + input : x;
  }

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
    keep(row, in, 1);
  }

  // The new state of a channel, whose tokens are `stride` numbers apart.
  void keep(int64_t row, const Number* in, int64_t stride) const {
    if (c_.present == nullptr) return;
    Number* present = static_cast<Number*>(c_.present) + row * history_;
    const Number* past = c_.past == nullptr ? nullptr : numbers(c_.past) + row * history_;
    for (int64_t t = 0; t < history_; ++t) {  // ascending, because the past may be the same memory
      const int64_t from = c_.tokens - history_ + t;
      present[t] = from >= 0 ? in[from * stride] : past == nullptr ? Number{} : past[from + history_];
    }
  }

  // One token. What is read of a channel lies together, so that its sum is computed by itself.
  void run_step(int64_t entry, int64_t first, int64_t end) const {
    switch (c_.width) {
      case 2: return step<2>(entry, first, end);
      case 3: return step<3>(entry, first, end);
      case 4: return step<4>(entry, first, end);
      default: return step<0>(entry, first, end);
    }
  }

  // kWidth is the width, or 0 for any.
  template <int kWidth>
  void step(int64_t entry, int64_t first, int64_t end) const {
    const int64_t width = kWidth == 0 ? c_.width : kWidth, history = width - 1;
    const int64_t start = entry * c_.channels;
    const Number* in = numbers(c_.input) + start;
    for (int64_t channel = first; channel < end; channel += kLanes) {
      const int64_t count = smaller(kLanes, end - channel);
      if (c_.out != nullptr) {
        alignas(sizeof(Vec)) float sums[kLanes] = {}, inputs[kLanes] = {};
        for (int64_t n = 0; n < count; ++n) {
          const Number* weight = numbers(c_.weight) + (channel + n) * width;
          float sum = c_.bias == nullptr ? 0.0f : Cell::number(numbers(c_.bias)[channel + n]);
          const Number* past = c_.past == nullptr ? nullptr : numbers(c_.past) + (start + channel + n) * history;
          for (int64_t j = 0; j < history; ++j) {
            sum += (past == nullptr ? 0.0f : Cell::number(past[j])) * Cell::number(weight[j]);
          }
          inputs[n] = Cell::number(in[channel + n]);
          sums[n] = sum + inputs[n] * Cell::number(weight[history]);
        }
        Number* out = static_cast<Number*>(c_.out) + start + channel;
        Cell::store_some(out, result(load(sums), c_.activation == Activation::silu, load(inputs), c_.adds_input), count);
      }
      for (int64_t n = channel; n < channel + count; ++n) keep(start + n, in + n, c_.channels);
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

  // Some channels and a few tokens, in vectors of channels.
  void run_lanes(int64_t entry, int64_t channel, int64_t count, float* memory) const {
    float* weights = memory;
    float* window = memory + c_.width * kLanes;  // the past, then the tokens
    for (int64_t j = 0; j < c_.width; ++j) {
      store(weights + j * kLanes, strided(c_.weight, channel * c_.width + j, c_.width, count));
    }
    const Vec bias = c_.bias == nullptr ? Vec{} : strided(c_.bias, channel, 1, count);
    const int64_t row = entry * c_.channels + channel;
    for (int64_t t = 0; t < history_; ++t) {
      store(window + t * kLanes, c_.past == nullptr ? Vec{} : strided(c_.past, row * history_ + t, history_, count));
    }
    const bool silu_too = c_.activation == Activation::silu;
    for (int64_t t = 0; t < c_.tokens; ++t) {
      store(window + (history_ + t) * kLanes, strided(c_.input, row * c_.tokens + t, c_.tokens, count));
      if (c_.out == nullptr) continue;
      Vec sum = bias;
      for (int64_t j = 0; j < c_.width; ++j) sum += load(window + (t + j) * kLanes) * load(weights + j * kLanes);
      put(c_.out, row * c_.tokens + t, c_.tokens, count, activated(sum, silu_too));
    }
    for (int64_t t = 0; t < history_ && c_.present != nullptr; ++t) {
      put(c_.present, row * history_ + t, history_, count, load(window + (c_.tokens + t) * kLanes));
    }
  }

  // Some channels of all tokens, with the channels last. The first tokens, and the past before them, are computed from a
  // copy.
  void run_columns(int64_t entry, int64_t first, int64_t end, float* memory) const {
    const int64_t channels = end - first;
    float* weights = memory;  // [width][kRunChannels], then the bias
    float* bias = weights + c_.width * kRunChannels;
    float* window = bias + kRunChannels;  // the past, then the first tokens
    const int64_t begin = smaller(c_.tokens, history_);
    const Number* in = numbers(c_.input) + entry * c_.tokens * c_.channels + first;
    for (int64_t n = 0; n < channels; ++n) {
      const int64_t channel = first + n, row = entry * c_.channels + channel;
      for (int64_t j = 0; j < c_.width; ++j) {
        weights[j * kRunChannels + n] = Cell::number(numbers(c_.weight)[channel * c_.width + j]);
      }
      bias[n] = c_.bias == nullptr ? 0.0f : Cell::number(numbers(c_.bias)[channel]);
      for (int64_t t = 0; t < history_; ++t) {
        window[t * kRunChannels + n] = c_.past == nullptr ? 0.0f : Cell::number(numbers(c_.past)[row * history_ + t]);
      }
      for (int64_t t = 0; t < begin; ++t) {
        window[(history_ + t) * kRunChannels + n] = Cell::number(in[t * c_.channels + n]);
      }
    }
    if (c_.out != nullptr) {
      Number* out = static_cast<Number*>(c_.out) + entry * c_.tokens * c_.channels + first;
      const bool silu_too = c_.activation == Activation::silu;
      for (int64_t t = 0; t < begin; ++t) {
        for (int64_t n = 0; n < channels; n += kLanes) {
          Vec sum = load(bias + n);
          for (int64_t j = 0; j < c_.width; ++j) {
            sum += load(window + (t + j) * kRunChannels + n) * load(weights + j * kRunChannels + n);
          }
          const Vec input = load(window + (history_ + t) * kRunChannels + n);
          const Vec y = result(sum, silu_too, input, c_.adds_input);
          Cell::store_some(out + t * c_.channels + n, y, smaller(kLanes, channels - n));
        }
      }
      switch (c_.width) {
        case 2: columns<2>(in, out, channels, weights, bias, silu_too); break;
        case 3: columns<3>(in, out, channels, weights, bias, silu_too); break;
        case 4: columns<4>(in, out, channels, weights, bias, silu_too); break;
        default: columns<0>(in, out, channels, weights, bias, silu_too);
      }
    }
    for (int64_t n = 0; n < channels; ++n) keep(entry * c_.channels + first + n, in + n, c_.channels);
  }

  // Tokens [history, tokens) of some channels. kWidth is the width, or 0 for any.
  template <int kWidth>
  void columns(const Number* in, Number* out, int64_t channels, const float* weights, const float* bias,
               bool silu_too) const {
    const int64_t width = kWidth == 0 ? c_.width : kWidth, stride = c_.channels;
    const bool adds_input = c_.adds_input;
    for (int64_t t = width - 1; t < c_.tokens; ++t) {
      const Number* from = in + (t - (width - 1)) * stride;
      Number* to = out + t * stride;
      int64_t n = 0;
      for (; n + kLanes <= channels; n += kLanes) {
        Vec sum = load(bias + n);
#pragma GCC unroll 4
        for (int64_t j = 0; j < width; ++j) {
          sum += Cell::load(from + j * stride + n) * load(weights + j * kRunChannels + n);
        }
        Cell::store(to + n, result(sum, silu_too, Cell::load(in + t * stride + n), adds_input));
      }
      const int64_t count = channels - n;
      if (count == 0) continue;
      Vec sum = load(bias + n);
      for (int64_t j = 0; j < width; ++j) {
        sum += Cell::load_some(from + j * stride + n, count) * load(weights + j * kRunChannels + n);
      }
      Cell::store_some(to + n, result(sum, silu_too, Cell::load_some(in + t * stride + n, count), adds_input), count);
    }
  }

  const Convolution& c_;
  const Runtime& runtime_;
  const int64_t history_, task_channels_, parts_;
  int64_t next_ = 0;
  bool failed_ = false;
};

}  // namespace fa::FA_ISA::lin
