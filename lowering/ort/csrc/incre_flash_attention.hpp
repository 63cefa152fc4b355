// The operator IncreFlashAttention as a kernel of ONNX Runtime.
#pragma once

#include "decode/attributes.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa::incre_flash_attention {

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
};

}  // namespace fa::incre_flash_attention
