// The operators of this library, as domains that sessions and provider factories take.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ort_abi.hpp"

namespace fa {

// An option of our device, and the session option that ONNX Runtime makes of it where a session gets the device. Such a
// session has the domains of files already, and RegisterCustomOps adds nothing.
inline constexpr const char* kBringsOperators = "brings_operators";
inline constexpr const char* kHasOperators = "ep.facompilerexecutionprovider.brings_operators";

// An entry of the options of a session that uses some operators only: their names, with commas between them. To prepare all
// operators takes ONNX Runtime some milliseconds for each session.
inline constexpr const char* kOperators = "fa_compiler.operators";

// The entry that RegisterCustomOps leaves in the options. ONNX Runtime refuses a session whose options have a domain twice.
inline constexpr const char* kRegistered = "fa_compiler.registered";

// Whether the options of a session have an entry, and the entry, which has to exist.
bool has_entry(ort::Api api, const ort::SessionOptions* options, const char* key);
std::string entry_of(ort::Api api, const ort::SessionOptions* options, const char* key);

// The domains of files: those that RegisterCustomOps adds. They live as long as the library.
std::vector<ort::CustomOpDomain*> file_domains(ort::Api api);

struct DomainDeleter {
  ort::Api api;
  void operator()(ort::CustomOpDomain* domain) const { ort::ReleaseCustomOpDomain(api, domain); }
};
using DomainPtr = std::unique_ptr<ort::CustomOpDomain, DomainDeleter>;

// The operators of a serialised model under a domain of its own, "fa_compiler.nested": the options of its session may have
// the domains of files already, and a runtime takes a domain only once. Other operators are left out, because each of them
// costs every session memory and time. The domain has to outlive the session.
DomainPtr nested_domain(ort::Api api, std::string_view model);

}  // namespace fa
