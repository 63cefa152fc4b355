// SparseFlashAttention and SparseFlashAttentionGrad. The attributes and inputs of a node become a problem for the
// kernels.
#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "kernel.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace {

int64_t block_size_of(const sparse::Checks& checks, Rule rule, int64_t block) {
  if (block <= 0) checks.fail(rule, "attribute sparse_block_size is " + std::to_string(block) + ", expected 1 or more");
  return block;
}

}  // namespace

namespace sparse_flash_attention {
namespace {

constexpr sparse::Rules kRules = {.layout = rule::layouts,
                                  .heads = rule::heads,
                                  .sizes = rule::head_sizes,
                                  .rope = rule::rope,
                                  .lengths = rule::lengths,
                                  .paging = rule::block_table,
                                  .mode = rule::mode,
                                  .indices = rule::indices,
                                  .statistics = rule::statistics};

EmptyRows empty_rows_of(const sparse::Checks& checks, const std::string& value) {
  if (value.empty() || value == "zero") return EmptyRows::zero;
  if (value == "mean") return EmptyRows::mean;
  if (value == "nan") return EmptyRows::nan;
  checks.fail(rule::indices,
              "attribute cpu_empty_rows is \"" + value + "\", expected one of \"\", \"zero\", \"mean\", \"nan\"");
}

class Kernel final : public sparse::Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
      : sparse::Kernel(api, info, node, kRules),
        scale_(node.get(attr::scale_value)),
        block_(block_size_of(checks_, rule::block_size, node.get(attr::sparse_block_size))),
        statistics_(node.get(attr::return_softmax_lse)),
        empty_rows_(empty_rows_of(checks_, node.get(attr::cpu_empty_rows))) {
    layout_ = layout_of(checks_, node, attr::layout_query, attr::layout_kv);
    layout_.has_lengths = true;
    checks_.one_of(rule::attention_mode, attr::attention_mode.name, node.get(attr::attention_mode), {2});
    read_mode(checks_, node, attr::sparse_mode, false, layout_);
    check_windows(checks_, node, {attr::pre_tokens, attr::next_tokens});
    if (statistics_ && layout_.key == "PA_BSND") {
      checks_.fail(rule::statistics, "attribute return_softmax_lse is set with PA_BSND, expected it unset");
    }
  }

  void compute(ort::KernelContext* context) const override {
    const std::vector<Tensor> inputs = tensors_of(api_, context, kInputCount);
    const Tensor &query = inputs[input_query], &key = inputs[input_key], &value = inputs[input_value];
    const sparse::SparseCall call(checks_, layout_,
                                  {query, key, inputs[input_actual_seq_lengths_query],
                                   inputs[input_actual_seq_lengths_kv], &inputs[input_block_table]});
    checks_.shape(rule::head_sizes, "value", value, call.of_key({call.key_heads(), -1}));
    sparse::Attention a = call.attention(query, inputs[input_query_rope], key, inputs[input_key_rope], scale_);
    a.lists = call.lists(inputs[input_sparse_indices], block_, true, true);
    a.value = call.rows(value, {});
    a.sinks = call.sinks(rule::not_empty, inputs[input_sinks]);
    a.empty_rows = empty_rows_;
    const Dims out_dims = call.of_query({call.heads(), value.dims.back()});
    const Dims statistics = statistics_ ? call.statistics_dims() : Dims{0};
    a.out = output(context, output_attention_out, out_dims, a.query.type, call.has_gaps());
    auto* max = static_cast<float*>(output(context, output_softmax_max, statistics));
    auto* sum = static_cast<float*>(output(context, output_softmax_sum, statistics));
    if (statistics_) {
      a.softmax_max = max;
      a.softmax_sum = sum;
    }
    if (statistics_ && call.has_gaps()) {
      const int64_t group = a.group(), count = call.tokens() * call.heads();
      for (int64_t i = 0; i < count; ++i) {
        // The query head of element i of the statistics [..., key head, rows, group].
        const int64_t head = i / a.statistics_head % call.key_heads() * group + i % group;
        if (max != nullptr) max[i] = a.sinks != nullptr ? a.sinks[head] : sparse::kEmptyMax;
        if (sum != nullptr) sum[i] = a.sinks != nullptr ? 1.0f : 0.0f;
      }
    }
    const bool unread = a.out == nullptr && a.softmax_max == nullptr && a.softmax_sum == nullptr;
    if (!unread && a.batch.rows > 0) run(context, &sparse::Kernels::attention, a);
  }

