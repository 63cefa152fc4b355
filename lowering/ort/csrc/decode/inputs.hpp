// The inputs of IncreFlashAttention. key and value may be lists of tensors, which move the inputs after them to later
// positions.
#pragma once

#include "../op.hpp"
#include "../types.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace incre_flash_attention {

// The tensors of one call.
class Inputs {
 public:
  Inputs(ort::Api api, const ort::KernelContext* context, int64_t keys, int64_t values);

  // The tensor of an input, or the first one of a list. An optional tensor without elements counts as absent, as in the
  // operator.
  const Tensor& operator[](Input input) const;
  bool has(Input input) const { return (*this)[input].present(); }
  const Tensor& key(int64_t n) const { return all_[1 + static_cast<size_t>(n)]; }
  const Tensor& value(int64_t n) const { return all_[1 + static_cast<size_t>(keys_ + n)]; }
  int64_t keys() const { return keys_; }
  int64_t values() const { return values_; }

 private:
  int64_t keys_;
  int64_t values_;
  std::vector<Tensor> all_;
  Tensor none_;
};

}  // namespace incre_flash_attention
}  // namespace fa
