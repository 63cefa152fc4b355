// Runs a call on the kernel of IncreFlashAttention (an int8 query, or one query row with pages or int8 keys), or on the
// kernel of FlashAttentionScore (all others).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../reference.hpp"
#include "call.hpp"

namespace fa::prompt {
namespace {

constexpr int64_t kMaxDecodeHeadSize = 512;  // of the kernel of IncreFlashAttention
constexpr float kLowest = -std::numeric_limits<float>::max();  // softmax_max of a row that attends no key

// Runs body(i) for every i below count on the threads of the call.
template <class Body>
void in_parallel(const Runtime& runtime, size_t count, Body body) {
  runtime.parallel(runtime.self, [](void* data, size_t i) { (*static_cast<Body*>(data))(i); }, &body, count);
}

void clear(const Tensor& out) {
  if (out.count() > 0) std::memset(out.data, 0, static_cast<size_t>(out.count() * bytes_of(out.type)));
}

}  // namespace

Scratch::Scratch(const Runtime& runtime, size_t bytes)
    : runtime_(&runtime), data_(runtime.allocate(runtime.self, std::max<size_t>(bytes, 1))) {
  if (data_ == nullptr) throw std::bad_alloc();
}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
  std::swap(runtime_, other.runtime_);
  std::swap(data_, other.data_);
  return *this;
}

Scratch::~Scratch() {
  if (data_ != nullptr) runtime_->release(runtime_->self, data_);
}

void Call::run(const Variant& variant, CallRuntime& call_runtime, const Tensor& out, float* statistics) {
  if ((out.type == E::int8) != !quant_scale_.empty()) {
    refuse(&Rules::scales, std::string("attention_out is ") + (out.type == E::int8 ? "" : "not ") + "int8 " +
                               (out.type == E::int8 ? "without" : "beside") + " the input quant_scale2");
  }
  if (query_.size == 0) {  // then a row attends no key
    clear(out);
    if (statistics != nullptr) fill_statistics(statistics);
    return;
  }
  const Runtime runtime = call_runtime.runtime();
  try {
    if (uses_decode_kernel()) {
      decode_rows(variant, call_runtime, runtime, out);
    } else {
      attend(variant, call_runtime, runtime, out, statistics);
    }
  } catch (const std::bad_alloc&) {
    call_runtime.finish(Outcome::out_of_memory, node_);
  }
}

