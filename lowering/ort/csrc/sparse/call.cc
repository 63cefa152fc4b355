#include "call.hpp"

#include <algorithm>
#include <numeric>

#include "../checked.hpp"

namespace fa::sparse {
namespace {

constexpr const char* kPagedLayout = "PA_BSND";

std::string expected_text(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i > 0 ? "," : "") + (dims[i] < 0 ? "?" : std::to_string(dims[i]));
  return text + "]";
}

int64_t integer_at(const Tensor& tensor, int64_t i) {
  if (tensor.type == ort::Element::int32) return static_cast<const int32_t*>(tensor.data)[i];
  return static_cast<const int64_t*>(tensor.data)[i];
}

int64_t product_of(const Dims& dims) {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1}, [](int64_t a, int64_t b) { return a * b; });
}

}  // namespace

void Checks::fail(Rule rule, const std::string& text) const { refuse(node_, rule, text); }

void Checks::shape(Rule rule, const char* name, const Tensor& tensor, const Dims& expected) const {
  if (!tensor.present()) fail(rule, std::string("input ") + name + " is absent");
  bool matches = tensor.rank() == expected.size();
  for (size_t i = 0; matches && i < expected.size(); ++i) matches = expected[i] < 0 || tensor.dims[i] == expected[i];
  if (!matches) {
    fail(rule, std::string("input ") + name + " has shape " + text_of(tensor.dims) + ", expected " +
                   expected_text(expected));
  }
}

void Checks::one_of(Rule rule, const char* name, int64_t value, std::initializer_list<int64_t> allowed) const {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
  std::string text;
  for (int64_t each : allowed) text += (text.empty() ? "" : " or ") + std::to_string(each);
  fail(rule, std::string("attribute ") + name + " is " + std::to_string(value) + ", expected " + text);
}

Layout layout_of(const Checks& checks, const NodeInfo& node, const Attribute<const char*>& query,
                 const Attribute<const char*>& key) {
  const Rule rule = checks.rules().layout;
  Layout layout;
  layout.query = node.get(query);
  layout.key = node.get(key);
  layout.key_name = key.name;
  if (layout.query != "BSND" && layout.query != "TND") {
    checks.fail(rule,
                std::string("attribute ") + query.name + " is \"" + layout.query + "\", expected one of BSND, TND");
  }
  if (layout.key != layout.query && layout.key != kPagedLayout) {
    checks.fail(rule, std::string("attribute ") + key.name + " is \"" + layout.key + "\", expected " + layout.query +
                          " or " + kPagedLayout);
  }
  return layout;
}

SparseCall::SparseCall(const Checks& checks, const Layout& layout, const SequenceInputs& inputs) : checks_(checks) {
  const Rules& rules = checks.rules();
  const bool packed = layout.query == "TND";
  checks.shape(rules.layout, "query", inputs.query, packed ? Dims{-1, -1, -1} : Dims{-1, -1, -1, -1});
  checks.shape(rules.layout, "key", inputs.key, layout.key == "TND" ? Dims{-1, -1, -1} : Dims{-1, -1, -1, -1});
  query_dims_ = Dims(std::span(inputs.query.dims).first(inputs.query.rank() - 2));
  key_dims_ = Dims(std::span(inputs.key.dims).first(inputs.key.rank() - 2));
  heads_ = inputs.query.dims[inputs.query.rank() - 2];
  key_heads_ = inputs.key.dims[inputs.key.rank() - 2];
  if (key_heads_ == 0 || heads_ == 0 || heads_ % key_heads_ != 0) {
    checks.fail(rules.heads, "input key has " + std::to_string(key_heads_) + " heads, expected a divisor of the " +
                                 std::to_string(heads_) + " of query");
  }
  if (inputs.query.dims.back() != inputs.key.dims.back()) {
    checks.fail(rules.sizes, "input key has the head size " + std::to_string(inputs.key.dims.back()) + ", expected " +
                                 std::to_string(inputs.query.dims.back()) + " as query");
  }
  tokens_ = product_of(query_dims_);
  batch_.key_tokens = product_of(key_dims_);
  batch_.causal = layout.causal;
  read_sequences(layout, inputs);
  read_keys(layout, inputs);
  for (Sequence& sequence : sequences_) {
    sequence.first_row = batch_.rows;
    batch_.rows += sequence.queries;
  }
  batch_.sequences = sequences_.data();
  batch_.count = static_cast<int64_t>(sequences_.size());
}

