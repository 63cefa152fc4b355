// SparseFlashAttention and SparseFlashAttentionGrad: attributes and inputs of a node become a problem for the kernels.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace sparse {

Node::Node(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, const Rules& rules)
    : api(api), checks(node.title(), rules), allocator(allocator_of(api, info)), variant(chosen_variant()) {}

void* Node::output(ort::KernelContext* context, size_t index, const Dims& dims) const {
  return output_of(api, context, index, dims);
}

void* Node::output(ort::KernelContext* context, size_t index, const Dims& dims, size_t element, bool clear) const {
  void* data = output_of(api, context, index, dims);
  if (data != nullptr && clear) std::memset(data, 0, bytes_of(dims, element));
  return data;
}

}  // namespace sparse

namespace sparse_flash_attention {
namespace {

constexpr sparse::Rules kRules = {"SFA", 2, 3, 4, 6, 10, 11, 7, 9, 13};

EmptyRows empty_rows_of(const sparse::Checks& checks, const std::string& value) {
  if (value.empty() || value == "zero") return EmptyRows::zero;
  if (value == "mean") return EmptyRows::mean;
  if (value == "nan") return EmptyRows::nan;
  checks.fail(9, "attribute cpu_empty_rows is \"" + value + "\", expected one of \"\", \"zero\", \"mean\", \"nan\"");
}

sparse::Layout layout_of(const sparse::Checks& checks, const NodeInfo& node) {
  sparse::Layout layout;
  layout.query = node.string("layout_query", "BSND");
  layout.key = node.string("layout_kv", "BSND");
  layout.causal = node.integer("sparse_mode", 3) == 3;
  layout.counted = true;
  if (layout.query != "BSND" && layout.query != "TND") {
    checks.fail(2, "attribute layout_query is \"" + layout.query + "\", expected one of BSND, TND");
  }
  if (layout.key != layout.query && layout.key != "PA_BSND") {
    checks.fail(2, "attribute layout_kv is \"" + layout.key + "\", expected " + layout.query + " or PA_BSND");
  }
  return layout;
}

}  // namespace

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info) : Kernel(api, info, NodeInfo(api, info, kName)) {}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : node_(api, info, node, kRules), scale_(node.number("scale_value", 1.0f)),
      block_(node.integer("sparse_block_size", 1)), statistics_(node.integer("return_softmax_lse", 0) != 0),
      empty_rows_(empty_rows_of(node_.checks, node.string("cpu_empty_rows", ""))) {
  node_.layout = layout_of(node_.checks, node);
  node_.checks.one_of(5, "attention_mode", node.integer("attention_mode", 0), {2});
  check_mode(node_.checks, node, "sparse_mode", false, std::numeric_limits<int64_t>::max());
  if (block_ <= 0) node_.checks.fail(8, "attribute sparse_block_size is " + std::to_string(block_) + ", expected 1 or more");
  if (statistics_ && node_.layout.key == "PA_BSND") {
    node_.checks.fail(13, "attribute return_softmax_lse is set with PA_BSND, expected it unset");
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  const sparse::Inputs inputs(node_.api, context);
  const Tensor &query = inputs[input_query], &key = inputs[input_key], &value = inputs[input_value];
  const Tensor &sinks = inputs[input_sinks], &table = inputs[input_block_table];
  const sparse::SparseCall call(node_.checks, node_.layout,
                                {query, key, inputs[input_actual_seq_lengths_query],
                                 inputs[input_actual_seq_lengths_kv], &table});
  if (table.present() && node_.layout.key != "PA_BSND") {
    node_.checks.fail(11, "input block_table is given although layout_kv is " + node_.layout.key + ", expected none");
  }
  node_.checks.shape(4, "value", value, call.of_key({call.key_heads(), -1}));
  call.check_rope(inputs[input_query_rope], inputs[input_key_rope]);
  if (sinks.present()) node_.checks.shape(14, "sinks", sinks, {call.heads()});
  sparse::Attention a;
  a.batch = call.batch();
  a.lists = call.lists(inputs[input_sparse_indices], block_, true, true);
  a.query = call.rows(query, inputs[input_query_rope]);
  a.key = call.rows(key, inputs[input_key_rope]);
  a.value = call.rows(value, {});
  a.scale = scale_;
  a.sinks = static_cast<const float*>(sinks.data);
  a.empty_rows = empty_rows_;
  a.statistics_head = call.statistics_head();
  const Dims out_dims = call.of_query({call.heads(), value.dims.back()});
  const Dims statistics = statistics_ ? call.statistics_dims() : Dims{0};
  a.out = node_.output(context, output_attention_out, out_dims, sparse::size_of(a.query.type), call.has_gaps());
  auto* max = static_cast<float*>(node_.output(context, output_softmax_max, statistics));
  auto* sum = static_cast<float*>(node_.output(context, output_softmax_sum, statistics));
  if (statistics_) {
    a.softmax_max = max;
    a.softmax_sum = sum;
  }
  if (statistics_ && call.has_gaps()) {
    const int64_t group = a.group(), count = call.tokens() * call.heads();
    for (int64_t i = 0; i < count; ++i) {
      // [..., key head, rows, group]: the query head of an element.
      const int64_t head = i / a.statistics_head % call.key_heads() * group + i % group;
      if (max != nullptr) max[i] = a.sinks != nullptr ? a.sinks[head] : sparse::kEmptyMax;
      if (sum != nullptr) sum[i] = a.sinks != nullptr ? 1.0f : 0.0f;
    }
  }
  const bool unread = a.out == nullptr && a.softmax_max == nullptr && a.softmax_sum == nullptr;
  if (unread || a.batch.rows == 0) return;
  CallRuntime runtime(node_.api, context, node_.allocator.get());
  sparse::finish(node_.checks, runtime, node_.variant.sparse->attention(a, runtime.runtime()));
}

}  // namespace sparse_flash_attention

