// Masks, biases and the scales of quantised calls.
#include "call.hpp"

#include <cstring>

#include "../reference.hpp"

namespace fa::incre_flash_attention {
namespace {

bool equal(const Dims& dims, const Dims& expected) { return dims == expected; }

}  // namespace

// atten_mask [B,..,keys], where the dimensions between are 1.
void Call::read_mask() {
  if (!in_.has(input_atten_mask)) return;
  want_type(rule::mask, input_atten_mask, {E::boolean, E::int8, E::uint8});
  const Tensor& mask = in_[input_atten_mask];
  bool matches = mask.rank() >= 2 && mask.rank() <= 4 && mask.dims[0] == batch_ && mask.dims.back() >= mask_columns_;
  for (size_t i = 1; matches && i + 1 < mask.rank(); ++i) matches = mask.dims[i] == 1;
  if (!matches) {
    const std::string ends = std::to_string(batch_) + ",..,keys from " + std::to_string(mask_columns_) + " on]";
    wrong_shape(rule::mask, input_atten_mask, "[" + ends + " with ones between");
  }
  for (int64_t i = 0; i < batch_; ++i) {
    entries_[i].mask = static_cast<const uint8_t*>(mask.data) + i * mask.dims.back() + first_tokens_[i];
  }
}

// pse_shift [B or 1,N1,1,keys].
void Call::read_pse() {
  if (!in_.has(input_pse_shift)) return;
  const E query = in_[input_query].type;
  want_type(rule::shift, input_pse_shift, {query == E::int8 ? E::float16 : query});
  const Tensor& pse = in_[input_pse_shift];
  const Dims& dims = pse.dims;
  if (dims.size() != 4 || (dims[0] != 1 && dims[0] != batch_) || dims[1] != a_.heads || dims[2] != 1 ||
      dims[3] < mask_columns_) {
    wrong_shape(rule::shift, input_pse_shift,
                "[" + std::to_string(batch_) + "," + std::to_string(a_.heads) + ",1,keys from " +
                    std::to_string(mask_columns_) + " on], or 1 as batch");
  }
  decode_.pse = pse.data;
  decode_.pse_cell = cell_of(pse.type);
  decode_.pse_head = dims[3];
  for (int64_t i = 0; i < batch_; ++i) {
    entries_[i].pse = (dims[0] == 1 ? 0 : i * a_.heads * dims[3]) + first_tokens_[i];
  }
}

// The numbers of an input as float32. If the input has another type, they are converted and kept in converted_[slot].
const float* Call::floats(Input input, size_t slot) {
  const Tensor& tensor = in_[input];
  if (tensor.type == E::float32) return static_cast<const float*>(tensor.data);
  const Type type = tensor.type == E::float16 ? Type::float16 : Type::bfloat16;
  std::vector<float>& out = converted_[slot];
  out.resize(static_cast<size_t>(tensor.count()));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = reference::to_float(static_cast<const uint16_t*>(tensor.data)[i], type);
  }
  return out.data();
}

// antiquant_scale and antiquant_offset of int8 keys and values. The key's numbers are the first half of each tensor.
void Call::read_antiquant() {
  const E query = in_[input_query].type;
  const bool quantised = decode_.cell == Cell::int8 && query != E::int8;
  for (Input input : {input_antiquant_scale, input_antiquant_offset}) {
    if (!in_.has(input)) continue;
    if (!quantised) {
      refuse(rule::antiquant, text(input) + " is given, expected none: keys are not int8 beside a float query");
    }
    want_type(rule::antiquant, input, {query});
    const Dims& dims = in_[input].dims;
    const int64_t n2 = a_.key_heads;
    const int64_t d = decode_.size;
    if (!equal(dims, {2}) && !equal(dims, {2, n2, 1, d}) && !equal(dims, {2, n2, d}) && !equal(dims, {2, n2 * d})) {
      wrong_shape(rule::antiquant, input,
                  "[2] or two for each of " + std::to_string(n2) + " heads of " + std::to_string(d));
    }
  }
  if (!quantised) return;
  if (!in_.has(input_antiquant_scale)) refuse(rule::antiquant, "input antiquant_scale is absent beside int8 keys");
  const Tensor& scale = in_[input_antiquant_scale];
  const Tensor& offset = in_[input_antiquant_offset];
  if (offset.present() && offset.dims != scale.dims) {
    wrong_shape(rule::antiquant, input_antiquant_offset, text_of(scale.dims) + " as antiquant_scale");
  }
  decode_.antiquant_per_channel = scale.rank() > 1;
  const int64_t half = scale.count() / 2;
  decode_.key_scale = floats(input_antiquant_scale, 0);
  decode_.value_scale = decode_.key_scale + half;
  if (!offset.present()) return;
  decode_.key_offset = floats(input_antiquant_offset, 1);
  decode_.value_offset = decode_.key_offset + half;
}

