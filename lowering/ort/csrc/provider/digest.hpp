// SHA-256, the digest of FIPS 180-4: the key of a graph, and what tells that a plan or a weight has changed.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace fa::provider {

using Digest = std::array<uint8_t, 32>;

Digest digest_of(std::string_view bytes);

}  // namespace fa::provider
