// Problems of FlashAttentionScore and its gradient, and their results with one instruction set.
#pragma once

#include <memory>

#include "../gradient.hpp"
#include "check.hpp"

namespace fa::check {

// What a problem has beside query, key and value, as bits.
enum Feature : unsigned {
  kCausal = 1,  // row i attends the keys up to keys - queries + i
  kMask = 2,    // one mask for each head; its first row attends no key
  kBias = 4,    // pse of the query's type
  kSlopes = 8,  // a bias computed from slopes
  kRope = 16,
  kSink = 32,
  kDropout = 64,
  kPacked = 128,       // two sequences in one tensor, [tokens, heads, size]
  kMean = 256,         // cpu_empty_rows
  kMaskValue = 512,    // masked keys keep a score
  kMaskedBias = 1024,  // to which their bias is added
  kSoftcap = 2048,
};

struct Form {
  int64_t heads, key_heads, queries, keys, size, value_size;
  unsigned features = 0;
  unsigned seed = 7;  // of the numbers

  bool has(Feature feature) const { return (features & feature) != 0; }
};

std::string text_of(const Form& form);

// A random form whose features are compatible.
Form drawn_form(Random& random);

// A problem and the memory of its operands.
struct AttentionProblem {
  AttentionProblem(const Form& form, Type type);
  AttentionProblem(const AttentionProblem&) = delete;

  Problem problem;
  int64_t rows = 0;      // of all heads and sequences
  int64_t key_rows = 0;  // of all key heads and sequences
  Random random;

 private:
  void add_sequences(const Form& form);
  void add_terms(const Form& form);

  Numbers& keep(Type type, int64_t count);

  std::vector<std::unique_ptr<Numbers>> numbers_;
  std::vector<Sequence> sequences_;
  std::vector<uint8_t> mask_, drop_mask_;
};

// The three results of the forward pass.
struct Forward {
  Forward(AttentionProblem& of, Attention attention);

  Numbers out, max, sum;
};

}  // namespace fa::check
