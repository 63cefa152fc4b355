// The operator FlashAttentionScore: from a node's attributes and tensors to a checked Problem.
#pragma once

#include "op.hpp"
#include "variants.hpp"

namespace fa {

struct Types {
  ort::Element inputs[24];
  ort::Element outputs[4];
};

namespace flash_attention_score {

enum class Layout { BSH, SBH, BSND, BNSD, TND };

struct Attributes {
  float scale = 1.0f;
  int64_t pre_tokens = 0;
  int64_t next_tokens = 0;
  int64_t head_num = 0;
  Layout layout = Layout::BSH;
  int64_t sparse_mode = 0;
  int64_t pse_type = 1;
  bool statistics_like_input = false;  // softmax_out_layout "same_as_input"
  EmptyRows empty_rows = EmptyRows::zero;
  NanRows nan_rows = NanRows::nan;
};

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
  bool constant_mask_checked_ = false;
};

}  // namespace flash_attention_score
}  // namespace fa
