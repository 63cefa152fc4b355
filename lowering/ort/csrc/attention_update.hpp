// The operator AttentionUpdate as a kernel of ONNX Runtime.
#pragma once

#include "op.hpp"
#include "types.hpp"

namespace fa::attention_update {

class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info);
  void compute(ort::KernelContext* context) const;

 private:
  [[noreturn]] void refuse(int constraint, const std::string& text) const;

  ort::Api api_;
  std::string node_;
  int64_t ranks_ = 0;
  bool merges_levels_ = false;  // update_type 1
};

}  // namespace fa::attention_update
