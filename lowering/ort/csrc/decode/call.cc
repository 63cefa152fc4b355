#include "call.hpp"

#include <algorithm>

namespace fa::incre_flash_attention {
namespace {

constexpr int64_t kMaxHeadSize = 512;
constexpr int64_t kMaxBlockSize = 512;
constexpr int64_t kMaxPageWidth = 65536;

}  // namespace

Call::Call(const std::string& node, const Attributes& attributes, const Inputs& inputs)
    : node_(node), a_(attributes), in_(inputs), paged_(inputs.has(input_block_table)) {
  read_query();
  read_caches();
  read_entries();
  read_mask();
  read_pse();
  read_antiquant();
  read_output_quantisation();
  read_int8_query();
}

const Decode& Call::decode(void* out, ort::Element type) {
  decode_.out = out;
  decode_.out_cell = cell_of(type);
  if ((type == E::int8) != (decode_.quant_scale != nullptr)) {
    refuse(rule::output_quantisation, std::string("attention_out is ") + text_of_type(type) +
                                          (type == E::int8 ? " without" : " beside") + " the input quant_scale2");
  }
  decode_.entries = entries_.data();
  decode_.entry_count = static_cast<int64_t>(entries_.size());
  return decode_;
}

void Call::refuse(Rule rule, const std::string& what) const { fa::refuse(node_, rule, what); }

void Call::wrong_shape(Rule rule, Input input, const std::string& expected) const {
  refuse(rule, text(input) + " has the shape " + text_of(in_[input].dims) + ", expected " + expected);
}

void Call::want_type(Rule rule, Input input, std::initializer_list<E> types) const {
  const std::string fault = type_fault(in_[input].type, types);
  if (!fault.empty()) refuse(rule, text(input) + fault);
}

void Call::read_query() {
  want_type(rule::types, input_query, {E::float32, E::float16, E::bfloat16, E::int8});
  const Tensor& query = in_[input_query];
  const size_t rank = rank_of(a_.layout);
  const size_t tokens = a_.layout == Layout::BNSD ? 2 : 1;
  if (query.rank() != rank || query.dims[tokens] != 1) {
    wrong_shape(rule::one_token, input_query, std::string("one token in ") + fa::text_of(a_.layout));
  }
  if (a_.layout == Layout::BSH ? query.dims[2] % a_.heads != 0
                               : query.dims[a_.layout == Layout::BNSD ? 1 : 2] != a_.heads) {
    wrong_shape(rule::heads, input_query, std::to_string(a_.heads) + " heads (num_heads)");
  }
  batch_ = query.dims[0];
  decode_.heads = a_.heads;
  decode_.key_heads = a_.key_heads;
  decode_.size = a_.layout == Layout::BSH ? query.dims[2] / a_.heads : query.dims[3];
  if (decode_.size > kMaxHeadSize) wrong_shape(rule::ranges, input_query, "a head size of at most 512");
  decode_.query_cell = cell_of(query.type);
  decode_.query = query.data;
  decode_.scale = a_.scale;
  decode_.softcap = a_.softcap;
}

void Call::read_caches() {
  const E query = in_[input_query].type;
  want_type(rule::types, input_key, {query, E::int8});
  const E type = in_[input_key].type;
  decode_.cell = cell_of(type);
  const int64_t key_batch = a_.keys > 1 ? 1 : batch_;
  if (a_.keys > 1 && (a_.keys != batch_ || paged_)) {
    refuse(paged_ ? rule::pages : rule::caches,
           "key is a list of " + std::to_string(a_.keys) + ", expected one tensor" +
               (paged_ ? " beside a block_table" : " or one for each of " + std::to_string(batch_)));
  }
  for (int64_t n = 0; n < a_.keys; ++n) {
    const Tensor& key = in_.key(n);
    if (key.type != type || in_.value(n).type != type) {
      refuse(rule::types,
             std::string("keys and values differ in type, expected ") + text_of_type(type) + " as the first key");
    }
    if (in_.value(n).dims != key.dims) {
      refuse(rule::caches,
             "input value has the shape " + text_of(in_.value(n).dims) + ", expected " + text_of(key.dims) + " as key");
    }
    if (!paged_ && (key.rank() != rank_of(a_.layout) || key.dims[0] != key_batch)) {
      refuse(key.rank() == rank_of(a_.layout) ? rule::caches : rule::one_token,
             "input key has the shape " + text_of(key.dims) + ", expected " + fa::text_of(a_.layout) + " with batch " +
                 std::to_string(key_batch));
    }
    head_strides_.push_back(read_cache_strides(key.dims));
  }
}

// Checks the shape of a key tensor, sets the strides that all tensors of a list have in common, and returns the stride
// of its heads.
int64_t Call::read_cache_strides(const Dims& dims) {
  const int64_t n2 = a_.key_heads;
  const int64_t d = decode_.size;
  const std::string expected = std::to_string(n2) + " heads of size " + std::to_string(d);
  const bool folded = dims.size() == 3;
  if (paged_ && !folded && (a_.layout != Layout::BNSD || dims.size() != 4)) {
    wrong_shape(rule::one_token, input_key,
                "[blocks,block_size,H]" + std::string(a_.layout == Layout::BNSD ? " or rank 4" : ""));
  }
  const size_t heads = paged_ || a_.layout == Layout::BNSD ? 1 : 2;
  const bool matches = folded ? dims[2] == n2 * d : dims[heads] == n2 && dims[3] == d;
  if (!matches) wrong_shape(rule::caches, input_key, expected);
  const bool heads_before_tokens = !folded && heads == 1;
  const int64_t tokens = dims[heads_before_tokens ? 2 : 1];
  const int64_t head_stride = heads_before_tokens ? tokens * d : d;
  decode_.row_stride = heads_before_tokens ? d : n2 * d;
  if (!paged_) return head_stride;
  const int64_t unit = decode_.cell == Cell::int8 ? 32 : 16;
  if (a_.block_size <= 0 || a_.block_size > kMaxBlockSize || a_.block_size % unit != 0) {
    refuse(rule::pages, "block_size is " + std::to_string(a_.block_size) +
                            " beside a block_table, expected a multiple of " + std::to_string(unit) + " up to 512");
  }
  if (tokens != a_.block_size) {
    wrong_shape(rule::pages, input_key, "blocks of " + std::to_string(a_.block_size) + " tokens");
  }
  if (folded && dims[2] > kMaxPageWidth) wrong_shape(rule::pages, input_key, "a width of at most 65536");
  decode_.block_size = a_.block_size;
  decode_.block_stride = n2 * d * a_.block_size;
  return head_stride;
}

void Call::read_entries() {
  std::vector<int64_t> capacity(static_cast<size_t>(batch_));
  const size_t tokens = a_.layout == Layout::BNSD ? 2 : 1;
  const Tensor& table = in_[input_block_table];
  if (paged_) {
    want_type(rule::pages, input_block_table, {E::int32});
    if (table.rank() != 2 || table.dims[0] != batch_) {
      wrong_shape(rule::pages, input_block_table, "[" + std::to_string(batch_) + ",blocks of an entry]");
    }
    if (!in_.has(input_actual_seq_lengths)) {
      refuse(rule::pages, "input actual_seq_lengths is absent beside a block_table");
    }
  }
  for (int64_t i = 0; i < batch_; ++i) {
    capacity[i] = paged_ ? table.dims[1] * a_.block_size : in_.key(a_.keys > 1 ? i : 0).dims[tokens];
  }
  mask_columns_ = capacity.empty() ? 0 : *std::max_element(capacity.begin(), capacity.end());
  std::vector<int64_t> lengths = read_lengths(capacity);
  first_tokens_.assign(capacity.size(), 0);
  read_padding(capacity, first_tokens_, lengths);
  entries_.resize(capacity.size());
  const int64_t element_bytes = bytes_of(decode_.cell);
  for (int64_t i = 0; i < batch_; ++i) {
    DecodeEntry& entry = entries_[i];
    entry.length = decode_.size == 0 ? 0 : lengths[i];
    const int64_t n = a_.keys > 1 ? i : 0;
    entry.head_stride = head_strides_[n];
    const int64_t width = a_.key_heads * decode_.size;
    const int64_t begin = (paged_ || a_.keys > 1 ? 0 : i * capacity[i] * width) + first_tokens_[i] * decode_.row_stride;
    entry.key = static_cast<const char*>(in_.key(n).data) + begin * element_bytes;
    entry.value = static_cast<const char*>(in_.value(n).data) + begin * element_bytes;
    if (paged_) read_pages(i, entry.length);
  }
}

// The number of valid keys of each batch entry. Without actual_seq_lengths, all keys are valid.
std::vector<int64_t> Call::read_lengths(const std::vector<int64_t>& capacity) const {
  if (!in_.has(input_actual_seq_lengths)) return capacity;
  want_type(rule::lengths, input_actual_seq_lengths, {E::int64});
  const Tensor& tensor = in_[input_actual_seq_lengths];
  if (tensor.rank() != 1 || (tensor.dims[0] != 1 && tensor.dims[0] != batch_)) {
    wrong_shape(rule::lengths, input_actual_seq_lengths, "[1] or [" + std::to_string(batch_) + "]");
  }
  std::vector<int64_t> lengths(capacity.size());
  for (size_t i = 0; i < capacity.size(); ++i) {
    lengths[i] = static_cast<const int64_t*>(tensor.data)[tensor.dims[0] == 1 ? 0 : i];
    if (lengths[i] < 0 || lengths[i] > capacity[i]) {
      refuse(rule::lengths, text(input_actual_seq_lengths) + " gives batch entry " + std::to_string(i) + " " +
                                std::to_string(lengths[i]) + " keys, expected 0 to " + std::to_string(capacity[i]));
    }
  }
  return lengths;
}

// Reads kv_padding_size, the number of padding keys at the end of each batch entry. The valid keys are those before the
// padding. An entry whose keys and padding exceed its capacity has no keys. With a list of keys, the padding has no
// effect.
void Call::read_padding(const std::vector<int64_t>& capacity, std::vector<int64_t>& first_tokens,
                        std::vector<int64_t>& lengths) const {
  if (!in_.has(input_kv_padding_size)) return;
  want_type(rule::padding, input_kv_padding_size, {E::int64});
  const Tensor& tensor = in_[input_kv_padding_size];
  if (tensor.rank() != 1 || tensor.dims[0] != 1) wrong_shape(rule::padding, input_kv_padding_size, "[1]");
  // With a batch of 0, the lengths are a tensor without elements, which counts as absent.
  if (!in_.has(input_actual_seq_lengths) && batch_ != 0) {
    refuse(rule::padding, "input actual_seq_lengths is absent beside kv_padding_size");
  }
  if (paged_) refuse(rule::pages, "input kv_padding_size is given beside a block_table, expected none");
  if (a_.keys > 1) return;
  const int64_t padding = std::max<int64_t>(0, *static_cast<const int64_t*>(tensor.data));
  for (size_t i = 0; i < capacity.size(); ++i) {
    first_tokens[i] = capacity[i] - padding - lengths[i];
    if (first_tokens[i] < 0) first_tokens[i] = lengths[i] = 0;
  }
}

// Checks that the used entries of block_table name blocks of the cache. The other entries are not read.
void Call::read_pages(int64_t entry, int64_t length) {
  const Tensor& table = in_[input_block_table];
  const auto* row = static_cast<const int32_t*>(table.data) + entry * table.dims[1];
  const int64_t blocks = in_[input_key].dims[0];
  for (int64_t used = 0; used * a_.block_size < length; ++used) {
    if (row[used] < 0 || row[used] >= blocks) {
      refuse(rule::pages, text(input_block_table) + " names block " + std::to_string(row[used]) + " for batch entry " +
                              std::to_string(entry) + ", expected 0 to " + std::to_string(blocks - 1));
    }
  }
  entries_[entry].blocks = row;
}

}  // namespace fa::incre_flash_attention
