// The part of a call that all operators of the sparse family read in the same way: layouts, sizes, sequences and pages.
#pragma once

#include "../op.hpp"
#include "problem.hpp"

namespace fa::sparse {

// The numbers of the constraints that all kernels of the family check, by subject.
struct Rules {
  Rule layout = {}, heads = {}, sizes = {}, rope = {}, lengths = {}, paging = {}, mode = {}, indices = {},
       statistics = {};
};

// Checks that throw an error with the node's name and the number of the constraint.
class Checks {
 public:
  Checks(std::string node, const Rules& rules) : node_(std::move(node)), rules_(rules) {}

  const std::string& node() const { return node_; }
  const Rules& rules() const { return rules_; }
  [[noreturn]] void fail(Rule rule, const std::string& text) const;
  // Checks that the tensor is present and has the shape `expected`, in which -1 stands for any size.
  void shape(Rule rule, const char* name, const Tensor& tensor, const Dims& expected) const;
  // Checks the value of an attribute.
  void one_of(Rule rule, const char* name, int64_t value, std::initializer_list<int64_t> allowed) const;

 private:
  std::string node_;
  Rules rules_;
};

inline size_t size_of(Type type) { return type == Type::float32 ? 4 : 2; }

// The tensors from which sizes and sequences of a call are read.
struct SequenceInputs {
  const Tensor& query;
  const Tensor& key;
  const Tensor& query_lengths;
  const Tensor& key_lengths;
  const Tensor* block_table = nullptr;  // null: the operator takes no pages
};

struct Layout {
  std::string query = "BSND";
  std::string key = "BSND";
  const char* key_name = "layout";  // the attribute that holds `key`
  bool causal = false;              // sparse_mode 3
  bool has_lengths = false;         // whether the operator reads lengths in BSND; otherwise all tokens are valid
};

// Reads the layouts of query and key from the given attributes. The key's layout is the query's, or PA_BSND (pages).
Layout layout_of(const Checks& checks, const NodeInfo& node, const Attribute<const char*>& query,
                 const Attribute<const char*>& key);

// One call: its sequences, and the checked tensors in the form that the kernels take.
class SparseCall {
 public:
  SparseCall(const Checks& checks, const Layout& layout, const SequenceInputs& inputs);

  const Batch& batch() const { return batch_; }
  int64_t tokens() const { return tokens_; }
  int64_t heads() const { return heads_; }
  int64_t key_heads() const { return key_heads_; }
  // The shape of a tensor with one entry for each query token, or for each key token. `trailing` are the last
  // dimensions.
  Dims of_query(std::initializer_list<int64_t> trailing) const;
  Dims of_key(std::initializer_list<int64_t> trailing) const;
  Dims statistics_dims() const;
  // The stride of key heads in the statistics.
  int64_t statistics_head() const { return statistics_head_; }
  // Whether the kernels leave out some query tokens.
  bool has_gaps() const { return batch_.rows < tokens_; }

  Rows rows(const Tensor& plain, const Tensor& rope) const;
  // Sets batch, query, key, scale and the layout of the statistics. Checks that both rope parts are present or none.
  Attention attention(const Tensor& query, const Tensor& query_rope, const Tensor& key, const Tensor& key_rope,
                      float scale) const;
  // Adds the inputs softmax_max and softmax_sum.
  void add_statistics(Attention& attention, const Tensor& max, const Tensor& sum) const;
  // sinks [query heads]; null if absent.
  const float* sinks(Rule rule, const Tensor& tensor) const;
  // sparse_indices. `may_be_shared`: key heads may share one list. `capped`: see Lists.
  Lists lists(const Tensor& indices, int64_t block, bool may_be_shared, bool capped) const;
  // Checks that every entry that a row uses is a key of the row's sequence.
  void check_entries(const Lists& lists) const;

 private:
  void read_sequences(const Layout& layout, const SequenceInputs& inputs);
  void read_keys(const Layout& layout, const SequenceInputs& inputs);
  // Cumulative lengths of a packed tensor with `total` tokens.
  std::vector<int64_t> read_ends(const char* name, const Tensor& tensor, int64_t total) const;
  // The length of each batch entry, at most `capacity`. Without the tensor, it is `capacity`.
  std::vector<int64_t> read_lengths(const char* name, const Tensor* tensor, int64_t batch, int64_t capacity) const;

  const Checks& checks_;
  Dims query_dims_, key_dims_;  // shapes without heads and head size
  int64_t tokens_ = 0, heads_ = 0, key_heads_ = 0, statistics_head_ = 0;
  std::vector<Sequence> sequences_;
  Batch batch_;
};

// Reads sparse_mode into `layout.causal`.
void read_mode(const Checks& checks, const NodeInfo& node, const Attribute<int64_t>& mode, bool only_causal,
               Layout& layout);

// Checks attributes of windows, which the kernels do not use: they must have their default values.
void check_windows(const Checks& checks, const NodeInfo& node, std::initializer_list<Attribute<int64_t>> windows);

}  // namespace fa::sparse
