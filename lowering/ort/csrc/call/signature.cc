#include "signature.hpp"

#include <algorithm>

namespace fa {

void Diagnostics::invalid(Topic topic, const std::string& text) const { refuse(node, signature.rules.*topic, text); }

void Diagnostics::unsupported(const std::string& what) const {
  throw Error{ort::ErrorCode::not_implemented, node + ": " + what + " is not supported by the CPU kernel"};
}

CallInputs::CallInputs(ort::Api api, const ort::KernelContext* context, const Signature& signature)
    : signature_(signature), all_(tensors_of(api, context, 1 + *std::ranges::max_element(signature.positions))) {}

}  // namespace fa
