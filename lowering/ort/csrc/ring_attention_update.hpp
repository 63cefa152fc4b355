// The operator RingAttentionUpdate as a kernel of ONNX Runtime.
#pragma once

#include "op.hpp"
#include "types.hpp"

namespace fa::ring_attention_update {

class Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info);
  void compute(ort::KernelContext* context) const;

 private:
  struct Operands;

  [[noreturn]] void refuse(int constraint, const std::string& text) const;
  void check_shapes(const std::vector<Tensor>& all) const;
  static void merge(const Operands& o, int64_t from, int64_t statistic, int64_t size);

  ort::Api api_;
  std::string node_;
  bool packed_ = false;      // TND
  bool true_order_ = false;  // statistics of TND as [T,N,8]
};

}  // namespace fa::ring_attention_update
