// LightningIndexer, its gradient, and the indexer's loss: attributes and inputs of a node become a problem for the
// kernels.
#include <limits>

#include "kernels.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace {

// The index scores' tensors, checked.
sparse::Index index_of(const sparse::Checks& checks, const sparse::SparseCall& call, const Tensor& query,
                       const Tensor& key, const Tensor& weights, const char* weights_name, int rule) {
  const int64_t heads = query.dims[query.rank() - 2];
  checks.shape(rule, weights_name, weights, call.of_query({heads}));
  sparse::Index index;
  index.batch = call.batch();
  index.query = call.rows(query, {});
  index.key = call.rows(key, {});
  index.weights = weights.data;
  index.weight_type = sparse::type_of(weights);
  return index;
}

void check_one_key_head(const sparse::Checks& checks, const char* name, int64_t heads) {
  if (heads == 1) return;
  checks.fail(checks.rules().heads, std::string("input ") + name + " has " + std::to_string(heads) + " heads, expected 1");
}

void check_layout(const sparse::Checks& checks, const std::string& layout) {
  if (layout == "BSND" || layout == "TND") return;
  checks.fail(checks.rules().layout, "attribute layout is \"" + layout + "\", expected one of BSND, TND");
}

}  // namespace

namespace lightning_indexer {
namespace {

constexpr sparse::Rules kRules = {"LI", 3, 2, 2, 2, 7, 7, 5, 4, 6};

}  // namespace

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info) : Kernel(api, info, NodeInfo(api, info, kName)) {}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : node_(api, info, node, kRules), count_(node.integer("sparse_count", 2048)),
      values_(node.integer("return_values", 0) != 0) {
  sparse::Layout& layout = node_.layout;
  layout.query = node.string("layout_query", "BSND");
  layout.key = node.string("layout_key", "BSND");
  layout.causal = node.integer("sparse_mode", 3) == 3;
  layout.counted = true;
  if (layout.query != "BSND" && layout.query != "TND") {
    node_.checks.fail(3, "attribute layout_query is \"" + layout.query + "\", expected one of BSND, TND");
  }
  if (layout.key != layout.query && layout.key != "PA_BSND") {
    node_.checks.fail(3, "attribute layout_key is \"" + layout.key + "\", expected " + layout.query + " or PA_BSND");
  }
  check_mode(node_.checks, node, "sparse_mode", false, std::numeric_limits<int64_t>::max());
  if (count_ <= 0) node_.checks.fail(4, "attribute sparse_count is " + std::to_string(count_) + ", expected 1 or more");
  if (values_ && layout.key == "PA_BSND") {
    node_.checks.fail(6, "attribute return_values is set with PA_BSND, expected it unset");
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  const sparse::Inputs inputs(node_.api, context);
  const Tensor &query = inputs[input_query], &key = inputs[input_key], &table = inputs[input_block_table];
  const sparse::SparseCall call(node_.checks, node_.layout,
                                {query, key, inputs[input_actual_seq_lengths_query],
                                 inputs[input_actual_seq_lengths_key], &table});
  if (table.present() && node_.layout.key != "PA_BSND") {
    node_.checks.fail(7, "input block_table is given although layout_key is " + node_.layout.key + ", expected none");
  }
  check_one_key_head(node_.checks, "key", call.key_heads());
  sparse::Selection s;
  s.index = index_of(node_.checks, call, query, key, inputs[input_weights], "weights", 2);
  s.count = count_;
  const Dims dims = call.of_query({1, count_});
  s.indices = static_cast<int32_t*>(node_.output(context, output_sparse_indices, dims));
  s.values = node_.output(context, output_sparse_values, values_ ? dims : Dims{0});
  if (!values_) s.values = nullptr;
  if (call.has_gaps()) {
    const float none = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < call.tokens() * count_; ++i) {
      if (s.indices != nullptr) s.indices[i] = -1;
      if (s.values == nullptr) continue;
      if (s.index.query.type == Type::float32) static_cast<float*>(s.values)[i] = none;
      if (s.index.query.type == Type::float16) static_cast<uint16_t*>(s.values)[i] = 0xfc00;
      if (s.index.query.type == Type::bfloat16) static_cast<uint16_t*>(s.values)[i] = 0xff80;
    }
  }
  if (s.index.batch.rows == 0 || (s.indices == nullptr && s.values == nullptr)) return;
  CallRuntime runtime(node_.api, context, node_.allocator.get());
  sparse::finish(node_.checks, runtime, node_.variant.sparse->select(s, runtime.runtime()));
}

}  // namespace lightning_indexer

namespace lightning_indexer_grad {
namespace {

constexpr sparse::Rules kRules = {"LIG", 1, 3, 2, 2, 7, 0, 6, 4, 0};

}  // namespace

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info) : Kernel(api, info, NodeInfo(api, info, kName)) {}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : node_(api, info, node, kRules), heads_(node.integer("headNum", 0)) {
  node_.layout.query = node_.layout.key = node.string("layout", "BSND");
  node_.layout.causal = node.integer("sparseMode", 3) == 3;
  check_layout(node_.checks, node_.layout.query);
  check_mode(node_.checks, node, "sparseMode", false, 0);
}

