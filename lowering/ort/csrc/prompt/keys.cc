// Keys and values: plain tensors, lists of tensors, pages, a shared prefix, and int8 numbers with their scales.
#include <algorithm>
#include <cstring>

#include "../reference.hpp"
#include "call.hpp"

namespace fa::prompt {
namespace {

constexpr int64_t kMaxBlockSize = 2147483647;
constexpr int64_t kTokensInTask = 64;  // that one task gathers

// Copies `count` contiguous numbers. `to_type` is `from_type` or float32.
void copy_numbers(const char* from, E from_type, char* to, E to_type, int64_t count) {
  if (count == 0) return;
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(count * bytes_of(to_type)));
    return;
  }
  auto* out = reinterpret_cast<float*>(to);
  if (from_type == E::int8) {
    for (int64_t d = 0; d < count; ++d) out[d] = reinterpret_cast<const int8_t*>(from)[d];
  } else {
    for (int64_t d = 0; d < count; ++d) out[d] = reference::read(from, d, type_of(from_type));
  }
}

}  // namespace

void Call::read_caches() {
  const E query = in_[input_query].type;
  for (int64_t n = 0; n < a_.keys; ++n) {
    for (const Tensor* tensor : {&in_.key(n), &in_.value(n)}) {
      if (tensor->type == in_.key(0).type && (tensor->type == query || (op_.fused && tensor->type == E::int8))) continue;
      refuse(&Rules::types, op_.fused
                                ? "key and value are of other types than query's or int8, or differ; 4-bit keys are "
                                  "not computed"
                                : "key and value are of other types than query's");
    }
  }
  const bool paged = in_.has(input_block_table);
  if (listed() && (a_.packed() || paged || a_.keys != batch())) {
    refuse(paged ? &Rules::pages : &Rules::lists,
           "key is a list of " + std::to_string(a_.keys) + ", expected one tensor" +
               (a_.packed() || paged ? " with a packed layout or pages" : " or " + std::to_string(batch())));
  }
  key_ = read_cache(input_key, input_key_shared_prefix, a_.key_heads);
  value_ = read_cache(input_value, input_value_shared_prefix, a_.key_heads);
  if (key_.size != query_.size) {
    wrong_shape(&Rules::sizes, input_key, "the head size " + std::to_string(query_.size) + " of query");
  }
  if (value_.size > 768) wrong_shape(&Rules::sizes, input_value, "a head size of at most 768");
  std::vector<int64_t> capacity;
  read_capacity(key_, key_capacity_);
  read_capacity(value_, capacity);
  if (capacity != key_capacity_) wrong_shape(&Rules::sizes, input_value, "the lengths of key");
  if ((key_.prefix == nullptr) != (value_.prefix == nullptr)) {
    refuse(&Rules::prefix, "key_shared_prefix and value_shared_prefix are not both given, expected both or none");
  }
  if (key_.prefix != nullptr) {
    prefix_ = key_.prefix_operand.length;
    if (value_.prefix_operand.length != prefix_) {
      wrong_shape(&Rules::prefix, input_value_shared_prefix, "the length of key_shared_prefix");
    }
    if (in_.has(input_actual_shared_prefix_len)) {
      want_type(&Rules::prefix, input_actual_shared_prefix_len, {E::int64});
      const Tensor& given = in_[input_actual_shared_prefix_len];
      if (given.rank() != 1 || given.count() != 1) wrong_shape(&Rules::prefix, input_actual_shared_prefix_len, "[1]");
      const int64_t length = *static_cast<const int64_t*>(given.data);
      if (length < 0 || length > prefix_) {
        refuse(&Rules::prefix, text(input_actual_shared_prefix_len) + " is " + std::to_string(length) +
                                   ", expected 0 to " + std::to_string(prefix_));
      }
      prefix_ = length;
    }
  }
  read_key_lengths();
  read_antiquant();
}