// Reads the query tokens of each sequence.
void SparseCall::read_sequences(const Layout& layout, const SequenceInputs& inputs) {
  const int64_t group = heads_ / key_heads_;
  if (layout.query == "TND") {
    statistics_head_ = tokens_ * group;
    int64_t start = 0;
    for (int64_t end : read_ends("of the query", inputs.query_lengths, tokens_)) {
      Sequence sequence;
      sequence.query = start;
      sequence.queries = end - start;
      sequence.statistics = start * group;
      sequences_.push_back(sequence);
      start = end;
    }
    return;
  }
  const int64_t size = query_dims_[1];
  statistics_head_ = size * group;
  const Tensor* given = layout.has_lengths ? &inputs.query_lengths : nullptr;
  const std::vector<int64_t> lengths = read_lengths("of the query", given, query_dims_[0], size);
  for (size_t b = 0; b < lengths.size(); ++b) {
    Sequence sequence;
    sequence.query = static_cast<int64_t>(b) * size;
    sequence.queries = lengths[b];
    sequence.statistics = static_cast<int64_t>(b) * size * heads_;
    sequences_.push_back(sequence);
  }
}

// Reads the key tokens or pages of each sequence.
void SparseCall::read_keys(const Layout& layout, const SequenceInputs& inputs) {
  const Rules& rules = checks_.rules();
  const auto batch = static_cast<int64_t>(sequences_.size());
  if (layout.key != kPagedLayout && inputs.block_table != nullptr && inputs.block_table->present()) {
    checks_.fail(rules.paging, std::string("input block_table is given although ") + layout.key_name + " is " + layout.key +
                                   ", expected none");
  }
  if (layout.key == "TND") {
    const std::vector<int64_t> key_ends = read_ends("of the keys", inputs.key_lengths, key_dims_[0]);
    if (key_ends.size() != sequences_.size()) {
      checks_.fail(rules.lengths, "there are lengths of " + std::to_string(batch) + " sequences of queries and " +
                                      std::to_string(key_ends.size()) + " of keys");
    }
    for (size_t b = 0; b < key_ends.size(); ++b) {
      sequences_[b].key = b == 0 ? 0 : key_ends[b - 1];
      sequences_[b].keys = key_ends[b] - sequences_[b].key;
    }
    return;
  }
  if (layout.key != kPagedLayout) {
    if (key_dims_[0] != batch) {
      checks_.fail(rules.layout, "input key has the batch " + std::to_string(key_dims_[0]) + ", expected " +
                                     std::to_string(batch) + " as query");
    }
    const Tensor* given = layout.has_lengths ? &inputs.key_lengths : nullptr;
    const std::vector<int64_t> lengths = read_lengths("of the keys", given, batch, key_dims_[1]);
    for (size_t b = 0; b < lengths.size(); ++b) {
      sequences_[b].key = static_cast<int64_t>(b) * key_dims_[1];
      sequences_[b].keys = lengths[b];
    }
    return;
  }
  const Tensor& table = *inputs.block_table;
  checks_.shape(rules.paging, "block_table", table, {batch, -1});
  if (!inputs.key_lengths.present()) {
    checks_.fail(rules.lengths, "the lengths of the keys are absent, expected them with PA_BSND");
  }
  const int64_t page = key_dims_[1], pages_per_sequence = table.dims[1];
  const Checked table_keys = Checked(pages_per_sequence) * page;
  if (!table_keys.fits_int64()) {
    checks_.fail(rules.paging, "input block_table has shape " + text_of(table.dims) + " beside pages of " +
                                   std::to_string(page) + " keys, expected fewer than 2^63 keys in all");
  }
  const std::vector<int64_t> lengths = read_lengths("of the keys", &inputs.key_lengths, batch, table_keys.value());
  batch_.page = page;
  for (size_t b = 0; b < lengths.size(); ++b) {
    const auto* pages = static_cast<const int32_t*>(table.data) + static_cast<int64_t>(b) * pages_per_sequence;
    for (int64_t n = 0; n * page < lengths[b]; ++n) {
      if (pages[n] < 0 || pages[n] >= key_dims_[0]) {
        checks_.fail(rules.paging, "input block_table names the page " + std::to_string(pages[n]) + ", expected 0 to " +
                                       std::to_string(key_dims_[0] - 1));
      }
    }
    sequences_[b].pages = pages;
    sequences_[b].keys = lengths[b];
  }
}

