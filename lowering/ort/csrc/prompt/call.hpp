// One call of PromptFlashAttention or FusedInferAttentionScore. It checks the tensors, and runs one of two kernels.
//
// The kernel of FlashAttentionScore computes the same attention, but it does not read pages, prefixes and int8 keys.
// They are gathered into memory of the call first. With int8 keys or int8 results the kernel computes in float32, and
// the results are converted at the end.
//
// The kernel of IncreFlashAttention reads pages and int8 keys in place. It runs calls with an int8 query, and calls
// with one query row and pages or int8 keys.
//
//     Call call(node, op, attributes, inputs);
//     ... allocate outputs of call.out_dims() and call.statistics_dims() ...
//     call.run(variant, runtime, out, statistics);
#pragma once

#include <utility>

#include "../variants.hpp"
#include "inputs.hpp"

namespace fa::prompt {

// Memory from the runtime. The constructor throws std::bad_alloc if there is none.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Runtime& runtime, size_t bytes);
  Scratch(Scratch&& other) noexcept : runtime_(other.runtime_), data_(std::exchange(other.data_, nullptr)) {}
  Scratch& operator=(Scratch&& other) noexcept;
  ~Scratch();

  template <class T>
  T* as() const { return static_cast<T*>(data_); }

 private:
  const Runtime* runtime_ = nullptr;
  void* data_ = nullptr;
};

// The queries [first_row, first_row + rows) and the keys [first_key, first_key + keys) of a batch entry, without the
// keys of the prefix. In packed layouts both count from the beginning of the tensor, otherwise from that of the batch
// entry.
struct Entry {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_key = 0;
  int64_t keys = 0;
};

// Antiquantisation of an int8 tensor: a number x means (x + offset) * scale. For batch entry b, head n, channel d and
// token t, the index into `scale` and `offset` is b * batch + n * head + d * channel + t * token.
struct Scales {
  std::vector<float> scale;
  std::vector<float> offset;  // empty: none
  int64_t batch = 0, head = 0, channel = 0, token = 0;
};

// The tensors of the keys, of the values, or of the keys' rope parts. They are plain tensors or pages of a pool.
struct KvCache {
  std::vector<const Tensor*> tensors;  // one, or one for each batch entry
  std::vector<Operand> operands;       // of each tensor; empty if there are pages
  int64_t size = 0;                    // of a head
  int64_t block_stride = 0;            // of a page; 0: there are no pages
  int64_t head_stride = 0, row_stride = 0;
  int64_t chunk = 0, chunk_stride = 0;  // a head is stored as chunks of `chunk` contiguous numbers
  const Tensor* prefix = nullptr;
  Operand prefix_operand;
  Scales scales;
};

// A KvCache in the form that the kernels read. Head 0 of the first key of batch entry i is at offset[i].
struct KvView {
  std::vector<const void*> data;  // one, or one for each batch entry
  std::vector<int64_t> head;      // head stride of each
  int64_t row = 0;                // row stride
  std::vector<int64_t> offset;
};

// The query rows that the kernel of IncreFlashAttention computes, each as a batch entry of the kernel.
struct DecodeRows {
  struct Place {
    int64_t batch;
    int64_t row;
    bool zero;  // the result is 0, because the row attends no key
  };

  std::vector<DecodeEntry> entries;
  std::vector<Place> places;  // of each entry, in query and attention_out
  Scratch masks;              // [entries][keys], if there is an atten_mask
};

class Call {
 public:
  Call(const std::string& node, const Operator& op, const Attributes& attributes, const Inputs& inputs);

  const Dims& out_dims() const { return out_dims_; }
  Dims statistics_dims() const;

  // Computes `out`, whose type is that of the registered operator. `statistics` is softmax_lse, or null if nobody reads
  // it.
  void run(const Variant& variant, CallRuntime& call_runtime, const Tensor& out, float* statistics);

 private:
  std::string text(size_t input) const { return std::string("input ") + op_.names[input]; }
  [[noreturn]] void refuse(Topic topic, const std::string& what) const { fa::refuse(node_, op_.rules.*topic, what); }
  [[noreturn]] void wrong_shape(Topic topic, size_t input, const std::string& expected) const;
  void want_type(Topic topic, size_t input, std::initializer_list<E> types) const;
  void want_none(Topic topic, std::initializer_list<size_t> inputs, const std::string& beside) const;
  std::vector<float> floats(const Tensor& tensor) const;
  // Whether key and value are lists with one tensor for each batch entry.
  bool listed() const { return a_.keys > 1; }
  bool has_int8_query() const { return in_[input_query].type == E::int8; }
  bool antiquantised() const { return !has_int8_query() && in_[input_key].type == E::int8; }
  bool left_padded() const { return in_.has(input_query_padding_size) || in_.has(input_kv_padding_size); }
  int64_t batch() const { return static_cast<int64_t>(entries_.size()); }
  int64_t keys_of(int64_t entry) const { return prefix_ + entries_[entry].keys; }
  int64_t batch_in_tensor(int64_t entry) const { return a_.packed() ? 0 : entry; }

