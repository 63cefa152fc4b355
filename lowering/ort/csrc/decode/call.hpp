// One call of IncreFlashAttention. It checks the tensors, and makes the Decode for the kernel. The Decode points to
// data of the Call, so it is valid as long as the Call lives.
#pragma once

#include "../decode.hpp"
#include "attributes.hpp"
#include "inputs.hpp"

namespace fa::incre_flash_attention {

class Call {
 public:
  Call(const std::string& node, const Attributes& attributes, const Inputs& inputs);

  const Dims& out_dims() const { return in_[input_query].dims; }

  // `type` is that of `out`, and of the output of the registered operator.
  const Decode& decode(void* out, ort::Element type);

 private:
  std::string text(Input input) const { return std::string("input ") + kInputs[input]; }
  [[noreturn]] void refuse(Rule rule, const std::string& what) const;
  [[noreturn]] void wrong_shape(Rule rule, Input input, const std::string& expected) const;
  void want_type(Rule rule, Input input, std::initializer_list<ort::Element> types) const;
  const float* floats(Input input, size_t slot);
  float scalar(Input input) const;

  // call.cc: sizes, strides and lengths
  void read_query();
  void read_caches();
  int64_t read_cache_strides(const Dims& dims);
  void read_entries();
  std::vector<int64_t> read_lengths(const std::vector<int64_t>& capacity) const;
  void read_pages(int64_t entry, int64_t length);
  void read_padding(const std::vector<int64_t>& capacity, std::vector<int64_t>& first_tokens,
                    std::vector<int64_t>& lengths) const;

  // terms.cc: masks, biases and scales
  void read_mask();
  void read_pse();
  void read_antiquant();
  void read_output_quantisation();
  void read_int8_query();

  const std::string& node_;
  const Attributes& a_;
  const Inputs& in_;
  bool paged_ = false;
  int64_t batch_ = 0;
  int64_t mask_columns_ = 0;           // the least number of columns of a mask or bias
  std::vector<int64_t> first_tokens_;  // the first valid token of each batch entry
  std::vector<int64_t> head_strides_;  // of each key tensor
  std::vector<DecodeEntry> entries_;
  std::vector<float> converted_[4];  // scales and offsets as float32
  Decode decode_;
};

}  // namespace fa::incre_flash_attention