namespace sparse_flash_attention_grad {
namespace {

constexpr sparse::Rules kRules = {"SFAG", 2, 3, 4, 4, 8, 0, 7, 5, 9};

}  // namespace

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info) : Kernel(api, info, NodeInfo(api, info, kName)) {}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : node_(api, info, node, kRules), scale_(node.number("scale_value", 1.0f)),
      block_(node.integer("sparse_block_size", 1)) {
  node_.layout.query = node_.layout.key = node.string("layout", "BSND");
  node_.layout.causal = node.integer("sparse_mode", 3) == 3;
  if (node_.layout.query != "BSND" && node_.layout.query != "TND") {
    node_.checks.fail(2, "attribute layout is \"" + node_.layout.query + "\", expected one of BSND, TND");
  }
  check_mode(node_.checks, node, "sparse_mode", false, std::numeric_limits<int32_t>::max());
  if (block_ <= 0) node_.checks.fail(6, "attribute sparse_block_size is " + std::to_string(block_) + ", expected 1 or more");
}

void Kernel::compute(ort::KernelContext* context) const {
  const sparse::Inputs inputs(node_.api, context);
  const Tensor &query = inputs[input_query], &key = inputs[input_key], &value = inputs[input_value];
  const Tensor &query_rope = inputs[input_query_rope], &key_rope = inputs[input_key_rope];
  const sparse::SparseCall call(
      node_.checks, node_.layout,
      {query, key, inputs[input_actual_seq_lengths_query], inputs[input_actual_seq_lengths_kv]});
  node_.checks.shape(4, "value", value, call.of_key({call.key_heads(), -1}));
  call.check_rope(query_rope, key_rope);
  const Dims out_dims = call.of_query({call.heads(), value.dims.back()});
  node_.checks.shape(4, "d_out", inputs[input_d_out], out_dims);
  node_.checks.shape(4, "out", inputs[input_out], out_dims);
  node_.checks.shape(9, "softmax_max", inputs[input_softmax_max], call.statistics_dims());
  node_.checks.shape(9, "softmax_sum", inputs[input_softmax_sum], call.statistics_dims());
  sparse::Gradient g;
  sparse::Attention& a = g.attention;
  a.batch = call.batch();
  a.lists = call.lists(inputs[input_sparse_indices], block_, true, false);
  a.query = call.rows(query, query_rope);
  a.key = call.rows(key, key_rope);
  a.value = call.rows(value, {});
  a.scale = scale_;
  a.softmax_max = static_cast<float*>(inputs[input_softmax_max].data);
  a.softmax_sum = static_cast<float*>(inputs[input_softmax_sum].data);
  a.statistics_head = call.statistics_head();
  g.d_out = call.rows(inputs[input_d_out], {});
  g.out = call.rows(inputs[input_out], {});
  const size_t element = sparse::size_of(a.query.type);
  const bool nothing = a.batch.rows == 0;
  const auto like = [&](size_t output, const Tensor& tensor, bool clear) {
    return node_.output(context, output, tensor.present() ? tensor.dims : Dims{0}, element, clear);
  };
  g.query = like(output_d_query, query, call.has_gaps());
  g.query_rope = like(output_d_query_rope, query_rope, call.has_gaps());
  g.key = like(output_d_key, key, nothing);
  g.key_rope = like(output_d_key_rope, key_rope, nothing);
  g.value = like(output_d_value, value, nothing);
  if (!query_rope.present()) g.query_rope = g.key_rope = nullptr;
  if (nothing) return;
  CallRuntime runtime(node_.api, context, node_.allocator.get());
  sparse::finish(node_.checks, runtime, node_.variant.sparse->gradient(g, runtime.runtime()));
}

}  // namespace sparse_flash_attention_grad
}  // namespace fa
