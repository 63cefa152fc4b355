// Heads of one value each that share query and key, with a decay for each key dimension: the channels of Mamba-1. Their states
// are rows of a few numbers. Some channels are computed together, so that the query and the key of a token are read once for
// all of them.
#pragma once

#include "state.hpp"

namespace fa::FA_ISA::lin {

// Channels that are computed together: their states and decays stay in the first cache.
inline constexpr int64_t kChannels = 64;

FA_INLINE bool are_channels(const Problem& p) {
  return p.value_size == 1 && p.key_heads == 1 && p.query_heads == 1 && p.out_heads == p.heads && p.gate == Gate::key &&
         p.correction == Correction::none;
}

// The memory of a worker.
struct ChannelScratch {
  float* states;   // [kChannels][row]
  float* decays;   // [row], of one channel
  float* key;      // [row]
  float* query;    // [row]
  float* values;   // [kChannels]
  float* results;  // [kChannels]

  ChannelScratch(const Shape& shape, float* memory)
      : states(memory), decays(states + kChannels * shape.row), key(decays + shape.row), query(key + shape.row),
        values(query + shape.row), results(values + kChannels) {}

  static int64_t floats(const Shape& shape) { return (kChannels + 3) * shape.row + 2 * kChannels; }
};

// The channels [first, first + count) of one sequence.
class Channels {
 public:
  Channels(const Problem& problem, const Shape& shape, const ChannelScratch& scratch, int64_t first, int64_t count)
      : p_(problem), shape_(shape), s_(scratch), first_(first), count_(count) {}

  void run(const linear::Sequence& sequence) const {
    read_states(sequence.past);
    for (int64_t t = sequence.first; t < sequence.first + sequence.tokens; ++t) {
      read_row(p_.key, t, 0, shape_.keys, shape_.row, s_.key);
      for (int64_t c = 0; c < count_; ++c) s_.values[c] = read_number(p_.value, t, first_ + c);
      if (p_.out.data == nullptr) {
        step<false>(t);
        continue;
      }
      read_row(p_.query, t, 0, shape_.keys, shape_.row, s_.query);
      step<true>(t);
      for (int64_t c = 0; c < count_; ++c) {
        const int64_t at = t * p_.out.token + (first_ + c) * p_.out.head;
        write_floats(const_cast<void*>(p_.out.data), at, s_.results + c, 1, p_.out.type);
      }
    }
    for (int64_t c = 0; c < count_ && p_.present.data != nullptr; ++c) {
      const int64_t at = first_element(p_.present, sequence.present, first_ + c, 0);
      write_floats(p_.present.data, at, s_.states + c * shape_.row, shape_.keys, p_.present.type);
    }
  }

 private:
  void read_states(int64_t entry) const {
    if (p_.past.data == nullptr || entry < 0) {
      __builtin_memset(s_.states, 0, static_cast<size_t>(count_ * shape_.row) * sizeof(float));
      return;
    }
    for (int64_t c = 0; c < count_; ++c) {
      const int64_t at = first_element(p_.past, entry, first_ + c, 0);
      read_numbers(p_.past.data, at, p_.past.type, shape_.keys, shape_.row, s_.states + c * shape_.row);
    }
  }

  // The logarithms of the decays of a token and channel, filled up to vectors.
  [[gnu::always_inline]] const float* decays(int64_t token, int64_t channel) const {
    if (p_.decay.type == Type::float32 && shape_.keys == shape_.row) {
      return static_cast<const float*>(p_.decay.data) + token * p_.decay.token + channel * p_.decay.head;
    }
    read_row(p_.decay, token, channel, shape_.keys, shape_.row, s_.decays);
    return s_.decays;
  }

  // The lanes of x, which is stored at `from`, that are key dimensions. In the others a value that is no number times a key of
  // 0 may have left NaN.
  FA_INLINE Vec first_lanes(Vec x, const float* from, int64_t count) {
    return count >= kLanes ? x : Isa::load_first(from, count);
  }

  template <bool kReads>
  [[gnu::always_inline]] void step(int64_t token) const {
    for (int64_t c = 0; c < count_; ++c) {
      const float* logs = decays(token, first_ + c);
      float* state = s_.states + c * shape_.row;
      const Vec value = splat(s_.values[c]);
      Vec sum{};
      for (int64_t d = 0; d < shape_.row; d += kLanes) {
        const Vec x = load(state + d) * exp_any(load(logs + d)) + value * load(s_.key + d);
        store(state + d, x);
        if constexpr (kReads) sum += first_lanes(x, state + d, shape_.keys - d) * load(s_.query + d);
      }
      if constexpr (kReads) s_.results[c] = sum_lanes(sum) * p_.scale;
    }
  }

  const Problem& p_;
  const Shape& shape_;
  const ChannelScratch& s_;
  const int64_t first_, count_;
};

}  // namespace fa::FA_ISA::lin
