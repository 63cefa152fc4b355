#include "call.hpp"

#include <algorithm>

namespace fa::prompt {
namespace {

constexpr int64_t kMaxHeadSize = 768;

// Head sizes of query, query_rope and value. With one query row, bit 1 of inner_precise has an effect only for these.
constexpr int64_t kZeroRowSizes[][3] = {{512, 64, 512}, {128, 0, 128}, {64, 0, 64}, {192, 64, 128}, {128, 64, 128}};

}  // namespace

Call::Call(const std::string& node, const Operator& op, const Attributes& attributes, const Inputs& inputs)
    : node_(node), op_(op), a_(attributes), in_(inputs) {
  read_query();
  read_rows();
  read_caches();
  read_rope();
  out_dims_ = Dims{};
  const int64_t b = query_.batch, n = a_.heads, s = query_.length, d = value_.size;
  switch (a_.out_layout) {
    case Layout::BSH: out_dims_ = Dims{b, s, n * d}; break;
    case Layout::BSND: out_dims_ = Dims{b, s, n, d}; break;
    case Layout::BNSD: out_dims_ = Dims{b, n, s, d}; break;
    case Layout::NBSD: out_dims_ = Dims{n, b, s, d}; break;
    case Layout::TND: out_dims_ = Dims{s, n, d}; break;
    default: out_dims_ = Dims{n, s, d}; break;
  }
  out_ = operand_of(a_.out_layout, out_dims_, n);
  const bool single_row = op_.fused && !a_.packed() && query_.length == 1;
  single_row_ = single_row && a_.layout != Layout::NSD && value_.size == query_.size && problem_.rope_size == 0;
  zero_rows_ = a_.zero_rows && (!single_row || std::ranges::any_of(kZeroRowSizes, [this](const int64_t (&sizes)[3]) {
    return sizes[0] == query_.size && sizes[1] == problem_.rope_size && sizes[2] == value_.size;
  }));
  problem_.heads = a_.heads;
  problem_.key_heads = a_.key_heads;
  problem_.head_size = query_.size;
  problem_.value_size = value_.size;
  problem_.scale = a_.scale;
  problem_.pse_inside_scale = false;
  read_mask();
  read_bias();
  read_sink();
  read_int8_query();
  read_result_scales();
}

Dims Call::statistics_dims() const {
  if (a_.packed()) return {query_.length, a_.heads, 1};
  return {query_.batch, a_.heads, query_.length, 1};
}

void Call::wrong_shape(Topic topic, size_t input, const std::string& expected) const {
  refuse(topic, text(input) + " has the shape " + text_of(in_[input].dims) + ", expected " + expected);
}

void Call::want_type(Topic topic, size_t input, std::initializer_list<E> types) const {
  const std::string fault = type_fault(in_[input].type, types);
  if (!fault.empty()) refuse(topic, text(input) + fault);
}

void Call::want_none(Topic topic, std::initializer_list<size_t> inputs, const std::string& beside) const {
  for (size_t input : inputs) {
    if (in_.has(input)) refuse(topic, text(input) + " is given, expected none " + beside);
  }
}

void Call::read_query() {
  want_type(&Rules::types, input_query, {E::float32, E::float16, E::bfloat16, E::int8});
  const Tensor& query = in_[input_query];
  if (query.rank() != rank_of(a_.layout)) {
    wrong_shape(&Rules::layout, input_query,
                "rank " + std::to_string(rank_of(a_.layout)) + " for " + fa::text_of(a_.layout));
  }
  if (a_.layout == Layout::BSH && query.dims[2] % a_.heads != 0) {
    wrong_shape(&Rules::heads, input_query, "a last dimension that " + std::to_string(a_.heads) + " heads divide");
  }
  query_ = operand_of(a_.layout, query.dims, a_.heads);
  if (query_.heads != a_.heads) {
    wrong_shape(&Rules::heads, input_query, std::to_string(a_.heads) + " heads (num_heads)");
  }
  if (query_.size > kMaxHeadSize) wrong_shape(&Rules::sizes, input_query, "a head size of at most 768");
}

// Reads the cumulative lengths of a packed tensor: the end of each sequence.
std::vector<int64_t> Call::read_ends(size_t input, int64_t tokens) const {
  const Tensor& tensor = in_[input];
  if (!tensor.present()) {
    refuse(&Rules::packed, text(input) + " is absent, expected for " + fa::text_of(a_.layout));
  }
  want_type(&Rules::lengths, input, {E::int64});
  if (tensor.rank() != 1) wrong_shape(&Rules::packed, input, "rank 1");
  const auto* values = static_cast<const int64_t*>(tensor.data);
  std::vector<int64_t> ends(values, values + tensor.count());
  int64_t previous_end = 0;
  for (int64_t end : ends) {
    if (end < previous_end || end > tokens) {
      refuse(&Rules::packed, text(input) + " is " + text_of(std::span<const int64_t>(ends)) +
                                 ", expected cumulative lengths that do not fall and end at " + std::to_string(tokens) +
                                 " or before");
    }
    previous_end = end;
  }
  return ends;
}

// The length of each batch entry, at most its capacity. A single length holds for all entries. Lengths after that of
// the last entry are not read. Without the input, the lengths are the capacities.
std::vector<int64_t> Call::read_lengths(size_t input, const std::vector<int64_t>& capacity) const {
  const Tensor& given = in_[input];
  if (!given.present()) return capacity;
  want_type(&Rules::lengths, input, {E::int64});
  const auto count = static_cast<size_t>(given.count());
  if (given.rank() != 1 || (count != 1 && count < capacity.size())) {
    wrong_shape(&Rules::lengths, input, "[1] or [" + std::to_string(capacity.size()) + "]");
  }
  std::vector<int64_t> lengths(capacity.size());
  for (size_t i = 0; i < capacity.size(); ++i) {
    lengths[i] = static_cast<const int64_t*>(given.data)[count == 1 ? 0 : i];
    if (lengths[i] < 0 || lengths[i] > capacity[i]) {
      refuse(&Rules::lengths, text(input) + " gives batch entry " + std::to_string(i) + " the length " +
                                  std::to_string(lengths[i]) + ", expected 0 to " + std::to_string(capacity[i]));
    }
  }
  return lengths;
}

// The number of padding rows or keys after the last one of each batch entry, or -1 if the input is absent.
int64_t Call::read_padding(size_t input, size_t lengths) const {
  if (!in_.has(input)) return -1;
  want_type(&Rules::padding, input, {E::int64});
  const Tensor& given = in_[input];
  if (given.rank() != 1 || given.dims[0] != 1) wrong_shape(&Rules::padding, input, "[1]");
  if (a_.packed() || in_.has(input_block_table) || listed()) {
    refuse(&Rules::padding, text(input) + " is given, expected none with a packed layout, pages or a list");
  }
  if (!in_.has(lengths)) refuse(&Rules::padding, text(lengths) + " is absent beside " + op_.names[input]);
  return std::max<int64_t>(0, *static_cast<const int64_t*>(given.data));
}

// Reads the query rows of each batch entry.
void Call::read_rows() {
  if (a_.packed()) {
    read_padding(input_query_padding_size, input_actual_seq_lengths);
    int64_t begin = 0;
    for (int64_t end : read_ends(input_actual_seq_lengths, query_.length)) {
      entries_.push_back({begin, end - begin, 0, 0});
      begin = end;
    }
    return;
  }
  const std::vector<int64_t> capacity(static_cast<size_t>(query_.batch), query_.length);
  const std::vector<int64_t> rows = read_lengths(input_actual_seq_lengths, capacity);
  const int64_t padding = read_padding(input_query_padding_size, input_actual_seq_lengths);
  entries_.resize(capacity.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].rows = rows[i];
    if (padding < 0 || query_.length == 1) continue;
    if (padding > query_.length - rows[i]) {
      refuse(&Rules::padding, text(input_query_padding_size) + " is " + std::to_string(padding) + " beside " +
                                  std::to_string(rows[i]) + " rows of batch entry " + std::to_string(i) +
                                  ", expected at most " + std::to_string(query_.length) + " together");
    }
    entries_[i].first_row = query_.length - padding - rows[i];
  }
}

