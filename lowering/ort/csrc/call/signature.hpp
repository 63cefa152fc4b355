// The differences between FlashAttentionScore and its gradient. The same code reads the calls of both, but the order of
// their inputs, some names and the numbers of the constraints differ.
#pragma once

#include <cstddef>

#include "../op.hpp"

namespace fa {

// An input by its meaning.
enum class Role : size_t {
  query, key, value, pse, drop_mask, atten_mask, prefix, query_ends, key_ends, query_start, key_start, query_rope,
  key_rope, sink, count,
};

// The constraints that are checked while a call is read, by what they are about.
struct Rules {
  Rule layout = {}, heads = {}, head_size = {}, head_groups = {}, batch = {}, keep_prob = {}, pse_type = {},
       slopes = {};
  Rule bias = {}, mask = {}, mode = {}, prefix = {}, dropout = {}, sink = {}, lengths = {}, rope = {}, starts = {};
  Rule statistics = {};
};
using Topic = Rule Rules::*;

struct Signature {
  Rules rules;
  const char* const* names;                        // of all inputs
  size_t place[static_cast<size_t>(Role::count)];  // of each role among them
  Attribute<const char*> statistics_layout;        // the order of softmax_max and softmax_sum
  bool forward;

  const char* name(Role role) const { return names[place[static_cast<size_t>(role)]]; }
};

// Errors about one node: they begin with its name and end with the constraint that does not hold.
struct Diagnostics {
  const std::string& node;
  const Signature& signature;

  [[noreturn]] void invalid(Topic topic, const std::string& text) const;
  [[noreturn]] void unsupported(const std::string& what) const;
};

// The tensors of one call.
class CallInputs {
 public:
  CallInputs(ort::Api api, const ort::KernelContext* context, const Signature& signature);

  const Tensor& operator[](Role role) const { return all_[signature_.place[static_cast<size_t>(role)]]; }
  const Tensor& at(size_t index) const { return all_[index]; }
  bool has(Role role) const { return (*this)[role].present(); }

 private:
  const Signature& signature_;
  std::vector<Tensor> all_;
};

}  // namespace fa
