// The operators of this library, as domains that sessions and provider factories take.
#pragma once

#include <vector>

#include "ort_abi.hpp"

namespace fa {

// An option of our device, and the session option that ONNX Runtime makes of it where a session gets the device. Such a
// session has the domains of files already, and RegisterCustomOps adds nothing.
inline constexpr const char* kBringsOperators = "brings_operators";
inline constexpr const char* kHasOperators = "ep.facompilerexecutionprovider.brings_operators";

// The domains of files: those that RegisterCustomOps adds. They live as long as the library.
std::vector<ort::CustomOpDomain*> file_domains(ort::Api api);

// Adds the operators under a domain of its own, "fa_compiler.nested". The options may have the domains of files already,
// and a runtime takes a domain only once.
void add_nested_operators(ort::Api api, ort::SessionOptions* options);

}  // namespace fa
