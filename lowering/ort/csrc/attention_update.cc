#include <cmath>
#include <limits>

#include "op.hpp"
#include "reference.hpp"
#include "types.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace attention_update {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The lse of a row in one rank. A rank without keys for the row has +inf; it has no weight, like -inf.
float lse_of(const Tensor& lse, int64_t row) {
  const float value = static_cast<const float*>(lse.data)[row];
  return value == kInfinity ? -kInfinity : value;
}

}  // namespace

// Merges the results of `sp` ranks: output = sum over i of softmax(lse)_i go_i, lse_m = ln(sum over i of exp(lse_i)).
class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  [[noreturn]] void refuse(Rule rule, const std::string& text) const;

  ort::Api api_;
  std::string node_;
  int64_t ranks_ = 0;
  bool writes_lse_ = false;  // update_type 1
};

Kernel::Kernel(ort::Api api, const NodeInfo& node) : api_(api), node_(node.title()) {
  const int64_t type = node.get(attr::update_type);
  if (type != 0 && type != 1) refuse(rule::update_type, "update_type is " + std::to_string(type) + ", expected 0 or 1");
  writes_lse_ = type == 1;
  ranks_ = node.get(attr::sp);
  if (ranks_ < 1 || ranks_ > 16) refuse(rule::counts, "sp is " + std::to_string(ranks_) + ", expected 1 to 16");
  for (size_t input : {input_lse, input_go}) {
    const int64_t count = node.get(input == input_lse ? attr::lse_count : attr::go_count);
    if (count == ranks_) continue;
    refuse(rule::counts, std::string(kInputs[input]) + " is a list of " + std::to_string(count) + ", expected " +
                             std::to_string(ranks_) + " (sp)");
  }
}

void Kernel::refuse(Rule rule, const std::string& text) const { fa::refuse(node_, rule, text); }

void Kernel::compute(ort::KernelContext* context) const {
  const std::vector<Tensor> all = tensors_of(api_, context);
  const size_t ranks = static_cast<size_t>(ranks_);
  if (all.size() < 2 * ranks) refuse(rule::counts, "a tensor of lse or go is absent");
  const Tensor* lse = all.data();
  const Tensor* go = lse + ranks;
  if (lse->rank() != 1 || go->rank() != 2 || lse->dims[0] != go->dims[0]) {
    refuse(rule::shapes, "go has the shape " + text_of(go->dims) + " beside lse of " + text_of(lse->dims) +
                             ", expected [rows,D] and [rows]");
  }
  for (size_t i = 0; i < ranks; ++i) {
    if (lse[i].type != E::float32) refuse(rule::types, "a tensor of lse is not float32");
    if (go[i].type != go->type) refuse(rule::types, "the tensors of go differ in type");
    if (lse[i].dims != lse->dims || go[i].dims != go->dims) {
      refuse(rule::shapes, "tensors of lse or go differ in shape");
    }
  }
  const int64_t rows = go->dims[0];
  const int64_t size = go->dims[1];
  const Type type = type_of(go->type);
  void* out = output_of(api_, context, output_output, go->dims);
  auto* merged_lse = static_cast<float*>(output_of(api_, context, output_lse_m, writes_lse_ ? lse->dims : Dims{0}));
  std::vector<float> weights(ranks);
  for (int64_t row = 0; row < rows; ++row) {
    float max = -kInfinity;
    for (size_t i = 0; i < ranks; ++i) max = static_cast<float>(reference::maximum(max, lse_of(lse[i], row)));
    double sum = 0;
    for (size_t i = 0; i < ranks; ++i) {
      weights[i] = max == -kInfinity ? 0.0f : std::exp(lse_of(lse[i], row) - max);
      sum += weights[i];
    }
    if (merged_lse != nullptr && writes_lse_) merged_lse[row] = max + static_cast<float>(std::log(sum));
    for (int64_t d = 0; d < size; ++d) {
      double result = 0;
      for (size_t i = 0; i < ranks; ++i) {
        if (weights[i] != 0) result += weights[i] / sum * reference::read(go[i].data, row * size + d, type);
      }
      reference::write(out, row * size + d, static_cast<float>(result), type);
    }
  }
}

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo*, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, node);
}

}  // namespace attention_update
}  // namespace fa
