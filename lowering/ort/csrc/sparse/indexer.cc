// LightningIndexer, its gradient, and the indexer's loss. The attributes and inputs of a node become a problem for the
// kernels.
#include <limits>
#include <string>

#include "kernel.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace {

// The tensors of the index scores. Checks the shapes of key and weights.
sparse::Index index_of(const sparse::Checks& checks, const sparse::SparseCall& call, const Tensor& query,
                       const Tensor& key, const Tensor& weights, const char* weights_name, Rule rule) {
  const int64_t heads = query.dims[query.rank() - 2];
  checks.shape(rule, weights_name, weights, call.of_query({heads}));
  if (call.key_heads() != 1) {
    checks.fail(checks.rules().heads, "input key has " + std::to_string(call.key_heads()) + " heads, expected 1");
  }
  sparse::Index index;
  index.batch = call.batch();
  index.query = call.rows(query, {});
  index.key = call.rows(key, {});
  index.weights = weights.data;
  index.weight_type = type_of(weights.type);
  return index;
}

}  // namespace

namespace lightning_indexer {
namespace {

constexpr sparse::Rules kRules = {.layout = rule::layouts,
                                  .heads = rule::sizes,
                                  .sizes = rule::sizes,
                                  .lengths = rule::lengths,
                                  .paging = rule::lengths,
                                  .mode = rule::mode};

class Kernel final : public sparse::Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
      : sparse::Kernel(api, info, node, kRules),
        count_(node.get(attr::sparse_count)),
        values_(node.get(attr::return_values)),
        nan_first_(node.get(attr::cpu_nan_scores) == "first") {
    layout_ = layout_of(checks_, node, attr::layout_query, attr::layout_key);
    layout_.has_lengths = true;
    read_mode(checks_, node, attr::sparse_mode, false, layout_);
    check_windows(checks_, node, {attr::pre_tokens, attr::next_tokens});
    if (count_ <= 0) {
      checks_.fail(rule::count, "attribute sparse_count is " + std::to_string(count_) + ", expected 1 or more");
    }
    if (const std::string order = node.get(attr::cpu_nan_scores); !nan_first_ && !order.empty()) {
      checks_.fail(rule::count, "attribute cpu_nan_scores is \"" + order + "\", expected one of \"\", \"first\"");
    }
    if (values_ && layout_.key == "PA_BSND") {
      checks_.fail(rule::values, "attribute return_values is set with PA_BSND, expected it unset");
    }
  }

  void compute(ort::KernelContext* context) const override {
    const std::vector<Tensor> inputs = tensors_of(api_, context, kInputCount);
    const Tensor &query = inputs[input_query], &key = inputs[input_key];
    const sparse::SparseCall call(checks_, layout_,
                                  {query, key, inputs[input_actual_seq_lengths_query],
                                   inputs[input_actual_seq_lengths_key], &inputs[input_block_table]});
    sparse::Selection s;
    s.index = index_of(checks_, call, query, key, inputs[input_weights], "weights", rule::sizes);
    s.count = count_;
    s.nan_first = nan_first_;
    const Dims dims = call.of_query({1, count_});
    s.indices = static_cast<int32_t*>(output(context, output_sparse_indices, dims));
    s.values = output(context, output_sparse_values, values_ ? dims : Dims{0});
    if (!values_) s.values = nullptr;
    if (s.indices == nullptr && s.values == nullptr) return;
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
    if (s.index.batch.rows == 0) return;
    run(context, &sparse::Kernels::select, s);
  }

 private:
  int64_t count_;
  bool values_, nan_first_;
};

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace lightning_indexer

namespace lightning_indexer_grad {
namespace {

constexpr sparse::Rules kRules = {.layout = rule::layout,
                                  .heads = rule::heads,
                                  .sizes = rule::head_size,
                                  .lengths = rule::lengths,
                                  .mode = rule::sparseMode,
                                  .indices = rule::selected};

class Kernel final : public sparse::Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
      : sparse::Kernel(api, info, node, kRules), heads_(node.get(attr::headNum)) {
    layout_ = layout_of(checks_, node, attr::layout, attr::layout);
    read_mode(checks_, node, attr::sparseMode, false, layout_);
  }

  void compute(ort::KernelContext* context) const override {
    const std::vector<Tensor> inputs = tensors_of(api_, context, kInputCount);
    const Tensor &query = inputs[input_query], &key = inputs[input_key], &weights = inputs[input_weights];
    const sparse::SparseCall call(
        checks_, layout_,
        {query, key, inputs[input_actual_seq_lengths_query], inputs[input_actual_seq_lengths_key]});
    checks_.one_of(rule::heads, attr::headNum.name, heads_, {call.heads()});
    for (size_t input : {input_actual_seq_lengths_query, input_actual_seq_lengths_key}) {
      if (layout_.query != "TND" && inputs[input].present()) {
        const char* name = input == input_actual_seq_lengths_key ? "actual_seq_lengths_key" : "actual_seq_lengths_query";
        checks_.fail(rule::lengths, std::string("input ") + name + " is given although layout is " + layout_.query +
                                        ", expected none");
      }
    }
    sparse::IndexGradient g;
    g.index = index_of(checks_, call, query, key, weights, "weights", rule::heads);
    g.lists = call.lists(inputs[input_sparse_indices], 1, false, false);
    checks_.shape(rule::selected, "dy", inputs[input_dy], call.of_query({g.lists.count}));
    call.check_entries(g.lists);
    g.scores = inputs[input_dy].data;
    const Type type = g.index.query.type;
    const bool no_rows = g.index.batch.rows == 0;
    g.query = output(context, output_dq, query.dims, type, call.has_gaps());
    g.key = output(context, output_dk, key.dims, type, no_rows);
    g.weights = output(context, output_dweights, weights.dims, type, call.has_gaps());
    if (!no_rows) run(context, &sparse::Kernels::index_gradient, g);
  }

