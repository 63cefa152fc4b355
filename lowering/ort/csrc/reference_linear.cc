// Linear attention and the short causal convolution in plain loops, with sums in double.
//
//     S' = diag(e^g) S
//     S  = S' + k v^T                              Correction::none
//     S  = S' + k (beta (v - S'^T k))^T            Correction::delta
//     S  = S' + k v^T + p (r^T S')                 Correction::general
//     S  = S' + k v^T + p (r^T S)                  the same with reads_before_decay
//     o  = scale S^T q
//
// A state is rounded where it is written: at the end of a sequence. So is a result.
#include <cmath>
#include <new>
#include <vector>

#include "linear.hpp"
#include "reference.hpp"

namespace fa::reference {
namespace {

using linear::Correction;
using linear::Gate;

// One head of one sequence.
class Recurrence {
 public:
  Recurrence(const linear::Problem& problem, const linear::Sequence& sequence, int64_t head)
      : p_(problem), sequence_(sequence), head_(head), key_head_(head * problem.key_heads / problem.heads),
        state_(static_cast<size_t>(problem.key_size * problem.value_size)) {}

  void run() {
    const bool has_past = p_.past.data != nullptr && sequence_.past >= 0;
    for (int64_t i = 0; has_past && i < p_.key_size; ++i) {
      for (int64_t j = 0; j < p_.value_size; ++j) {
        at(i, j) = read(p_.past.data, index(p_.past, sequence_.past, i, j), p_.past.type);
      }
    }
    for (int64_t t = sequence_.first; t < sequence_.first + sequence_.tokens; ++t) {
      change(t);
      if (p_.out.data != nullptr) write_results(t);
    }
    for (int64_t i = 0; p_.present.data != nullptr && i < p_.key_size; ++i) {
      for (int64_t j = 0; j < p_.value_size; ++j) {
        write(p_.present.data, index(p_.present, sequence_.present, i, j), static_cast<float>(at(i, j)), p_.present.type);
      }
    }
  }

 private:
  double& at(int64_t i, int64_t j) { return state_[static_cast<size_t>(i * p_.value_size + j)]; }

  int64_t index(const linear::States& states, int64_t entry, int64_t i, int64_t j) const {
    return entry * states.entry + head_ * states.head + i * states.key + j * states.value;
  }

  static double number(const linear::Rows& rows, int64_t token, int64_t head, int64_t d) {
    return read(rows.data, token * rows.token + head * rows.head + d, rows.type);
  }

  double decay(int64_t t, int64_t i) const {
    if (p_.gate == Gate::none) return 1;
    return std::exp(number(p_.decay, t, head_, p_.gate == Gate::key ? i : 0));
  }

  // What a token reads of column j of the state for its correction.
  double read_back(int64_t t, int64_t j) {
    double sum = 0;
    for (int64_t i = 0; i < p_.key_size && p_.correction != Correction::none; ++i) {
      sum += at(i, j) * (p_.correction == Correction::delta ? number(p_.key, t, key_head_, i) : number(p_.read, t, head_, i));
    }
    return sum;
  }

  void change(int64_t t) {
    std::vector<double> before(static_cast<size_t>(p_.reads_before_decay ? p_.value_size : 0));
    for (size_t j = 0; j < before.size(); ++j) before[j] = read_back(t, static_cast<int64_t>(j));
    for (int64_t i = 0; i < p_.key_size && p_.gate != Gate::none; ++i) {
      const double factor = decay(t, i);
      for (int64_t j = 0; j < p_.value_size; ++j) at(i, j) *= factor;
    }
    for (int64_t j = 0; j < p_.value_size; ++j) {
      const double held = p_.reads_before_decay ? before[static_cast<size_t>(j)] : read_back(t, j);
      double value = number(p_.value, t, head_, j);
      if (p_.correction == Correction::delta) value = number(p_.beta, t, head_, 0) * (value - held);
      for (int64_t i = 0; i < p_.key_size; ++i) {
        at(i, j) += number(p_.key, t, key_head_, i) * value;
        if (p_.correction == Correction::general) at(i, j) += number(p_.write, t, head_, i) * held;
      }
    }
  }

  void write_results(int64_t t) {
    const int64_t group = p_.out_heads / p_.heads;
    for (int64_t out = head_ * group; out < (head_ + 1) * group; ++out) {
      const int64_t query_head = out * p_.query_heads / p_.out_heads;
      for (int64_t j = 0; j < p_.value_size; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < p_.key_size; ++i) sum += at(i, j) * number(p_.query, t, query_head, i);
        write(const_cast<void*>(p_.out.data), t * p_.out.token + out * p_.out.head + j, static_cast<float>(p_.scale * sum),
              p_.out.type);
      }
    }
  }

  const linear::Problem& p_;
  const linear::Sequence& sequence_;
  const int64_t head_, key_head_;
  std::vector<double> state_;
};

Outcome attention_of(const linear::Problem& problem, const Runtime&) {
  try {
    for (int64_t n = 0; n < problem.sequence_count; ++n) {
      for (int64_t head = 0; head < problem.heads; ++head) Recurrence(problem, problem.sequences[n], head).run();
    }
  } catch (const std::bad_alloc&) {
    return Outcome::out_of_memory;
  }
  return Outcome::done;
}

Outcome convolution_of(const linear::Convolution& c, const Runtime&) {
  try {
    const int64_t history = c.width - 1;
    std::vector<float> numbers(static_cast<size_t>(history + c.tokens));  // the past, then the input
    for (int64_t row = 0; row < c.batch * c.channels; ++row) {
      const int64_t entry = row / c.channels, channel = row % c.channels;
      const auto at = [&](int64_t t) {
        return c.channels_last ? (entry * c.tokens + t) * c.channels + channel : row * c.tokens + t;
      };
      for (int64_t t = 0; t < history; ++t) {
        numbers[static_cast<size_t>(t)] = c.past == nullptr ? 0.0f : read(c.past, row * history + t, c.type);
      }
      for (int64_t t = 0; t < c.tokens; ++t) numbers[static_cast<size_t>(history + t)] = read(c.input, at(t), c.type);
      for (int64_t t = 0; t < c.tokens && c.out != nullptr; ++t) {
        double sum = c.bias == nullptr ? 0.0 : read(c.bias, channel, c.type);
        for (int64_t j = 0; j < c.width; ++j) {
          sum += double{read(c.weight, channel * c.width + j, c.type)} * numbers[static_cast<size_t>(t + j)];
        }
        if (c.activation == linear::Activation::silu) sum *= 1 / (1 + std::exp(-sum));
        if (c.adds_input) sum += numbers[static_cast<size_t>(history + t)];
        write(c.out, at(t), static_cast<float>(sum), c.type);
      }
      for (int64_t t = 0; t < history && c.present != nullptr; ++t) {
        write(c.present, row * history + t, numbers[static_cast<size_t>(c.tokens + t)], c.type);
      }
    }
  } catch (const std::bad_alloc&) {
    return Outcome::out_of_memory;
  }
  return Outcome::done;
}

}  // namespace

extern const linear::Kernels linear_kernels;
const linear::Kernels linear_kernels = {attention_of, convolution_of};

}  // namespace fa::reference
