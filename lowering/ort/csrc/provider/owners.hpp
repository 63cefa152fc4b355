// Owners of the runtime's objects.
#pragma once

#include <memory>

#include "../op.hpp"
#include "ep_abi.hpp"

namespace fa::provider {

template <auto& kRelease>
struct Deleter {
  ort::Api api;
  template <class Object>
  void operator()(Object* object) const {
    kRelease(api, object);
  }
};
using EnvPtr = std::unique_ptr<ort::Env, Deleter<ort::ReleaseEnv>>;
using SessionPtr = std::unique_ptr<ort::Session, Deleter<ort::ReleaseSession>>;
using OptionsPtr = std::unique_ptr<ort::SessionOptions, Deleter<ort::ReleaseSessionOptions>>;
using PairsPtr = std::unique_ptr<ort::KeyValuePairs, Deleter<ort::ReleaseKeyValuePairs>>;
using TensorInfoPtr = std::unique_ptr<ort::TensorInfo, Deleter<ort::ReleaseTensorTypeAndShapeInfo>>;
using TypePtr = std::unique_ptr<ort::TypeInfo, Deleter<ort::ReleaseTypeInfo>>;
using ValuePtr = std::unique_ptr<ort::Value, Deleter<ort::ReleaseValue>>;

// The runtime's only environment, which exists already. The reference keeps it until its sessions are released.
inline EnvPtr environment(ort::Api api) {
  ort::Env* env = nullptr;
  check(api, ort::CreateEnv(api, ort::Severity::warning, "fa_compiler", &env));
  return EnvPtr(env, {api});
}

inline OptionsPtr copy_of(ort::Api api, const ort::SessionOptions* options) {
  ort::SessionOptions* copy = nullptr;
  check(api, ort::CloneSessionOptions(api, options, &copy));
  return OptionsPtr(copy, {api});
}

}  // namespace fa::provider