// Runs the kernel of FlashAttentionScore.
void Call::attend(const Variant& variant, CallRuntime& call_runtime, const Runtime& runtime, const Tensor& out,
                  float* statistics) {
  const Tensor& query = in_[input_query];
  const bool in_float32 = antiquantised() || !quant_scale_.empty();
  const E type = in_float32 ? E::float32 : query.type;
  problem_.type = type_of(type);
  problem_.empty_rows = zero_rows_ || problem_.sink != nullptr ? EmptyRows::zero : EmptyRows::mean;
  Scratch query_floats, key_memory, value_memory, rope_memory, results, max, sum;
  const void* queries = query.data;
  if (type != query.type) {
    query_floats = Scratch(runtime, static_cast<size_t>(query.count()) * sizeof(float));
    auto* converted = query_floats.as<float>();
    for (int64_t i = 0; i < query.count(); ++i) converted[i] = reference::read(query.data, i, type_of(query.type));
    queries = converted;
  }
  problem_.query = query_.strided(const_cast<void*>(queries));
  const auto read = [&](const KvCache& cache, Scratch& memory) {
    return needs_gather(cache, type) ? gather(cache, type, runtime, memory) : view_in_place(cache);
  };
  const KvView key = read(key_, key_memory);
  const KvView value = read(value_, value_memory);
  const KvView rope = problem_.rope_size == 0 ? KvView{} : read(key_rope_, rope_memory);
  const auto strided = [](const KvView& view, size_t n) {
    return Strided{const_cast<void*>(view.data[n]), view.head[n], view.row};
  };
  problem_.key = strided(key, 0);
  problem_.value = strided(value, 0);
  if (problem_.rope_size != 0) {
    problem_.query_rope = query_rope_.strided(in_[input_query_rope].data);
    problem_.key_rope = strided(rope, 0);
  }
  const size_t numbers = static_cast<size_t>(out.count());
  if (in_float32) results = Scratch(runtime, numbers * sizeof(float));
  problem_.out = out_.strided(in_float32 ? results.as<void>() : out.data);
  std::vector<Sequence> sequences;
  std::vector<int64_t> entry_of;
  int64_t rows = 0;
  for (int64_t i = 0; i < batch(); ++i) {
    if (entries_[i].rows == 0 || keys_of(i) == 0) continue;
    Sequence s;
    fill_sequence(i, s);
    if (s.query_length == 0) continue;
    const int64_t row = entries_[i].first_row + s.query;
    const int64_t b = batch_in_tensor(i);
    s.query = b * query_.batch_stride + row * query_.row_stride;
    s.query_rope = b * query_rope_.batch_stride + row * query_rope_.row_stride;
    s.out = b * out_.batch_stride + row * out_.row_stride;
    s.key = key.offset[i];
    s.value = value.offset[i];
    if (problem_.rope_size != 0) s.key_rope = rope.offset[i];
    s.statistics = rows * a_.heads * kStatisticsWidth;
    s.statistics_head = s.query_length * kStatisticsWidth;
    s.statistics_row = kStatisticsWidth;
    rows += s.query_length;
    sequences.push_back(s);
    entry_of.push_back(i);
  }
  if (rows != query_.batch * query_.length || value_.size == 0) {
    clear(out);
  }
  if (statistics != nullptr) {
    fill_statistics(statistics);
    const size_t count = static_cast<size_t>(rows * a_.heads * kStatisticsWidth);
    max = Scratch(runtime, count * sizeof(float));
    sum = Scratch(runtime, count * sizeof(float));
    problem_.softmax_max = max.as<float>();
    problem_.softmax_sum = sum.as<float>();
  }
  if (sequences.empty()) return;
  problem_.sequences = sequences.data();
  problem_.sequence_count = static_cast<int64_t>(sequences.size());
  if (key.data.size() == 1) {
    call_runtime.finish(variant.attention(problem_, runtime), node_);
  } else {
    problem_.sequence_count = 1;
    for (size_t n = 0; n < sequences.size(); ++n) {
      problem_.sequences = &sequences[n];
      problem_.key = strided(key, static_cast<size_t>(entry_of[n]));
      problem_.value = strided(value, static_cast<size_t>(entry_of[n]));
      call_runtime.finish(variant.attention(problem_, runtime), node_);
    }
  }
  if (statistics != nullptr) write_statistics(sequences, entry_of, max.as<float>(), sum.as<float>(), statistics);
  if (!in_float32) return;
  const auto heads = static_cast<size_t>(a_.heads);
  in_parallel(runtime, sequences.size() * heads, [&](size_t task) {
    const Sequence& s = sequences[task / heads];
    const auto head = static_cast<int64_t>(task % heads);
    for (int64_t i = 0; i < s.query_length; ++i) {
      const int64_t at = s.out + head * out_.head_stride + i * out_.row_stride;
      convert_row(results.as<float>() + at, head, static_cast<char*>(out.data) + at * bytes_of(out.type), out.type);
    }
  });
  call_runtime.finish(Outcome::done, node_);
}

// Converts one row of float32 results of a head to the type of attention_out.
void Call::convert_row(const float* from, int64_t head, void* to, E type) const {
  const int64_t size = value_.size;
  if (type != E::int8) {
    for (int64_t d = 0; d < size; ++d) reference::write(to, d, from[d], type_of(type));
    return;
  }
  const int64_t first = quant_scale_.size() == 1 ? 0 : head * size;
  const int64_t step = quant_scale_.size() == 1 ? 0 : 1;
  for (int64_t d = 0; d < size; ++d) {
    const int64_t at = first + d * step;
    const float result = from[d] * quant_scale_[at] + (quant_offset_.empty() ? 0.0f : quant_offset_[at]);
    const float rounded = std::isnan(result) ? -128.0f : std::fmin(127.0f, std::fmax(-128.0f, std::nearbyint(result)));
    static_cast<int8_t*>(to)[d] = static_cast<int8_t>(rounded);
  }
}

