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
    : signature_(signature) {
  size_t count = 0;
  check(api, ort::KernelContext_GetInputCount(api, context, &count));
  size_t most = count;
  for (size_t place : signature.place) most = std::max(most, place + 1);
  all_.resize(most);
  for (size_t i = 0; i < count; ++i) {
    const ort::Value* value = nullptr;
    check(api, ort::KernelContext_GetInput(api, context, i, &value));
    all_[i] = tensor_of(api, value);
  }
}

}  // namespace fa
