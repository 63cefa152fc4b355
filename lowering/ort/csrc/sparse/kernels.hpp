// The operators of the sparse family as kernels of ONNX Runtime. Each is made from its node (and throws an Error naming
// what it does not take) and computes re-entrantly: ONNX Runtime calls one kernel from several threads.
#pragma once

#include "../types.hpp"
#include "../variants.hpp"
#include "call.hpp"

namespace fa {

namespace sparse {

// What all of them keep.
struct Node {
  Node(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, const Rules& rules);

  void* output(ort::KernelContext* context, size_t index, const Dims& dims) const;
  // The same, all zero if `clear`.
  void* output(ort::KernelContext* context, size_t index, const Dims& dims, size_t element, bool clear) const;

  ort::Api api;
  Checks checks;
  AllocatorPtr allocator;
  const Variant& variant;
  Layout layout;
};

}  // namespace sparse

namespace sparse_flash_attention {
class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info);
  void compute(ort::KernelContext* context) const;

 private:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

  sparse::Node node_;
  float scale_;
  int64_t block_;
  bool statistics_;
  EmptyRows empty_rows_ = EmptyRows::zero;
};
}  // namespace sparse_flash_attention

namespace sparse_flash_attention_grad {
class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info);
  void compute(ort::KernelContext* context) const;

 private:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

  sparse::Node node_;
  float scale_;
  int64_t block_;
};
}  // namespace sparse_flash_attention_grad

namespace lightning_indexer {
class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info);
  void compute(ort::KernelContext* context) const;

 private:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

  sparse::Node node_;
  int64_t count_;
  bool values_;
};
}  // namespace lightning_indexer

namespace lightning_indexer_grad {
class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info);
  void compute(ort::KernelContext* context) const;

 private:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

  sparse::Node node_;
  int64_t heads_;
};
}  // namespace lightning_indexer_grad

namespace sparse_lightning_indexer_grad_kl_loss {
class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info);
  void compute(ort::KernelContext* context) const;

 private:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

  sparse::Node node_;
  float scale_;
};
}  // namespace sparse_lightning_indexer_grad_kl_loss

}  // namespace fa