// Sets softmax_lse of every row to that of a row that attends no key.
void Call::fill_statistics(float* out) const {
  std::fill_n(out, query_.batch * query_.length * a_.heads, std::numeric_limits<float>::infinity());
}

// Writes softmax_lse = softmax_max + ln(softmax_sum): [B,N1,S1,1], or [T,N1,1] in packed layouts. Rows that attend no
// key keep their value.
void Call::write_statistics(const std::vector<Sequence>& sequences, const std::vector<int64_t>& entry_of,
                            const float* max, const float* sum, float* out) const {
  for (size_t n = 0; n < sequences.size(); ++n) {
    const Sequence& s = sequences[n];
    const int64_t b = batch_in_tensor(entry_of[n]);
    const int64_t row = (s.query - b * query_.batch_stride) / query_.row_stride;
    for (int64_t head = 0; head < a_.heads; ++head) {
      for (int64_t i = 0; i < s.query_length; ++i) {
        const int64_t from = s.statistics + head * s.statistics_head + i * s.statistics_row;
        const int64_t to = a_.packed() ? (row + i) * a_.heads + head
                                       : (b * a_.heads + head) * query_.length + row + i;
        const bool may_be_empty = problem_.sink == nullptr ? max[from] == kLowest
                                                           : max[from] == problem_.sink[head] && sum[from] == 1.0f;
        if (may_be_empty && attends_nothing(s, i)) continue;
        out[to] = max[from] + std::log(sum[from]);
      }
    }
  }
}

bool Call::attends_nothing(const Sequence& s, int64_t row) const {
  for (int64_t j = std::max<int64_t>(0, row + s.band_first); j < s.key_length && j - row <= s.band_last; ++j) {
    if (problem_.mask == nullptr || problem_.mask[s.mask + row * problem_.mask_row + j] == 0) return false;
  }
  return true;
}

// Whether the kernel of IncreFlashAttention runs the call. It runs every call with an int8 query, and other calls if it
// can read the keys in place and supports all inputs and attributes of the call.
bool Call::uses_decode_kernel() const {
  if (has_int8_query()) return true;
  if (!single_row_ || a_.statistics || problem_.sink != nullptr || problem_.slopes != nullptr) return false;
  if (key_.prefix != nullptr || key_.scales.token != 0 || value_.scales.token != 0) return false;
  if (query_.size > kMaxDecodeHeadSize) return false;
  return key_.block_stride == 0 ? antiquantised() : pages_have_equal_strides();
}

// Whether the pages of key and value have the same strides, and contiguous heads.
bool Call::pages_have_equal_strides() const {
  return key_.chunk == key_.size && value_.chunk == value_.size && key_.head_stride == value_.head_stride &&
         key_.row_stride == value_.row_stride;
}

// Scales or offsets as [key_heads][size], which the kernel of IncreFlashAttention takes.
std::vector<float> Call::expand_to_channels(const Scales& scales, const std::vector<float>& numbers,
                                            int64_t size) const {
  std::vector<float> out;
  for (int64_t n = 0; n < a_.key_heads && !numbers.empty(); ++n) {
    for (int64_t d = 0; d < size; ++d) out.push_back(numbers[n * scales.head + d * scales.channel]);
  }
  return out;
}

// Whether the kernel of IncreFlashAttention reads the pages in place.
bool Call::decodes_pages() const { return key_.block_stride != 0 && pages_have_equal_strides(); }

