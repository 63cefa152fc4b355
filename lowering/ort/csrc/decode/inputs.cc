#include "inputs.hpp"

#include <algorithm>

namespace fa::incre_flash_attention {

Inputs::Inputs(ort::Api api, const ort::KernelContext* context, int64_t keys, int64_t values)
    : keys_(keys), values_(values), all_(tensors_of(api, context, static_cast<size_t>(1 + keys + values))) {}

const Tensor& Inputs::operator[](Input input) const {
  if (input == input_query) return all_[0];
  if (input == input_key) return key(0);
  if (input == input_value) return value(0);
  const size_t position = 1 + static_cast<size_t>(keys_ + values_) + (input - input_pse_shift);
  return position < all_.size() && all_[position].present() && all_[position].count() > 0 ? all_[position] : none_;
}

}  // namespace fa::incre_flash_attention