// The tensors of an input, with their strides, and the prefix if `prefix` is an input of the operator.
KvCache Call::read_cache(size_t input, size_t prefix, int64_t heads) {
  KvCache cache;
  const int64_t count = input == input_key_rope ? 1 : a_.keys;
  for (int64_t n = 0; n < count; ++n) {
    cache.tensors.push_back(input == input_key ? &in_.key(n) : input == input_value ? &in_.value(n) : &in_[input]);
  }
  if (in_.has(input_block_table)) {
    read_pages(input, cache);
    return cache;
  }
  for (const Tensor* tensor : cache.tensors) {
    const Dims& dims = tensor->dims;
    bool matches = dims.size() == rank_of(a_.layout) && (a_.layout != Layout::BSH || dims[2] % heads == 0);
    Operand operand;
    if (matches) {
      operand = operand_of(a_.layout, dims, heads);
      matches = operand.heads == heads && (a_.packed() || operand.batch == (listed() ? 1 : batch())) &&
                (cache.operands.empty() || operand.size == cache.operands[0].size);
    }
    if (!matches) {
      refuse(listed() ? &Rules::lists : &Rules::sizes,
             text(input) + " has the shape " + text_of(dims) + ", expected " + fa::text_of(a_.layout) + " of " +
                 std::to_string(heads) + " heads with batch " + std::to_string(listed() ? 1 : batch()));
    }
    cache.operands.push_back(operand);
  }
  cache.size = cache.chunk = cache.operands[0].size;
  if (prefix < kInputCount && in_.has(prefix)) read_prefix(prefix, cache);
  return cache;
}

void Call::read_prefix(size_t input, KvCache& cache) const {
  if (a_.packed() || listed() || has_int8_query() || in_.has(input_kv_padding_size)) {
    refuse(&Rules::prefix,
           text(input) + " is given, expected none with a packed layout, a list, an int8 query or kv_padding_size");
  }
  want_type(&Rules::prefix, input, {in_[input_key].type});
  const Dims& dims = in_[input].dims;
  const int64_t heads = a_.key_heads;
  bool matches = dims.size() == rank_of(a_.layout) && (a_.layout != Layout::BSH || dims[2] % heads == 0);
  if (matches) {
    cache.prefix_operand = operand_of(a_.layout, dims, heads);
    matches = cache.prefix_operand.batch == 1 && cache.prefix_operand.heads == heads &&
              cache.prefix_operand.size == cache.size;
  }
  if (!matches) {
    wrong_shape(&Rules::prefix, input, "one batch entry of " + std::string(fa::text_of(a_.layout)) + " as key");
  }
  cache.prefix = &in_[input];
}

void Call::read_pages(size_t input, KvCache& cache) const {
  const Tensor& tensor = *cache.tensors[0];
  const Dims& d = tensor.dims;
  const int64_t heads = a_.key_heads;
  const int64_t size = a_.block_size;
  const int64_t chunk = tensor.type == E::int8 ? 32 : 16;
  want_none(&Rules::pages, {input_key_shared_prefix, input_value_shared_prefix}, "beside a block_table");
  if (size <= 0 || size > kMaxBlockSize) {
    refuse(&Rules::pages, "block_size is " + std::to_string(size) + " beside a block_table, expected 1 to " +
                              std::to_string(kMaxBlockSize));
  }
  if (d.size() == 3 && d[1] == size && d[2] % heads == 0) {
    cache.size = cache.chunk = d[2] / heads;
    cache.head_stride = cache.size;
    cache.row_stride = d[2];
  } else if (d.size() == 4 && d[1] == heads && d[2] == size) {
    cache.size = cache.chunk = d[3];
    cache.head_stride = size * d[3];
    cache.row_stride = d[3];
  } else if (d.size() == 5 && d[1] == heads && d[3] == size && d[4] == chunk) {
    cache.size = d[2] * chunk;
    cache.chunk = chunk;
    cache.chunk_stride = size * chunk;
    cache.head_stride = size * cache.size;
    cache.row_stride = chunk;
  } else {
    const std::string n = std::to_string(heads), s = std::to_string(size), u = std::to_string(chunk);
    wrong_shape(&Rules::pages, input,
                "[blocks," + s + "," + n + "*D], [blocks," + n + "," + s + ",D] or [blocks," + n + ",D/" + u + "," + s +
                    "," + u + "]");
  }
  cache.block_stride = std::max<int64_t>(1, heads * size * cache.size);
}

// The number of keys that the tensors have memory for, for each batch entry. In a packed layout, all tokens.
void Call::read_capacity(const KvCache& cache, std::vector<int64_t>& capacity) const {
  capacity.assign(static_cast<size_t>(batch()), 0);
  for (int64_t i = 0; i < batch(); ++i) {
    if (cache.block_stride == 0) {
      capacity[i] = cache.operands[listed() ? i : 0].length;
      continue;
    }
    const Tensor& table = in_[input_block_table];
    if (table.rank() != 2 || table.dims[0] != batch()) {
      wrong_shape(&Rules::pages, input_block_table, "[" + std::to_string(batch()) + ",blocks of an entry]");
    }
    capacity[i] = table.dims[1] * a_.block_size;
  }
}

