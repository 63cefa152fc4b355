// What the operators that merge attention results share: they are plain loops, for their results are small beside what
// made them.
#pragma once

#include "op.hpp"
#include "reference.hpp"

namespace fa {

// float32, float16 or bfloat16.
inline Type float_type(ort::Element type) {
  return type == ort::Element::float32    ? Type::float32
         : type == ort::Element::float16 ? Type::float16
                                          : Type::bfloat16;
}

// The tensors of a call, one after the other.
inline std::vector<Tensor> tensors_of(ort::Api api, const ort::KernelContext* context) {
  size_t count = 0;
  check(api, ort::KernelContext_GetInputCount(api, context, &count));
  std::vector<Tensor> tensors(count);
  for (size_t i = 0; i < count; ++i) {
    const ort::Value* value = nullptr;
    check(api, ort::KernelContext_GetInput(api, context, i, &value));
    tensors[i] = tensor_of(api, value);
  }
  return tensors;
}

}  // namespace fa