// The keys or the values of a cache for the kernel of IncreFlashAttention. `memory` holds them if they are gathered.
KvView Call::view_for_decode(const KvCache& cache, const Runtime& runtime, Scratch& memory) const {
  if (decodes_pages()) {
    const std::vector<int64_t> begins(entries_.size());
    return KvView{{cache.tensors[0]->data}, {cache.head_stride}, cache.row_stride, begins};
  }
  const E type = in_[input_key].type;
  return needs_gather(cache, type) ? gather(cache, type, runtime, memory) : view_in_place(cache);
}

// Writes the mask of row `row` of a sequence, which combines atten_mask and the band. Returns whether the row attends a
// key.
bool Call::write_row_mask(const Sequence& s, int64_t row, uint8_t* to) const {
  bool attends = false;
  for (int64_t j = 0; j < s.key_length; ++j) {
    const bool outside = j - row < s.band_first || j - row > s.band_last;
    to[j] = outside || (problem_.mask != nullptr && problem_.mask[s.mask + row * problem_.mask_row + j] != 0);
    attends = attends || to[j] == 0;
  }
  return attends;
}

// The query rows of all batch entries that have keys.
DecodeRows Call::list_decode_rows(const KvView& key, const KvView& value, const Runtime& runtime) const {
  const int64_t key_bytes = bytes_of(in_[input_key].type);
  std::vector<Sequence> sequences(entries_.size());
  int64_t mask_bytes = 0;
  for (int64_t i = 0; i < batch(); ++i) {
    if (entries_[i].rows == 0 || keys_of(i) == 0) continue;
    fill_sequence(i, sequences[i]);
    mask_bytes += sequences[i].query_length * sequences[i].key_length;
  }
  DecodeRows rows;
  const bool masked = in_.has(input_atten_mask);
  if (masked) rows.masks = Scratch(runtime, static_cast<size_t>(mask_bytes));
  uint8_t* row_mask = rows.masks.as<uint8_t>();
  for (int64_t i = 0; i < batch(); ++i) {
    const Sequence& s = sequences[i];
    const size_t tensor = key.data.size() == 1 ? 0 : static_cast<size_t>(i);
    for (int64_t r = 0; r < s.query_length; ++r) {
      DecodeEntry entry;
      entry.key = static_cast<const char*>(key.data[tensor]) + key.offset[i] * key_bytes;
      entry.value = static_cast<const char*>(value.data[tensor]) + value.offset[i] * key_bytes;
      if (decodes_pages()) {
        const Tensor& table = in_[input_block_table];
        entry.blocks = static_cast<const int32_t*>(table.data) + i * table.dims[1];
      }
      entry.length = s.key_length;
      entry.head_stride = key.head[tensor];
      entry.pse = s.pse + r * s.pse_row;
      bool zero = false;
      if (masked) {
        const bool attends = write_row_mask(s, r, row_mask);
        entry.mask = row_mask;
        row_mask += s.key_length;
        zero = zero_rows_ && !attends;
      }
      rows.entries.push_back(entry);
      rows.places.push_back({i, entries_[i].first_row + s.query + r, zero});
    }
  }
  return rows;
}

// Copies the query of each row to [entry][head][size].
void Call::gather_queries(const DecodeRows& rows, char* to) const {
  const Tensor& query = in_[input_query];
  const int64_t bytes = bytes_of(query.type);
  const int64_t row_bytes = query_.size * bytes;
  const auto* from = static_cast<const char*>(query.data);
  for (const DecodeRows::Place& place : rows.places) {
    for (int64_t head = 0; head < a_.heads; ++head, to += row_bytes) {
      const int64_t at = place.batch * query_.batch_stride + head * query_.head_stride + place.row * query_.row_stride;
      std::memcpy(to, from + at * bytes, static_cast<size_t>(row_bytes));
    }
  }
}