// Reads the keys of each batch entry, and the number of columns that a mask must have.
void Call::read_key_lengths() {
  const size_t input = input_actual_seq_lengths_kv;
  const bool paged = key_.block_stride != 0;
  const int64_t padding = read_padding(input_kv_padding_size, input);
  if (paged && !in_.has(input)) refuse(&Rules::pages, text(input) + " is absent beside a block_table");
  if (a_.packed() && !paged) {
    const std::vector<int64_t> ends = read_ends(input, key_.operands[0].length);
    if (static_cast<int64_t>(ends.size()) != batch()) {
      wrong_shape(&Rules::packed, input, "as many as actual_seq_lengths, " + std::to_string(batch()));
    }
    int64_t begin = 0;
    for (int64_t i = 0; i < batch(); ++i) {
      entries_[i].first_key = begin;
      entries_[i].keys = ends[i] - begin;
      mask_columns_ = std::max(mask_columns_, entries_[i].keys);
      begin = ends[i];
    }
    return;
  }
  if (a_.packed() && !in_.has(input)) refuse(&Rules::packed, text(input) + " is absent, expected for a packed layout");
  const std::vector<int64_t> lengths = read_lengths(input, key_capacity_);
  for (int64_t i = 0; i < batch(); ++i) {
    Entry& entry = entries_[i];
    entry.keys = lengths[i];
    mask_columns_ = std::max(mask_columns_, prefix_ + key_capacity_[i]);
    if (padding < 0) continue;
    entry.first_key = key_capacity_[i] - std::min(padding, key_capacity_[i] + 1) - lengths[i];
    if (entry.first_key < 0) entry.first_key = entry.keys = 0;
  }
  if (paged) read_table();
}

// Checks that the used entries of block_table name blocks of the cache. The other entries are not read.
void Call::read_table() const {
  want_type(&Rules::pages, input_block_table, {E::int32});
  const Tensor& table = in_[input_block_table];
  const int64_t blocks = std::min(in_[input_key].dims[0], in_[input_value].dims[0]);
  for (int64_t i = 0; i < batch(); ++i) {
    const auto* row = static_cast<const int32_t*>(table.data) + i * table.dims[1];
    for (int64_t used = 0; used * a_.block_size < entries_[i].keys; ++used) {
      if (row[used] >= 0 && row[used] < blocks) continue;
      refuse(&Rules::pages, text(input_block_table) + " names block " + std::to_string(row[used]) +
                                " for batch entry " + std::to_string(i) + ", expected 0 to " +
                                std::to_string(blocks - 1));
    }
  }
}

std::vector<float> Call::floats(const Tensor& tensor) const {
  std::vector<float> out(static_cast<size_t>(tensor.count()));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = reference::read(tensor.data, static_cast<int64_t>(i), type_of(tensor.type));
  }
  return out;
}

void Call::read_antiquant() {
  constexpr size_t kAll[] = {input_antiquant_scale,     input_antiquant_offset,     input_key_antiquant_scale,
                             input_key_antiquant_offset, input_value_antiquant_scale, input_value_antiquant_offset};
  for (size_t input : kAll) {
    if (!in_.has(input)) continue;
    if (!antiquantised()) {
      refuse(&Rules::antiquant, text(input) + " is given, expected none: keys are not int8 beside a query of floats");
    }
    want_type(&Rules::antiquant, input, {E::float32, E::float16, E::bfloat16});
  }
  const bool separate = in_.has(input_key_antiquant_scale);
  if (separate != in_.has(input_value_antiquant_scale) ||
      in_.has(input_key_antiquant_offset) != in_.has(input_value_antiquant_offset)) {
    refuse(&Rules::antiquant, "scales or offsets of key and value are not both given, expected both or none");
  }
  bool has_keys = false;
  for (int64_t i = 0; i < batch(); ++i) has_keys = has_keys || keys_of(i) > 0;
  if (!antiquantised() || !has_keys) return;  // without keys, scales for tokens are empty tensors
  if (!separate) {
    if (!in_.has(input_antiquant_scale)) refuse(&Rules::antiquant, "input antiquant_scale is absent beside int8 keys");
    key_.scales = read_scales(input_antiquant_scale, input_antiquant_offset, 0, a_.antiquant_mode, key_.size);
    value_.scales = read_scales(input_antiquant_scale, input_antiquant_offset, 1, a_.antiquant_mode, value_.size);
    return;
  }
  const int64_t modes[] = {a_.key_antiquant_mode, a_.value_antiquant_mode};
  if (modes[0] != modes[1] && !(modes[0] == 0 && modes[1] == 1)) {
    refuse(&Rules::antiquant, "value_antiquant_mode is " + std::to_string(modes[1]) +
                                  " beside a key_antiquant_mode of " + std::to_string(modes[0]) +
                                  ", expected the same, or 0 and 1");
  }
  // In mode 3, key has scales for channels, and value for tokens.
  key_.scales = read_scales(input_key_antiquant_scale, input_key_antiquant_offset, -1, modes[0] == 3 ? 0 : modes[0],
                            key_.size);
  value_.scales = read_scales(input_value_antiquant_scale, input_value_antiquant_offset, -1,
                              modes[1] == 3 ? 1 : modes[1], value_.size);
}

