// One call of an attention operator: its tensors checked, their common sizes, and the Problem made of them.
//
//     const CallInputs inputs(api, context, kSignature);
//     Call call(kSignature, node, attributes, inputs, constant_mask_checked);
//     ... allocate outputs of call.out_dims() and call.statistics_dims() ...
//     const Problem problem = call.problem(out, softmax_max, softmax_sum);
//
// The Problem lives as long as the Call, whose sequences it points to. A gradient has the shape of its operand, so the
// offsets and strides of query, key, value and out serve it, too.
#pragma once

#include "attributes.hpp"

namespace fa {

// The content of a constant mask is not used, but anything else in it would mean another operation: this refuses it.
// `content_checked`: the shape alone is looked at.
void check_constant_mask(const Diagnostics& diagnostics, const Attributes& attributes, const Tensor& mask,
                         bool content_checked);

// True if atten_mask is the constant of its mode rather than a mask of the scores or of the keys alone.
bool is_constant_mask(const Attributes& attributes, const Dims& mask);

class Call {
 public:
  Call(const Signature& signature, const std::string& node, const Attributes& attributes, const CallInputs& inputs,
       bool constant_mask_checked);

  const Dims& out_dims() const { return out_dims_; }
  Dims statistics_dims() const;

  // True if some row of the outputs belongs to no query that has a key: those rows are 0.
  bool has_gaps() const { return gaps_; }

  Problem problem(void* out, float* softmax_max, float* softmax_sum);

 private:
  // Where a batch lies and how long it is; also those without queries or keys, which `sequences_` leaves out.
  struct Lengths {
    int64_t query_begin, query, key_begin, key;
  };

  const Tensor& in(Role role) const { return inputs_[role]; }
  bool has_mask() const { return inputs_.has(Role::atten_mask); }
  bool packed() const { return a_.layout == Layout::TND; }
  std::string text(Role role) const { return std::string("input ") + signature_.name(role); }
  [[noreturn]] void invalid(Topic topic, const std::string& text) const { diagnostics_.invalid(topic, text); }
  [[noreturn]] void wrong_shape(Topic topic, Role role, const std::string& expected) const;
  int64_t first_integer(Role role) const;

  // call.cc: sizes, strides, sequences
  void read_operands();
  void shorten(Role role, Operand& operand) const;
  void read_batch(const int64_t (&found)[3]);
  void read_rope();
  Operand rope_operand(Role role, Role like, const Operand& whole) const;
  std::vector<int64_t> read_ends(Role role, int64_t tokens) const;
  void read_lengths();
  void read_sequences();
  void add_sequence(const Lengths& own, int64_t batch);

  // masks.cc: which keys a row attends
  void read_mask();
  void read_structure();
  void read_prefix(int64_t mode);
  void read_score_mask();
  void read_key_mask();
  void read_packed_mask();
  void place_mask(const Dims& four);

  // bias.cc: what is added to the scores
  void read_pse();
  void read_start();
  void read_slopes();
  void read_bias();
  void read_packed_bias();
  void check_compressed_bias() const;

  // dropout_and_sink.cc
  void read_dropout();
  void read_sink();

  const Signature& signature_;
  const Attributes& a_;
  const CallInputs& inputs_;
  const Diagnostics diagnostics_;
  const bool constant_mask_checked_;
  Operand query_;
  Operand key_;
  Operand value_;
  Operand out_;
  Dims out_dims_;
  Operand query_rope_;
  Operand key_rope_;
  int64_t start_ = 0;  // kv_start_idx less q_start_idx
  int64_t batch_ = 1;  // common to query, key and value; of TND: 1
  int64_t longest_query_ = 0;
  int64_t longest_key_ = 0;
  bool gaps_ = false;
  std::vector<Lengths> lengths_;
  std::vector<Sequence> sequences_;
  std::vector<size_t> batch_of_;  // of each entry of sequences_
  Problem problem_;
};

}  // namespace fa