// Sets the scales and offsets of int8 keys, values, queries and results. `expanded` is memory for them.
void Call::set_decode_scales(Decode& decode, std::vector<float> (&expanded)[4]) const {
  const bool per_channel = key_.scales.head + key_.scales.channel + value_.scales.head + value_.scales.channel != 0;
  const auto kernel_numbers = [&](const Scales& scales, const std::vector<float>& numbers, std::vector<float>& memory) {
    if (per_channel) memory = expand_to_channels(scales, numbers, query_.size);
    const std::vector<float>& used = per_channel ? memory : numbers;
    return used.empty() ? nullptr : used.data();
  };
  decode.key_scale = kernel_numbers(key_.scales, key_.scales.scale, expanded[0]);
  decode.key_offset = kernel_numbers(key_.scales, key_.scales.offset, expanded[1]);
  decode.value_scale = kernel_numbers(value_.scales, value_.scales.scale, expanded[2]);
  decode.value_offset = kernel_numbers(value_.scales, value_.scales.offset, expanded[3]);
  decode.antiquant_per_channel = per_channel;
  decode.quant_scale = quant_scale_.empty() ? nullptr : quant_scale_.data();
  decode.quant_offset = quant_offset_.empty() ? nullptr : quant_offset_.data();
  decode.quant_per_channel = quant_scale_.size() > 1;
  decode.dequant_scale1 = dequant_scale1_;
  decode.quant_scale1 = quant_scale1_;
  decode.dequant_scale2 = dequant_scale2_;
}

// Copies results [entry][head][size] to their rows of attention_out.
void Call::scatter_results(const DecodeRows& rows, const char* results, const Tensor& out) const {
  const int64_t bytes = bytes_of(out.type);
  const int64_t row_bytes = query_.size * bytes;
  const std::vector<float> zeros(static_cast<size_t>(query_.size));
  for (const DecodeRows::Place& place : rows.places) {
    for (int64_t head = 0; head < a_.heads; ++head, results += row_bytes) {
      const int64_t at = place.batch * out_.batch_stride + head * out_.head_stride + place.row * out_.row_stride;
      char* to = static_cast<char*>(out.data) + at * bytes;
      if (place.zero) {
        convert_row(zeros.data(), head, to, out.type);
      } else {
        std::memcpy(to, results, static_cast<size_t>(row_bytes));
      }
    }
  }
}

// Runs the kernel of IncreFlashAttention. Each query row becomes a batch entry of the kernel. The kernel's query and
// results are [entry][head][size].
void Call::decode_rows(const Variant& variant, CallRuntime& call_runtime, const Runtime& runtime, const Tensor& out) {
  Scratch key_memory, value_memory;
  const KvView key = view_for_decode(key_, runtime, key_memory);
  const KvView value = view_for_decode(value_, runtime, value_memory);
  const DecodeRows rows = list_decode_rows(key, value, runtime);
  clear(out);
  if (rows.entries.empty()) return;
  const E query_type = in_[input_query].type;
  const size_t numbers = rows.entries.size() * static_cast<size_t>(a_.heads * query_.size);
  const Scratch queries(runtime, numbers * static_cast<size_t>(bytes_of(query_type)));
  const Scratch results(runtime, numbers * static_cast<size_t>(bytes_of(out.type)));
  gather_queries(rows, queries.as<char>());
  Decode decode;
  decode.query_cell = cell_of(query_type);
  decode.cell = cell_of(in_[input_key].type);
  decode.out_cell = cell_of(out.type);
  decode.pse_cell = cell_of(problem_.pse_type);
  decode.heads = a_.heads;
  decode.key_heads = a_.key_heads;
  decode.size = query_.size;
  decode.query = queries.as<void>();
  decode.out = results.as<void>();
  decode.row_stride = key.row;
  if (decodes_pages()) {
    decode.block_size = a_.block_size;
    decode.block_stride = key_.block_stride;
  }
  decode.entries = rows.entries.data();
  decode.entry_count = static_cast<int64_t>(rows.entries.size());
  decode.pse = problem_.pse;
  decode.pse_head = pse_head_;
  decode.scale = a_.scale;
  std::vector<float> expanded[4];
  set_decode_scales(decode, expanded);
  call_runtime.finish(variant.decode(decode, runtime), node_);
  scatter_results(rows, results.as<char>(), out);
}

}  // namespace fa::prompt