 private:
  float scale_;
  int64_t block_;
  bool statistics_;
  EmptyRows empty_rows_;
};

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace sparse_flash_attention

// SparseFlashAttentionGrad has two variants. The one of 2026 has the inputs and outputs of the older one and more, in
// another order. One kernel runs both.
namespace sparse_flash_attention_grad_opdef_2026_reordered {
namespace {

namespace older = sparse_flash_attention_grad;

constexpr sparse::Rules kRules = {.layout = rule::layout,
                                  .heads = rule::heads,
                                  .sizes = rule::head_sizes,
                                  .rope = rule::head_sizes,
                                  .lengths = rule::lengths,
                                  .mode = rule::mode,
                                  .indices = rule::selected,
                                  .statistics = rule::statistics};

// The position of each input of the 2026 variant in the older one, or the number of the older inputs if it is not
// there.
constexpr auto kOlderPositions = [] {
  std::array<size_t, std::size(kInputs)> positions{};
  for (size_t i = 0; i < positions.size(); ++i) {
    const auto same = [i](const char* name) { return std::string_view(name) == kInputs[i]; };
    positions[i] = static_cast<size_t>(std::find_if(std::begin(older::kInputs), std::end(older::kInputs), same) -
                                       std::begin(older::kInputs));
  }
  return positions;
}();

class Kernel final : public sparse::Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, bool reordered)
      : sparse::Kernel(api, info, node, kRules),
        scale_(node.get(attr::scale_value)),
        block_(block_size_of(checks_, rule::block_size, node.get(attr::sparse_block_size))),
        reordered_(reordered) {
    layout_ = layout_of(checks_, node, attr::layout, attr::layout);
    read_mode(checks_, node, attr::sparse_mode, false, layout_);
    check_windows(checks_, node, {attr::pre_tokens, attr::next_tokens});
  }

  void compute(ort::KernelContext* context) const override {
    const std::vector<Tensor> inputs = inputs_of(context);
    const Tensor &query = inputs[input_query], &key = inputs[input_key], &value = inputs[input_value];
    const Tensor &query_rope = inputs[input_query_rope], &key_rope = inputs[input_key_rope];
    const Tensor& sinks = inputs[input_sinks];
    const sparse::SparseCall call(
        checks_, layout_,
        {query, key, inputs[input_actual_seq_lengths_query], inputs[input_actual_seq_lengths_kv]});
    if (value.present() || !reordered_) {
      checks_.shape(rule::head_sizes, "value", value, call.of_key({call.key_heads(), -1}));
    }
    const Dims out_dims = call.of_query({call.heads(), (value.present() ? value : key).dims.back()});
    checks_.shape(rule::head_sizes, "d_out", inputs[input_d_out], out_dims);
    checks_.shape(rule::head_sizes, "out", inputs[input_out], out_dims);
    sparse::Gradient g;
    sparse::Attention& a = g.attention;
    a = call.attention(query, query_rope, key, key_rope, scale_);
    a.lists = call.lists(inputs[input_sparse_indices], block_, true, false);
    a.value = call.rows(value.present() ? value : key, {});
    a.sinks = call.sinks(rule::heads, sinks);
    call.add_statistics(a, inputs[input_softmax_max], inputs[input_softmax_sum]);
    g.d_out = call.rows(inputs[input_d_out], {});
    g.out = call.rows(inputs[input_out], {});
    g.merged = !value.present();
    const bool no_rows = a.batch.rows == 0;
    const auto like = [&](size_t output, const Tensor& tensor, Type type, bool clear) {
      void* data = this->output(context, output, tensor.present() ? tensor.dims : Dims{0}, type, clear);
      return tensor.present() ? data : nullptr;
    };
    g.query = like(output_d_query, query, a.query.type, call.has_gaps());
    g.query_rope = like(output_d_query_rope, query_rope, a.query.type, call.has_gaps());
    g.key = like(output_d_key, key, a.query.type, no_rows);
    g.key_rope = like(output_d_key_rope, key_rope, a.query.type, no_rows);
    g.value = like(output_d_value, value, a.query.type, no_rows);
    g.sinks = static_cast<float*>(like(output_d_sinks, sinks, Type::float32, no_rows));
    if (!no_rows) run(context, &sparse::Kernels::gradient, g);
  }

 private:
  // The inputs in the order of the 2026 variant.
  std::vector<Tensor> inputs_of(ort::KernelContext* context) const {
    std::vector<Tensor> tensors = tensors_of(api_, context, kInputCount);
    if (reordered_) return tensors;
    std::vector<Tensor> inputs;
    for (size_t position : kOlderPositions) {
      inputs.push_back(position < std::size(older::kInputs) ? tensors[position] : Tensor{});
    }
    return inputs;
  }

  float scale_;
  int64_t block_;
  bool reordered_;
};

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node, true);
}

}  // namespace sparse_flash_attention_grad_opdef_2026_reordered

namespace sparse_flash_attention_grad {

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<sparse_flash_attention_grad_opdef_2026_reordered::Kernel>(api, info, node, false);
}

}  // namespace sparse_flash_attention_grad
}  // namespace fa
