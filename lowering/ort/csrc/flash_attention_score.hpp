// The operator FlashAttentionScore as a kernel of ONNX Runtime.
#pragma once

#include "call/attributes.hpp"
#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {
namespace flash_attention_score {

class Kernel {
 public:
  // Throws an Error naming what the kernel does not take.
  Kernel(ort::Api api, const ort::KernelInfo* info);

  // Re-entrant: ONNX Runtime calls one kernel from several threads.
  void compute(ort::KernelContext* context) const;

 private:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

  ort::Api api_;
  std::string node_;  // how messages name it
  Attributes attributes_;
  AllocatorPtr allocator_;
  const Variant& variant_;
  bool products_may_round_;
  bool constant_mask_checked_ = false;
};

}  // namespace flash_attention_score
}  // namespace fa
