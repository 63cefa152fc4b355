// One call of PromptFlashAttention or FusedInferAttentionScore: its tensors checked, and the Problem (or, of an int8 query,
// the Decode) made of them.
//
// Both are the attention of FlashAttentionScore with other words, so they run on its kernels. What those kernels do not
// read is brought into a form that they do: pages, prefixes and int8 keys are gathered into memory of the call. Beside
// int8 keys or results everything is float32 there, and the results are converted at the end. One row of query on pages
// or int8 keys is what IncreFlashAttention's kernel reads as it is.
//
//     Call call(node, op, attributes, inputs);
//     ... allocate outputs of call.out_dims() and call.statistics_dims() ...
//     call.run(variant, runtime, out, statistics);
#pragma once

#include <utility>

#include "../variants.hpp"
#include "inputs.hpp"

namespace fa::prompt {

// Memory of one call, from the runtime; throws where there is none.
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

// Queries [first, first + rows) of a batch entry and its keys [key_first, key_first + keys), those of a prefix not
// counted; of packed layouts both from the beginning of the tensor.
struct Entry {
  int64_t first = 0;
  int64_t rows = 0;
  int64_t key_first = 0;
  int64_t keys = 0;
};

// What the numbers of an int8 tensor stand for: (x + offset) * scale. At head n, channel d and token t the scale is
// scale[n * head + d * channel + batch entry * batch + t * token].
struct Scales {
  std::vector<float> scale;
  std::vector<float> offset;  // empty: none
  int64_t batch = 0, head = 0, channel = 0, token = 0;
};

// Where the keys lie, or the values, or the keys' rope parts.
struct Pool {
  std::vector<const Tensor*> tensors;  // one, or one for each batch entry
  std::vector<Operand> plain;          // of each, where they are no pages
  int64_t size = 0;                    // of a head
  int64_t block_stride = 0;            // of pages; 0: there are none
  int64_t head_stride = 0, row_stride = 0;
  int64_t unit = 0, unit_stride = 0;   // so many numbers of a head lie side by side
  const Tensor* prefix = nullptr;
  Operand prefix_form;
  Scales scales;
};

// As the kernels read a Pool: numbers of the problem's type, at offset[entry] head 0 of the entry's first key.
struct View {
  std::vector<const void*> data;  // one, or one for each batch entry
  std::vector<int64_t> head;      // stride, of each
  int64_t row = 0;
  std::vector<int64_t> offset;
};

class Call {
 public:
  Call(const std::string& node, const Operator& op, const Attributes& attributes, const Inputs& inputs);

  const Dims& out_dims() const { return out_dims_; }
  Dims statistics_dims() const;

  // `out` has the type that the operator was registered for; `statistics` is null where nobody reads them.
  void run(const Variant& variant, CallRuntime& calls, const Tensor& out, float* statistics);

 private:
  std::string text(size_t input) const { return std::string("input ") + op_.names[input]; }
  [[noreturn]] void refuse(Topic topic, const std::string& what) const { fa::refuse(node_, op_.rules.*topic, what); }
  [[noreturn]] void wrong_shape(Topic topic, size_t input, const std::string& expected) const;
  void want_type(Topic topic, size_t input, std::initializer_list<E> types) const;
  void want_none(Topic topic, std::initializer_list<size_t> inputs, const std::string& beside) const;
  std::vector<float> floats(const Tensor& tensor) const;
  bool listed() const { return a_.keys > 1; }
  bool integers() const { return in_[input_query].type == E::int8; }
  bool antiquantised() const { return !integers() && in_[input_key].type == E::int8; }
  bool left_padded() const { return in_.has(input_query_padding_size) || in_.has(input_kv_padding_size); }
  int64_t batch() const { return static_cast<int64_t>(entries_.size()); }
  int64_t keys_of(int64_t entry) const { return prefix_ + entries_[entry].keys; }
  int64_t batch_in_tensor(int64_t entry) const { return a_.packed() ? 0 : entry; }

  // call.cc: sizes
  void read_query();
  void read_rows();
  std::vector<int64_t> read_ends(size_t input, int64_t tokens) const;
  std::vector<int64_t> read_lengths(size_t input, const std::vector<int64_t>& room) const;
  int64_t read_padding(size_t input, size_t lengths) const;
  void read_rope();

  // keys.cc: where keys and values lie
  void read_pools();
  Pool read_pool(size_t input, size_t prefix, int64_t heads);
  void read_pages(size_t input, Pool& pool) const;
  void read_prefix(size_t input, Pool& pool) const;
  void read_room(const Pool& pool, std::vector<int64_t>& room) const;
  void read_key_lengths();
  void read_table() const;
  void read_antiquant();
  Scales read_scales(size_t scale, size_t offset, int64_t part, int64_t mode, int64_t size) const;
  View view_of(const Pool& pool) const;
  View gathered(const Pool& pool, E type, const Runtime& runtime, Scratch& memory) const;
  bool is_gathered(const Pool& pool, E type) const;

  // terms.cc: masks, biases, scales
  void read_mask();
  void read_bias();
  void read_sink();
  void read_scales_of_results();
  float scalar(size_t input) const;
  void read_integers();
  void place(int64_t entry, Sequence& sequence) const;

  // run.cc
  void attend(const Variant& variant, CallRuntime& calls, const Runtime& runtime, const Tensor& out, float* statistics);
  void attend_by_rows(const Variant& variant, CallRuntime& calls, const Runtime& runtime, const Tensor& out);
  bool decodes() const;
  bool pages_lie_alike() const;
  std::vector<float> by_channel(const Scales& scales, const std::vector<float>& numbers, int64_t size) const;
  void fill_statistics(float* out) const;
  void write_statistics(const std::vector<Sequence>& sequences, const std::vector<int64_t>& owners, const float* max,
                        const float* sum, float* out) const;
  bool nothing_attended(const Sequence& sequence, int64_t row) const;
  void convert_row(const float* from, int64_t head, void* to, E type) const;

  const std::string& node_;
  const Operator& op_;
  const Attributes& a_;
  const Inputs& in_;
  Operand query_;
  Operand query_rope_;
  Operand out_;
  Dims out_dims_;
  bool one_row_ = false;   // the path of decoding: masks by key, no mode
  bool zero_rows_ = false;
  std::vector<Entry> entries_;
  std::vector<int64_t> room_;  // of keys, by batch entry
  int64_t prefix_ = 0;         // its length
  int64_t columns_ = 0;        // that a mask or bias must have
  Pool key_, value_, key_rope_;
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
