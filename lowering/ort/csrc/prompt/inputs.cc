#include "inputs.hpp"

namespace fa::prompt {

Inputs::Inputs(ort::Api api, const ort::KernelContext* context, const Operator& op, const Attributes& attributes)
    : keys_(attributes.keys), values_(attributes.values), inputs_(op.inputs),
      all_(tensors_of(api, context, static_cast<size_t>(1 + keys_ + values_))) {}

const Tensor& Inputs::operator[](size_t input) const {
  if (input == input_query) return all_[0];
  if (input == input_key) return key(0);
  if (input == input_value) return value(0);
  const size_t position = 1 + static_cast<size_t>(keys_ + values_) + (input - input_pse_shift);
  const bool given = input < inputs_ && position < all_.size() && all_[position].present() && all_[position].count() > 0;
  return given ? all_[position] : none_;
}

}  // namespace fa::prompt
