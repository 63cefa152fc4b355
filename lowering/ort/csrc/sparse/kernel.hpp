// The base of the kernels of the sparse family.
#pragma once

#include "../op.hpp"
#include "../types.hpp"
#include "../variants.hpp"
#include "call.hpp"

namespace fa::sparse {

class Kernel : public OpKernel {
 protected:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, const Rules& rules)
      : api_(api), checks_(node.title(), rules), resources_(api, info), variant_(chosen_variant()) {}

  void* output(ort::KernelContext* context, size_t index, const Dims& dims) const {
    return output_of(api_, context, index, dims);
  }
  // The output is set to 0 if `clear`.
  void* output(ort::KernelContext* context, size_t index, const Dims& dims, Type type, bool clear) const {
    return cleared_output(api_, context, index, dims, size_of(type), clear);
  }

  // Runs one of the kernels of the chosen variant.
  template <class Problem>
  void run(ort::KernelContext* context, Outcome (*Kernels::*kernel)(const Problem&, const Runtime&),
           const Problem& problem) const {
    CallRuntime runtime(api_, context, resources_);
    runtime.finish((variant_.sparse->*kernel)(problem, runtime.runtime()), checks_.node());
  }

  ort::Api api_;
  Checks checks_;
  NodeResources resources_;
  const Variant& variant_;
  Layout layout_;
};

}  // namespace fa::sparse