std::vector<int64_t> SparseCall::read_ends(const char* name, const Tensor& tensor, int64_t total) const {
  const std::string title = std::string("the lengths ") + name;
  if (!tensor.present()) checks_.fail(checks_.rules().lengths, title + " are absent, expected cumulative ones with TND");
  if (tensor.rank() != 1) checks_.fail(checks_.rules().lengths, title + " have shape " + text_of(tensor.dims) + ", expected rank 1");
  std::vector<int64_t> ends;
  int64_t previous_end = 0;
  for (int64_t i = 0; i < tensor.count(); ++i) {
    const int64_t end = integer_at(tensor, i);
    if (end < previous_end || end > total) {
      checks_.fail(checks_.rules().lengths, title + " hold " + std::to_string(end) + " behind " +
                                                std::to_string(previous_end) + ", expected cumulative numbers up to " +
                                                std::to_string(total));
    }
    ends.push_back(end);
    previous_end = end;
  }
  return ends;
}

std::vector<int64_t> SparseCall::read_lengths(const char* name, const Tensor* tensor, int64_t batch,
                                              int64_t capacity) const {
  std::vector<int64_t> lengths(static_cast<size_t>(batch), capacity);
  if (tensor == nullptr || !tensor->present()) return lengths;
  if (tensor->rank() != 1 || tensor->count() != batch) {
    checks_.fail(checks_.rules().lengths, std::string("the lengths ") + name + " are " + std::to_string(tensor->count()) +
                                              ", expected " + std::to_string(batch));
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = integer_at(*tensor, b);
    if (length < 0 || length > capacity) {
      checks_.fail(checks_.rules().lengths, std::string("the lengths ") + name + " hold " + std::to_string(length) +
                                                ", expected 0 to " + std::to_string(capacity));
    }
    lengths[static_cast<size_t>(b)] = length;
  }
  return lengths;
}

Dims SparseCall::of_query(std::initializer_list<int64_t> trailing) const {
  Dims dims = query_dims_;
  dims.append(trailing);
  return dims;
}

Dims SparseCall::of_key(std::initializer_list<int64_t> trailing) const {
  Dims dims = key_dims_;
  dims.append(trailing);
  return dims;
}

Dims SparseCall::statistics_dims() const {
  const int64_t group = heads_ / key_heads_;
  if (query_dims_.size() == 1) return {key_heads_, query_dims_[0], group};
  return {query_dims_[0], key_heads_, query_dims_[1], group};
}

Rows SparseCall::rows(const Tensor& plain, const Tensor& rope) const {
  Rows rows;
  rows.plain = plain.data;
  rows.size = plain.dims.back();
  rows.heads = plain.dims[plain.rank() - 2];
  rows.type = type_of(plain.type);
  if (rope.present()) {
    rows.rope = rope.data;
    rows.rope_size = rope.dims.back();
  }
  return rows;
}

