// What the operators of the sparse family read of a call: its inputs by name, its sequences, and the checks they share.
#pragma once

#include "../op.hpp"
#include "problem.hpp"

namespace fa::sparse {

// The constraints that all kernels of the family check, by what they are about.
struct Rules {
  Rule layout = {}, heads = {}, sizes = {}, rope = {}, lengths = {}, paging = {}, mode = {}, indices = {},
       statistics = {};
};

// Throws errors that name the node and the number of the constraint.
class Checks {
 public:
  Checks(std::string node, const Rules& rules) : node_(std::move(node)), rules_(rules) {}

  const std::string& node() const { return node_; }
  const Rules& rules() const { return rules_; }
  [[noreturn]] void fail(Rule rule, const std::string& text) const;
  // `expected` may have -1 for any size.
  void shape(Rule rule, const char* name, const Tensor& tensor, const Dims& expected) const;
  void one_of(Rule rule, const char* name, int64_t value, std::initializer_list<int64_t> allowed) const;

 private:
  std::string node_;
  Rules rules_;
};

inline size_t size_of(Type type) { return type == Type::float32 ? 4 : 2; }

// The tensors that tell a call's sizes.
struct Sides {
  const Tensor& query;
  const Tensor& key;
  const Tensor& query_lengths;
  const Tensor& key_lengths;
  const Tensor* block_table = nullptr;  // of the operators that take pages
};

struct Layout {
  std::string query = "BSND";
  std::string key = "BSND";
  const char* key_name = "layout";  // of the attribute
  bool causal = false;              // sparse_mode 3
  bool counted = false;             // BSND has lengths of its own; otherwise it is full
};

// Reads the layouts from these attributes. If the keys have one of their own, it may say PA_BSND.
Layout layout_of(const Checks& checks, const NodeInfo& node, const Attribute<const char*>& query,
                 const Attribute<const char*>& key);

class SparseCall {
 public:
  SparseCall(const Checks& checks, const Layout& layout, const Sides& sides);

  const Batch& batch() const { return batch_; }
  int64_t tokens() const { return tokens_; }
  int64_t heads() const { return heads_; }
  int64_t key_heads() const { return key_heads_; }
  // Dimensions of a tensor with one entry for each query token, or each key token.
  Dims of_query(std::initializer_list<int64_t> behind) const;
  Dims of_key(std::initializer_list<int64_t> behind) const;
  Dims statistics_dims() const;
  // Elements from a key head to the next in the statistics.
  int64_t statistics_head() const { return statistics_head_; }
  // Whether some query tokens are not computed.
  bool has_gaps() const { return batch_.rows < tokens_; }

  Rows rows(const Tensor& plain, const Tensor& rope) const;
  // Batch, query and key; the rope parts are there in both or in neither.
  Attention attention(const Tensor& query, const Tensor& query_rope, const Tensor& key, const Tensor& key_rope,
                      float scale) const;
  // softmax_max and softmax_sum as inputs.
  void add_statistics(Attention& attention, const Tensor& max, const Tensor& sum) const;
  // One number for each head of attention; null if absent.
  const float* sinks(Rule rule, const Tensor& tensor) const;
  // sparse_indices; `any_heads`: one list may serve all key heads.
  Lists lists(const Tensor& indices, int64_t block, bool any_heads, bool capped) const;
  // Every entry that a row uses is a key of its sequence.
  void check_entries(const Lists& lists) const;

 private:
  void read_sequences(const Layout& layout, const Sides& sides);
  void read_keys(const Layout& layout, const Sides& sides);
  std::vector<int64_t> ends(const char* name, const Tensor& tensor, int64_t total) const;
  std::vector<int64_t> counts(const char* name, const Tensor* tensor, int64_t batch, int64_t most) const;

  const Checks& checks_;
  Dims query_dims_, key_dims_;  // without heads and head size
  int64_t tokens_ = 0, heads_ = 0, key_heads_ = 0, statistics_head_ = 0;
  std::vector<Sequence> sequences_;
  Batch batch_;
};

// Reads sparse_mode into `layout.causal`.
void read_mode(const Checks& checks, const NodeInfo& node, const Attribute<int64_t>& mode, bool only_causal,
               Layout& layout);

// Checks windows that the kernels do not use: they have to be as wide as their defaults.
void check_windows(const Checks& checks, const NodeInfo& node, std::initializer_list<Attribute<int64_t>> windows);

}  // namespace fa::sparse