// quant_scale2 and quant_offset2 of int8 results: one number, or one for each channel of each head.
void Call::read_output_quantisation() {
  const Tensor& scale = in_[input_quant_scale2];
  const Tensor& offset = in_[input_quant_offset2];
  if (!scale.present()) {
    if (offset.present()) refuse(rule::output_quantisation, "input quant_scale2 is absent beside quant_offset2");
    return;
  }
  const bool bfloat16_query = in_[input_query].type == E::bfloat16;
  const int64_t n1 = a_.heads;
  const int64_t d = decode_.size;
  for (Input input : {input_quant_scale2, input_quant_offset2}) {
    const Tensor& tensor = in_[input];
    if (!tensor.present()) continue;
    want_type(rule::output_quantisation, input,
              bfloat16_query ? std::initializer_list<E>{E::float32, E::bfloat16}
                             : std::initializer_list<E>{E::float32});
    const Dims& s = tensor.dims;
    const bool per_channel = equal(s, {1, n1, 1, d}) || equal(s, {1, 1, n1, d}) || equal(s, {n1, 1, d}) ||
                             equal(s, {1, n1, d}) || equal(s, {1, 1, n1 * d}) || equal(s, {1, n1 * d}) ||
                             equal(s, {n1, d}) || equal(s, {n1 * d});
    if (!per_channel && !equal(s, {1})) {
      wrong_shape(rule::output_quantisation, input,
                  "[1] or one for each of " + std::to_string(n1) + " heads of " + std::to_string(d));
    }
  }
  if (offset.present() && (offset.dims != scale.dims || offset.type != scale.type)) {
    wrong_shape(rule::output_quantisation, input_quant_offset2, text_of(scale.dims) + " and the type of quant_scale2");
  }
  decode_.quant_per_channel = scale.count() > 1;
  decode_.quant_scale = floats(input_quant_scale2, 2);
  if (offset.present()) decode_.quant_offset = floats(input_quant_offset2, 3);
}

// The value of a scale with one number. A uint64 has the bits of a float32 in its lower half.
float Call::scalar(Input input) const {
  const Tensor& tensor = in_[input];
  if (tensor.count() != 1 || tensor.rank() > 1) wrong_shape(rule::output_quantisation, input, "[1]");
  if (tensor.type != E::uint64) return *static_cast<const float*>(tensor.data);
  const auto bits = static_cast<uint32_t>(*static_cast<const uint64_t*>(tensor.data));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The scales that an int8 query needs: dequant_scale1, quant_scale1 and dequant_scale2.
void Call::read_int8_query() {
  const bool int8_query = decode_.query_cell == Cell::int8;
  for (Input input : {input_dequant_scale1, input_quant_scale1, input_dequant_scale2}) {
    if (in_.has(input) == int8_query) continue;
    refuse(rule::output_quantisation,
           text(input) + (int8_query ? " is absent beside an int8 query" : " is given beside a float query"));
  }
  if (!int8_query) return;
  want_type(rule::output_quantisation, input_dequant_scale1, {E::float32, E::uint64});
  want_type(rule::output_quantisation, input_quant_scale1, {E::float32});
  want_type(rule::output_quantisation, input_dequant_scale2, {E::float32, E::uint64});
  decode_.dequant_scale1 = scalar(input_dequant_scale1);
  decode_.quant_scale1 = scalar(input_quant_scale1);
  decode_.dequant_scale2 = scalar(input_dequant_scale2);
}

}  // namespace fa::incre_flash_attention