 private:
  int64_t heads_;
};

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace lightning_indexer_grad

namespace sparse_lightning_indexer_grad_kl_loss {
namespace {

constexpr sparse::Rules kRules = {.layout = rule::layout,
                                  .heads = rule::key_heads,
                                  .sizes = rule::head_sizes,
                                  .rope = rule::head_sizes,
                                  .lengths = rule::sequences,
                                  .mode = rule::mode,
                                  .indices = rule::selected,
                                  .statistics = rule::statistics};

class Kernel final : public sparse::Kernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
      : sparse::Kernel(api, info, node, kRules),
        scale_(node.get(attr::scale_value)),
        floor_(node.get(attr::cpu_loss_floor)) {
    layout_ = layout_of(checks_, node, attr::layout, attr::layout);
    read_mode(checks_, node, attr::sparse_mode, true, layout_);
    if (!(floor_ >= 0)) {
      checks_.fail(rule::mode, "attribute cpu_loss_floor is " + std::to_string(floor_) + ", expected 0 or more");
    }
  }

  void compute(ort::KernelContext* context) const override {
    const std::vector<Tensor> inputs = tensors_of(api_, context, kInputCount);
    const Tensor &query = inputs[input_query], &key = inputs[input_key], &weight = inputs[input_weight];
    const Tensor &query_index = inputs[input_query_index], &key_index = inputs[input_key_index];
    const sparse::SparseCall call(
        checks_, layout_,
        {query, key, inputs[input_actual_seq_lengths_query], inputs[input_actual_seq_lengths_key]});
    checks_.shape(rule::head_sizes, "query_index", query_index, call.of_query({-1, -1}));
    checks_.shape(rule::head_sizes, "key_index", key_index, call.of_key({1, query_index.dims.back()}));
    sparse::Attention a = call.attention(query, inputs[input_query_rope], key, inputs[input_key_rope], scale_);
    a.sinks = call.sinks(rule::heads, inputs[input_sinks]);
    call.add_statistics(a, inputs[input_softmax_max], inputs[input_softmax_sum]);
    sparse::IndexGradient g;
    g.index = index_of(checks_, call, query_index, key_index, weight, "weight", rule::index_heads);
    g.lists = call.lists(inputs[input_sparse_indices], 1, false, false);
    if (layout_.query == "TND") check_ends(g.index.batch, query.dims[0], key.dims[0]);
    for (int64_t s = 0; s < g.index.batch.count; ++s) {
      const sparse::Sequence& sequence = g.index.batch.sequences[s];
      if (sequence.queries > sequence.keys) {
        checks_.fail(rule::sequences, "a sequence has " + std::to_string(sequence.queries) + " queries and " +
                                          std::to_string(sequence.keys) + " keys, expected at least as many keys");
      }
    }
    call.check_entries(g.lists);
    g.attention = &a;
    g.floor = floor_;
    const Type type = g.index.query.type;
    const bool no_rows = a.batch.rows == 0;
    g.query = output(context, output_d_query_index, query_index.dims, type, call.has_gaps());
    g.key = output(context, output_d_key_index, key_index.dims, type, no_rows);
    g.weights = output(context, output_d_weight, weight.dims, g.index.weight_type, call.has_gaps());
    g.loss = static_cast<float*>(output(context, output_loss, {1}, Type::float32, true));
    if (!no_rows) run(context, &sparse::Kernels::index_gradient, g);
  }

 private:
  // Checks that the sequences of TND contain all tokens.
  void check_ends(const sparse::Batch& batch, int64_t queries, int64_t keys) const {
    const sparse::Sequence last = batch.count == 0 ? sparse::Sequence() : batch.sequences[batch.count - 1];
    const int64_t query_end = last.query + last.queries, key_end = last.key + last.keys;
    if (query_end == queries && key_end == keys) return;
    checks_.fail(rule::sequences, "the last sequence ends at query " + std::to_string(query_end) + " and key " +
                                      std::to_string(key_end) + ", expected " + std::to_string(queries) + " and " +
                                      std::to_string(keys) + ", the tokens of their tensors");
  }

  float scale_, floor_;
};

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace sparse_lightning_indexer_grad_kl_loss
}  // namespace fa
