// The tensors of one call. key and value may be lists of tensors, which move the inputs after them to later positions.
#pragma once

#include "attributes.hpp"

namespace fa::prompt {

class Inputs {
 public:
  Inputs(ort::Api api, const ort::KernelContext* context, const Operator& op, const Attributes& attributes);

  // The tensor of an input, or the first one of a list. An optional tensor without elements counts as absent, as in the
  // operator.
  const Tensor& operator[](size_t input) const;
  bool has(size_t input) const { return (*this)[input].present(); }
  const Tensor& key(int64_t n) const { return all_[1 + static_cast<size_t>(n)]; }
  const Tensor& value(int64_t n) const { return all_[1 + static_cast<size_t>(keys_ + n)]; }

 private:
  int64_t keys_;
  int64_t values_;
  size_t inputs_;  // of the operator; a list counts as one input
  std::vector<Tensor> all_;
  Tensor none_;
};

}  // namespace fa::prompt