// The antiquantisation of key or value, whose head size is `size`. In mode 0 there is one scale, or one for each
// channel; in mode 1 one for each token; in mode 2 one for each head. If key and value share the tensors of scales and
// offsets, `part` is the half that is used: 0 for key, 1 for value. Otherwise `part` is -1.
Scales Call::read_scales(size_t scale, size_t offset, int64_t part, int64_t mode, int64_t size) const {
  if (mode < 0 || mode > 2) {
    refuse(&Rules::antiquant, "the antiquantisation of mode " + std::to_string(mode) + " is not computed");
  }
  const int64_t n = a_.key_heads;
  const int64_t capacity = key_capacity_.empty() ? 0 : *std::ranges::max_element(key_capacity_);
  Scales scales;
  if (mode == 1 && (key_.prefix != nullptr || a_.packed())) {
    refuse(&Rules::antiquant, text(scale) + " by token with a prefix or a packed layout is not computed");
  }
  const auto matches_mode = [&](const Dims& dims) {
    if (mode == 1) {
      if (dims.size() != 2 || dims[0] != batch() || dims[1] < capacity) return false;
      scales.token = 1;
      scales.batch = dims[1];
      return true;
    }
    if (mode == 2) {
      scales.head = 1;
      return dims == Dims{n};
    }
    if (dims.size() == 0 || dims == Dims{1}) return true;
    scales.head = size;
    scales.channel = 1;
    return dims == Dims{n, 1, size} || dims == Dims{n, size} || dims == Dims{n * size};
  };
  const auto without_first = [](const Dims& dims) { return Dims(std::span(dims.data() + 1, dims.size() - 1)); };
  const Dims& given = in_[scale].dims;
  const bool has_halves = part < 0 || (given.size() > 0 && given[0] == 2);
  const Dims dims = part < 0 || !has_halves ? given : without_first(given);
  const bool leading_one = mode != 2 && dims.size() > 1 && dims[0] == 1;
  const bool matches = has_halves && (matches_mode(dims) || (leading_one && matches_mode(without_first(dims))));
  if (!matches) wrong_shape(&Rules::antiquant, scale, "that of mode " + std::to_string(mode));
  const auto part_of = [&](size_t input) {
    std::vector<float> all = floats(in_[input]);
    const auto half = static_cast<std::ptrdiff_t>(all.size() / 2);
    if (part == 0) all.erase(all.begin() + half, all.end());
    if (part == 1) all.erase(all.begin(), all.begin() + half);
    return all;
  };
  scales.scale = part_of(scale);
  if (!in_.has(offset)) return scales;
  if (!(in_[offset].dims == in_[scale].dims)) {
    wrong_shape(&Rules::antiquant, offset, text_of(in_[scale].dims) + " as " + op_.names[scale]);
  }
  scales.offset = part_of(offset);
  return scales;
}

// Whether the kernel cannot read the cache in place, as numbers of `type`.
bool Call::needs_gather(const KvCache& cache, E type) const {
  return cache.block_stride != 0 || cache.prefix != nullptr || cache.tensors[0]->type != type;
}

// The tensors in place.
KvView Call::view_in_place(const KvCache& cache) const {
  KvView view;
  view.row = cache.operands[0].row_stride;
  for (size_t n = 0; n < cache.tensors.size(); ++n) {
    view.data.push_back(cache.tensors[n]->data);
    view.head.push_back(cache.operands[n].head_stride);
  }
  for (int64_t i = 0; i < batch(); ++i) {
    const Operand& operand = cache.operands[listed() ? i : 0];
    view.offset.push_back((listed() ? 0 : batch_in_tensor(i) * operand.batch_stride) +
                          entries_[i].first_key * operand.row_stride);
  }
  return view;
}

