// The differences between FlashAttentionScore and its gradient. The same code reads the calls of both operators. They
// differ in the order of the inputs, in some names, and in the numbers of the constraints.
#pragma once

#include <cstddef>

#include "../op.hpp"

namespace fa {

// The meaning of an input. Its name and position depend on the operator.
enum class Role : size_t {
  query, key, value, pse, drop_mask, atten_mask, prefix, query_ends, key_ends, query_start, key_start, query_rope,
  key_rope, sink, count,
};

// The numbers of the constraints that are checked while a call is read, by subject. FlashAttentionScore and its gradient
// name some of these rules differently: see their kSignature.
struct Rules {
  Rule layout = {}, heads = {}, head_size = {}, head_groups = {}, batch = {}, keep_prob = {}, pse_type = {},
       slopes = {};
  Rule bias = {}, mask = {}, mode = {}, prefix = {}, dropout = {}, sink = {}, lengths = {}, rope = {}, starts = {};
  Rule statistics = {}, softcap = {};
};
using Topic = Rule Rules::*;

struct Signature {
  Rules rules;
  const char* const* names;                            // of all inputs
  size_t positions[static_cast<size_t>(Role::count)];  // of each role in `names`
  Attribute<const char*> statistics_layout;            // the layout of softmax_max and softmax_sum
  bool forward;

  const char* name(Role role) const { return names[positions[static_cast<size_t>(role)]]; }
};

// Throws the errors of one node. Each message begins with the node's name. That of `invalid` ends with the violated
// constraint.
struct Diagnostics {
  const std::string& node;
  const Signature& signature;

  [[noreturn]] void invalid(Topic topic, const std::string& text) const;
  [[noreturn]] void unsupported(const std::string& what) const;
};

// The input tensors of one call. Absent inputs are not present.
class CallInputs {
 public:
  CallInputs(ort::Api api, const ort::KernelContext* context, const Signature& signature);

  const Tensor& operator[](Role role) const { return all_[signature_.positions[static_cast<size_t>(role)]]; }
  const Tensor& at(size_t index) const { return all_[index]; }
  bool has(Role role) const { return (*this)[role].present(); }

 private:
  const Signature& signature_;
  std::vector<Tensor> all_;
};

}  // namespace fa