Attention SparseCall::attention(const Tensor& query, const Tensor& query_rope, const Tensor& key, const Tensor& key_rope,
                                float scale) const {
  const Rule rule = checks_.rules().rope;
  if (query_rope.present() != key_rope.present()) {
    checks_.fail(rule, "one of the inputs query_rope and key_rope is absent, expected both or none");
  }
  if (query_rope.present()) {
    checks_.shape(rule, "query_rope", query_rope, of_query({heads_, -1}));
    checks_.shape(rule, "key_rope", key_rope, of_key({key_heads_, query_rope.dims.back()}));
  }
  Attention a;
  a.batch = batch_;
  a.query = rows(query, query_rope);
  a.key = rows(key, key_rope);
  a.scale = scale;
  a.statistics_head = statistics_head_;
  return a;
}

void SparseCall::add_statistics(Attention& attention, const Tensor& max, const Tensor& sum) const {
  checks_.shape(checks_.rules().statistics, "softmax_max", max, statistics_dims());
  checks_.shape(checks_.rules().statistics, "softmax_sum", sum, statistics_dims());
  attention.softmax_max = static_cast<float*>(max.data);
  attention.softmax_sum = static_cast<float*>(sum.data);
}

const float* SparseCall::sinks(Rule rule, const Tensor& tensor) const {
  if (tensor.present()) checks_.shape(rule, "sinks", tensor, {heads_});
  return static_cast<const float*>(tensor.data);
}

Lists SparseCall::lists(const Tensor& indices, int64_t block, bool may_be_shared, bool capped) const {
  const bool shared = may_be_shared && indices.rank() >= 2 && indices.dims[indices.rank() - 2] == 1;
  const int64_t heads = shared ? 1 : key_heads_;
  checks_.shape(checks_.rules().indices, "sparse_indices", indices, of_query({heads, -1}));
  Lists lists;
  lists.entries = static_cast<const int32_t*>(indices.data);
  lists.heads = heads;
  lists.count = indices.dims.back();
  // A block that is longer than every sequence selects the same tokens as a block of the longest sequence's length.
  int64_t longest = 1;
  for (const Sequence& sequence : sequences_) longest = std::max(longest, sequence.keys);
  lists.block = std::min(block, longest);
  lists.capped = capped;
  lists.room = std::min(lists.count, longest / lists.block + 1) * lists.block;
  return lists;
}

void SparseCall::check_entries(const Lists& lists) const {
  for (const Sequence& sequence : sequences_) {
    for (int64_t row = 0; row < sequence.queries; ++row) {
      const int64_t visible = visible_keys(batch_, sequence, row);
      const int64_t used = batch_.causal ? std::min(lists.count, visible) : lists.count;
      const int32_t* list = lists.entries + (sequence.query + row) * lists.count;
      for (int64_t n = 0; n < used; ++n) {
        if (list[n] < 0 || list[n] >= sequence.keys) {
          checks_.fail(checks_.rules().indices,
                       "input sparse_indices holds " + std::to_string(list[n]) + " among the first " +
                           std::to_string(used) + " entries of query token " + std::to_string(sequence.query + row) +
                           ", expected keys 0 to " + std::to_string(sequence.keys - 1));
        }
      }
    }
  }
}

void read_mode(const Checks& checks, const NodeInfo& node, const Attribute<int64_t>& mode, bool only_causal,
               Layout& layout) {
  const int64_t value = node.get(mode);
  if (only_causal) {
    checks.one_of(checks.rules().mode, mode.name, value, {3});
  } else {
    checks.one_of(checks.rules().mode, mode.name, value, {0, 3});
  }
  layout.causal = value == 3;
}

void check_windows(const Checks& checks, const NodeInfo& node, std::initializer_list<Attribute<int64_t>> windows) {
  for (const Attribute<int64_t>& window : windows) {
    checks.one_of(checks.rules().mode, window.name, node.get(window), {window.fallback});
  }
}

}  // namespace fa::sparse