// Copies the used keys of all batch entries to `memory`, as [tokens][heads][size] of `type`, and applies
// antiquantisation.
KvView Call::gather(const KvCache& cache, E type, const Runtime& runtime, Scratch& memory) const {
  const int64_t width = a_.key_heads * cache.size;
  KvView view;
  view.row = width;
  view.head = {cache.size};
  struct Task {
    int64_t entry, begin, end, out;
  };
  std::vector<Task> tasks;
  int64_t total = 0;
  for (int64_t i = 0; i < batch(); ++i) {
    view.offset.push_back(total * width);
    const int64_t keys = entries_[i].rows == 0 ? 0 : keys_of(i);
    for (int64_t t = 0; t < keys; t += kTokensInTask) {
      tasks.push_back({i, t, std::min(t + kTokensInTask, keys), total + t});
    }
    total += keys;
  }
  memory = Scratch(runtime, static_cast<size_t>(total * width * bytes_of(type)));
  view.data = {memory.as<void>()};
  struct Work {
    const Call& call;
    const KvCache& cache;
    E type;
    const std::vector<Task>& tasks;
    char* out;

    // Copies head `n` of token `t` of a batch entry. The first tokens are those of the prefix.
    void copy_row(int64_t entry, int64_t t, int64_t n, char* to) const {
      const E stored = cache.tensors[0]->type;
      const int64_t element_bytes = bytes_of(stored);
      const int64_t token = call.entries_[entry].first_key + t - call.prefix_;
      if (t < call.prefix_) {
        const Operand& operand = cache.prefix_operand;
        const int64_t offset = n * operand.head_stride + t * operand.row_stride;
        copy_numbers(static_cast<const char*>(cache.prefix->data) + offset * element_bytes, stored, to, type,
                     cache.size);
      } else if (cache.block_stride == 0) {
        const size_t tensor = call.listed() ? static_cast<size_t>(entry) : 0;
        const Operand& operand = cache.operands[tensor];
        const int64_t begin = call.listed() ? 0 : call.batch_in_tensor(entry) * operand.batch_stride;
        const int64_t offset = begin + n * operand.head_stride + token * operand.row_stride;
        copy_numbers(static_cast<const char*>(cache.tensors[tensor]->data) + offset * element_bytes, stored, to, type,
                     cache.size);
      } else {
        const Tensor& table = call.in_[input_block_table];
        const int64_t size = call.a_.block_size;
        const int64_t block = static_cast<const int32_t*>(table.data)[entry * table.dims[1] + token / size];
        const int64_t offset = block * cache.block_stride + n * cache.head_stride + token % size * cache.row_stride;
        for (int64_t d = 0; d < cache.size; d += cache.chunk) {
          const int64_t chunk = offset + d / cache.chunk * cache.chunk_stride;
          copy_numbers(static_cast<const char*>(cache.tensors[0]->data) + chunk * element_bytes, stored,
                       to + d * bytes_of(type), type, cache.chunk);
        }
      }
      if (!cache.scales.scale.empty()) dequantise(entry, t < call.prefix_ ? t : token, n, reinterpret_cast<float*>(to));
    }

    void dequantise(int64_t entry, int64_t t, int64_t n, float* x) const {
      const Scales& s = cache.scales;
      const int64_t first = entry * s.batch + t * s.token + n * s.head;
      for (int64_t d = 0; d < cache.size; ++d) {
        const int64_t index = first + d * s.channel;
        x[d] = (x[d] + (s.offset.empty() ? 0.0f : s.offset[index])) * s.scale[index];
      }
    }

    void run(const Task& task) const {
      const int64_t heads = call.a_.key_heads;
      const int64_t row_bytes = cache.size * bytes_of(type);
      for (int64_t t = task.begin; t < task.end; ++t) {
        for (int64_t n = 0; n < heads; ++n) {
          copy_row(task.entry, t, n, out + ((task.out + t - task.begin) * heads + n) * row_bytes);
        }
      }
    }
  };
  Work work{*this, cache, type, tasks, memory.as<char>()};
  runtime.parallel(runtime.self, [](void* data, size_t i) {
    const Work& work = *static_cast<const Work*>(data);
    work.run(work.tasks[i]);
  }, &work, tasks.size());
  return view;
}

}  // namespace fa::prompt