void Kernel::compute(ort::KernelContext* context) const {
  const sparse::Inputs inputs(node_.api, context);
  const Tensor &query = inputs[input_query], &key = inputs[input_key], &weights = inputs[input_weights];
  const sparse::SparseCall call(
      node_.checks, node_.layout,
      {query, key, inputs[input_actual_seq_lengths_query], inputs[input_actual_seq_lengths_key]});
  check_one_key_head(node_.checks, "key", call.key_heads());
  node_.checks.one_of(3, "headNum", heads_, {call.heads()});
  sparse::IndexGradient g;
  g.index = index_of(node_.checks, call, query, key, weights, "weights", 3);
  g.lists = call.lists(inputs[input_sparse_indices], 1, false, false);
  node_.checks.shape(4, "dy", inputs[input_dy], call.of_query({g.lists.count}));
  call.check_entries(g.lists);
  g.scores = inputs[input_dy].data;
  const size_t element = sparse::size_of(g.index.query.type);
  const bool nothing = g.index.batch.rows == 0;
  g.query = node_.output(context, output_dq, query.dims, element, call.has_gaps());
  g.key = node_.output(context, output_dk, key.dims, element, nothing);
  g.weights = node_.output(context, output_dweights, weights.dims, element, call.has_gaps());
  if (nothing) return;
  CallRuntime runtime(node_.api, context, node_.allocator.get());
  sparse::finish(node_.checks, runtime, node_.variant.sparse->index_gradient(g, runtime.runtime()));
}

}  // namespace lightning_indexer_grad

namespace sparse_lightning_indexer_grad_kl_loss {
namespace {

constexpr sparse::Rules kRules = {"KL", 3, 6, 7, 7, 10, 0, 8, 9, 11};

}  // namespace

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info) : Kernel(api, info, NodeInfo(api, info, kName)) {}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : node_(api, info, node, kRules), scale_(node.number("scale_value", 1.0f)) {
  node_.layout.query = node_.layout.key = node.string("layout", "BSND");
  node_.layout.causal = true;
  check_layout(node_.checks, node_.layout.query);
  check_mode(node_.checks, node, "sparse_mode", true, 0);
}

void Kernel::compute(ort::KernelContext* context) const {
  const sparse::Inputs inputs(node_.api, context);
  const Tensor &query = inputs[input_query], &key = inputs[input_key], &weight = inputs[input_weight];
  const Tensor &query_index = inputs[input_query_index], &key_index = inputs[input_key_index];
  if (inputs[input_sinks].present()) node_.checks.fail(1, "input sinks is given, which the CPU kernel does not take");
  const sparse::SparseCall call(
      node_.checks, node_.layout,
      {query, key, inputs[input_actual_seq_lengths_query], inputs[input_actual_seq_lengths_key]});
  check_one_key_head(node_.checks, "key", call.key_heads());
  call.check_rope(inputs[input_query_rope], inputs[input_key_rope]);
  node_.checks.shape(7, "query_index", query_index, call.of_query({-1, -1}));
  node_.checks.shape(7, "key_index", key_index, call.of_key({1, query_index.dims.back()}));
  node_.checks.shape(11, "softmax_max", inputs[input_softmax_max], call.statistics_dims());
  node_.checks.shape(11, "softmax_sum", inputs[input_softmax_sum], call.statistics_dims());
  sparse::IndexGradient g;
  g.index = index_of(node_.checks, call, query_index, key_index, weight, "weight", 5);
  g.lists = call.lists(inputs[input_sparse_indices], 1, false, false);
  for (int64_t s = 0; s < g.index.batch.count; ++s) {
    const sparse::Sequence& sequence = g.index.batch.sequences[s];
    if (sequence.queries > sequence.keys) {
      node_.checks.fail(10, "a sequence has " + std::to_string(sequence.queries) + " queries and " +
                                std::to_string(sequence.keys) + " keys, expected at least as many keys");
    }
  }
  call.check_entries(g.lists);
  sparse::Attention a;
  a.batch = call.batch();
  a.query = call.rows(query, inputs[input_query_rope]);
  a.key = call.rows(key, inputs[input_key_rope]);
  a.scale = scale_;
  a.softmax_max = static_cast<float*>(inputs[input_softmax_max].data);
  a.softmax_sum = static_cast<float*>(inputs[input_softmax_sum].data);
  a.statistics_head = call.statistics_head();
  g.attention = &a;
  const size_t element = sparse::size_of(g.index.query.type);
  const bool nothing = a.batch.rows == 0;
  g.query = node_.output(context, output_d_query_index, query_index.dims, element, call.has_gaps());
  g.key = node_.output(context, output_d_key_index, key_index.dims, element, nothing);
  g.weights = node_.output(context, output_d_weight, weight.dims, sparse::size_of(g.index.weight_type), call.has_gaps());
  g.loss = static_cast<float*>(node_.output(context, output_loss, {1}, sizeof(float), true));
  if (nothing) return;
  CallRuntime runtime(node_.api, context, node_.allocator.get());
  sparse::finish(node_.checks, runtime, node_.variant.sparse->index_gradient(g, runtime.runtime()));
}

}  // namespace sparse_lightning_indexer_grad_kl_loss
}  // namespace fa