  // call.cc: sizes
  void read_query();
  void read_rows();
  std::vector<int64_t> read_ends(size_t input, int64_t tokens) const;
  std::vector<int64_t> read_lengths(size_t input, const std::vector<int64_t>& capacity) const;
  int64_t read_padding(size_t input, size_t lengths) const;
  void read_rope();

  // keys.cc: the tensors of keys and values
  void read_caches();
  KvCache read_cache(size_t input, size_t prefix, int64_t heads);
  void read_pages(size_t input, KvCache& cache) const;
  void read_prefix(size_t input, KvCache& cache) const;
  void read_capacity(const KvCache& cache, std::vector<int64_t>& capacity) const;
  void read_key_lengths();
  void read_table() const;
  void read_antiquant();
  Scales read_scales(size_t scale, size_t offset, int64_t part, int64_t mode, int64_t size) const;
  KvView view_in_place(const KvCache& cache) const;
  KvView gather(const KvCache& cache, E type, const Runtime& runtime, Scratch& memory) const;
  bool needs_gather(const KvCache& cache, E type) const;

  // terms.cc: masks, biases, scales
  void read_mask();
  void read_bias();
  void read_sink();
  void read_result_scales();
  float scalar(size_t input) const;
  void read_int8_query();
  void fill_sequence(int64_t entry, Sequence& sequence) const;

  // run.cc: the two kernels
  void attend(const Variant& variant, CallRuntime& call_runtime, const Runtime& runtime, const Tensor& out,
              float* statistics);
  void decode_rows(const Variant& variant, CallRuntime& call_runtime, const Runtime& runtime, const Tensor& out);
  bool uses_decode_kernel() const;
  bool decodes_pages() const;
  KvView view_for_decode(const KvCache& cache, const Runtime& runtime, Scratch& memory) const;
  bool write_row_mask(const Sequence& sequence, int64_t row, uint8_t* to) const;
  DecodeRows list_decode_rows(const KvView& key, const KvView& value, const Runtime& runtime) const;
  void gather_queries(const DecodeRows& rows, char* to) const;
  void set_decode_scales(Decode& decode, std::vector<float> (&expanded)[4]) const;
  void scatter_results(const DecodeRows& rows, const char* results, const Tensor& out) const;
  bool pages_have_equal_strides() const;
  std::vector<float> expand_to_channels(const Scales& scales, const std::vector<float>& numbers, int64_t size) const;
  void fill_statistics(float* out) const;
  void write_statistics(const std::vector<Sequence>& sequences, const std::vector<int64_t>& entry_of, const float* max,
                        const float* sum, float* out) const;
  bool attends_nothing(const Sequence& sequence, int64_t row) const;
  void convert_row(const float* from, int64_t head, void* to, E type) const;

  const std::string& node_;
  const Operator& op_;
  const Attributes& a_;
  const Inputs& in_;
  Operand query_;
  Operand query_rope_;
  Operand out_;
  Dims out_dims_;
  bool single_row_ = false;  // the mask is one of keys, and sparse_mode has no effect
  bool zero_rows_ = false;   // rows without a key are 0
  std::vector<Entry> entries_;
  std::vector<int64_t> key_capacity_;  // see read_capacity
  int64_t prefix_ = 0;                 // keys of the prefix
  int64_t mask_columns_ = 0;           // the least number of columns of a mask or bias
  KvCache key_, value_, key_rope_;
  Problem problem_;
  int64_t mask_batch_ = 0;
  int64_t pse_batch_ = 0;
  int64_t pse_head_ = 0;
  int64_t pse_row_ = 0;
  int64_t slopes_batch_ = 0;
  int64_t slope_start_ = 0;
  std::vector<float> sink_, quant_scale_, quant_offset_;
  float dequant_scale1_ = 0, quant_scale1_ = 0, dequant_scale2_ = 0;
};

}  // namespace fa::prompt