void Call::read_rope() {
  const bool given = in_.has(input_query_rope);
  if (given != in_.has(input_key_rope)) {
    const size_t missing = given ? input_key_rope : input_query_rope;
    refuse(&Rules::rope, text(missing) + " is absent, expected both rope parts or none");
  }
  if (!given) return;
  want_none(
      &Rules::rope,
      {input_query_padding_size, input_kv_padding_size, input_pse_shift, input_key_shared_prefix, input_quant_scale2},
      "with query_rope");
  if (listed() || in_[input_key].type == E::int8) {
    refuse(&Rules::rope, "key is a list or int8 beside key_rope, expected one tensor of floats");
  }
  const E type = in_[input_query].type;
  for (size_t input : {input_query_rope, input_key_rope}) want_type(&Rules::rope, input, {type});
  const Tensor& rope = in_[input_query_rope];
  bool matches = rope.rank() == rank_of(a_.layout) && (a_.layout != Layout::BSH || rope.dims[2] % a_.heads == 0);
  if (matches) {
    query_rope_ = operand_of(a_.layout, rope.dims, a_.heads);
    matches = query_rope_.batch == query_.batch && query_rope_.heads == query_.heads &&
              query_rope_.length == query_.length;
  }
  if (!matches) wrong_shape(&Rules::rope, input_query_rope, "that of query with another head size");
  key_rope_ = read_cache(input_key_rope, kInputCount, a_.key_heads);
  const bool paged = key_.block_stride != 0;
  const bool lengths_match = paged ? in_[input_key_rope].dims[0] == in_[input_key].dims[0]
                                   : key_rope_.operands[0].batch == key_.operands[0].batch &&
                                         key_rope_.operands[0].length == key_.operands[0].length;
  if (key_rope_.size != query_rope_.size || !lengths_match) {
    wrong_shape(&Rules::rope, input_key_rope, "that of key with the head size " + std::to_string(query_rope_.size));
  }
  problem_.rope_size = query_rope_.size;
}

}  // namespace fa::prompt
