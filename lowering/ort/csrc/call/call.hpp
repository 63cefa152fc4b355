// One call of FlashAttentionScore or its gradient. It checks the tensors, finds their common sizes, and makes the
// Problem for the kernels.
//
//     const CallInputs inputs(api, context, kSignature);
//     Call call(kSignature, node, attributes, inputs, compressed_mask_checked);
//     ... allocate outputs of call.out_dims() and call.statistics_dims() ...
//     const Problem problem = call.problem(out, softmax_max, softmax_sum);
//
// The Problem points to sequences of the Call, so it is valid as long as the Call lives. A gradient has the shape of
// its operand, so the operand's offsets and strides are those of its gradient, too.
#pragma once

#include "attributes.hpp"

namespace fa {

// Checks shape and content of the compressed mask of a sparse_mode. The kernels do not read the mask, so another content
// would give another result than the operator's. `content_checked`: the content has been checked before, so only the
// shape is checked.
void check_compressed_mask(const Diagnostics& diagnostics, const Attributes& attributes, const Tensor& mask,
                           bool content_checked);

// Whether the mode requires atten_mask to be its compressed mask. Otherwise atten_mask is a full mask or a mask of the keys.
bool needs_compressed_mask(const Attributes& attributes, const Dims& mask);

// Whether a dimension has the full size, or is 1 and stands for the full size.
inline bool is_one_or(int64_t dim, int64_t full) { return dim == 1 || dim == full; }

class Call {
 public:
  Call(const Signature& signature, const std::string& node, const Attributes& attributes, const CallInputs& inputs,
       bool compressed_mask_checked);

  const Dims& out_dims() const { return out_dims_; }
  Dims statistics_dims() const;

  // Whether the kernels leave out some rows of the outputs. Such a row belongs to no batch, or to a batch without keys.
  // The caller sets these rows to 0.
  bool has_gaps() const { return gaps_; }

  Problem problem(void* out, float* softmax_max, float* softmax_sum);

 private:
  // First row and number of the queries and keys of one batch entry. Every entry has Lengths; only an entry with queries and
  // keys has a Sequence.
  struct Lengths {
    int64_t query_begin, query, key_begin, key;
  };

  const Tensor& in(Role role) const { return inputs_[role]; }
  bool has_mask() const { return inputs_.has(Role::atten_mask); }
  bool packed() const { return a_.layout == Layout::TND; }
  std::string text(Role role) const { return std::string("input ") + signature_.name(role); }
  [[noreturn]] void invalid(Topic topic, const std::string& text) const { diagnostics_.invalid(topic, text); }
  [[noreturn]] void wrong_shape(Topic topic, Role role, const std::string& expected) const;
  bool is_mask_batch(int64_t size) const;
  std::string smaller_masks() const;
  int64_t first_integer(Role role) const;

  // call.cc: sizes, strides, sequences
  void read_operands();
  void apply_key_length(Role role, Operand& operand) const;
  void read_batch(const int64_t (&batches)[3]);
  void read_rope();
  Operand rope_operand(Role role, Role nope_role, const Operand& nope) const;
  std::vector<int64_t> read_ends(Role role, int64_t tokens) const;
  void read_lengths();
  void read_sequences();
  void add_sequence(const Lengths& lengths, int64_t batch);

  // masks.cc: which keys a row attends
  void read_mask();
  void read_band();
  void read_prefix(int64_t mode);
  void read_score_mask();
  void read_key_mask();
  void read_packed_mask();
  void set_mask_strides(const Dims& shape);

  // bias.cc: bias tensors and slopes
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
  const bool compressed_mask_checked_;
  Operand query_;
  Operand key_;
  Operand value_;
  Operand out_;
  Dims out_dims_;
  Operand query_rope_;
  Operand key_rope_;
  int64_t start_ = 0;  // kv_start_idx - q_start_idx
  int64_t batch_ = 1;  // common to query, key and value; of TND: 1
  int64_t longest_query_ = 0;
  int64_t longest_key_ = 0;
  bool gaps_ = false;
  std::vector<Lengths> lengths_;
  std::vector<Sequence> sequences_;
  std::vector<size_t> batch_of_;  // the batch of each of sequences_
  Problem problem_;
};

}  // namespace fa
