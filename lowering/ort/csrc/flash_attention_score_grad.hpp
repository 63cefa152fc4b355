// The operator FlashAttentionScoreGrad as a kernel of ONNX Runtime.
#pragma once

#include "call/attributes.hpp"
#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {

class Call;
class CallInputs;

namespace flash_attention_score_grad {

class Kernel {
 public:
  // Throws an Error naming what the kernel does not take.
  Kernel(ort::Api api, const ort::KernelInfo* info);

  // Re-entrant: ONNX Runtime calls one kernel from several threads.
  void compute(ort::KernelContext* context) const;

 private:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

  void check_forward_results(const CallInputs& inputs, const Call& call) const;
  void check_statistics(const CallInputs& inputs, const Call& call) const;
  void* cleared_output(ort::KernelContext* context, size_t index, const Dims& dims, size_t element, bool clear) const;

  ort::Api api_;
  std::string node_;  // how messages name it
  Attributes attributes_;
  AllocatorPtr allocator_;
  const Variant& variant_;
  bool constant_mask_checked_ = false;
};

}  // namespace flash_attention_score_grad
}  // namespace fa
