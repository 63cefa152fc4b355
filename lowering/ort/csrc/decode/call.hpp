// One call of IncreFlashAttention: its tensors checked, and the Decode made of them, which lives as long as the call.
#pragma once

#include "../decode.hpp"
#include "attributes.hpp"
#include "inputs.hpp"

namespace fa::incre_flash_attention {

class Call {
 public:
  Call(const std::string& node, const Attributes& attributes, const Inputs& inputs);

  const Dims& out_dims() const { return in_[input_query].dims; }

  // `out` has the type the operator was registered for.
  const Decode& decode(void* out, ort::Element type);

 private:
  std::string text(Input input) const { return std::string("input ") + kInputs[input]; }
  [[noreturn]] void refuse(Rule rule, const std::string& what) const;
  [[noreturn]] void wrong_shape(Rule rule, Input input, const std::string& expected) const;
  void want_type(Rule rule, Input input, std::initializer_list<ort::Element> types) const;
  const float* floats(Input input, size_t store);
  float scalar(Input input) const;

  // call.cc: sizes and strides
  void read_query();
  void read_caches();
  int64_t read_rows(const Dims& dims);
  void read_entries();
  std::vector<int64_t> read_lengths(const std::vector<int64_t>& room) const;
  void read_pages(int64_t entry, int64_t length);
  void read_padding(const std::vector<int64_t>& room, std::vector<int64_t>& first, std::vector<int64_t>& lengths) const;

  // terms.cc: masks, biases and scales
  void read_mask();
  void read_pse();
  void read_antiquant();
  void read_quantisation();
  void read_integers();

  const std::string& node_;
  const Attributes& a_;
  const Inputs& in_;
  bool paged_ = false;
  int64_t batch_ = 0;
  int64_t columns_ = 0;       // that a mask or bias must have
  std::vector<int64_t> first_;         // valid token of each entry
  std::vector<int64_t> head_strides_;  // of each tensor
  std::vector<DecodeEntry> entries_;
  std::vector<float> converted_[4];
  Decode decode_;
};

}  // namespace fa::incre_flash_attention
