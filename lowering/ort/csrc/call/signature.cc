#include "signature.hpp"

#include <algorithm>

namespace fa {

void Complaints::invalid(Topic topic, const std::string& text) const {
  const int number = signature.constraint[static_cast<size_t>(topic)];
  throw Error{ort::ErrorCode::invalid_argument,
              node + ": " + text + " (" + signature.list + "." + std::to_string(number) + ")"};
}

void Complaints::unsupported(const std::string& what) const {
  throw Error{ort::ErrorCode::not_implemented, node + ": " + what + " is not supported by the CPU kernel"};
}

CallInputs::CallInputs(ort::Api api, const ort::KernelContext* context, const Signature& signature)
    : signature_(signature), all_(tensors_of(api, context, 1 + *std::ranges::max_element(signature.place))) {}

}  // namespace fa
