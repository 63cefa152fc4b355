#include "variants.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fa {

namespace baseline {
Outcome attention(const Problem&, const Runtime&);
Outcome gradient(const Gradients&, const Runtime&);
extern const sparse::Kernels sparse_kernels;
Outcome decode(const Decode&, const Runtime&);
}
#if defined(__x86_64__)
namespace avx2 {
Outcome attention(const Problem&, const Runtime&);
Outcome gradient(const Gradients&, const Runtime&);
extern const sparse::Kernels sparse_kernels;
Outcome decode(const Decode&, const Runtime&);
}
namespace avx512bf16 {
Outcome attention(const Problem&, const Runtime&);
Outcome gradient(const Gradients&, const Runtime&);
extern const sparse::Kernels sparse_kernels;
Outcome decode(const Decode&, const Runtime&);
}
namespace avx512 {
Outcome attention(const Problem&, const Runtime&);
Outcome gradient(const Gradients&, const Runtime&);
extern const sparse::Kernels sparse_kernels;
Outcome decode(const Decode&, const Runtime&);
}
#endif
namespace reference {
Outcome attention(const Problem&, const Runtime&);
Outcome gradient(const Gradients&, const Runtime&);
extern const sparse::Kernels sparse_kernels;
Outcome decode(const Decode&, const Runtime&);
}

namespace {

bool always() { return true; }

#if defined(__x86_64__)
// These look at the processor and at what the operating system saves (xgetbv).
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
// vdpbf16ps, for bfloat16 inputs; the others are computed as by avx512.
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Best first; the reference is never chosen unasked. To add an instruction set: one line here, one in
// CMakeLists.txt, and its vector width in kernel/simd.hpp.
constexpr Variant kVariants[] = {
#if defined(__x86_64__)
    {"avx512bf16", has_avx512bf16, avx512bf16::attention, avx512bf16::gradient, &avx512bf16::sparse_kernels,
     avx512bf16::decode},
    {"avx512", has_avx512, avx512::attention, avx512::gradient, &avx512::sparse_kernels, avx512::decode},
    {"avx2", has_avx2, avx2::attention, avx2::gradient, &avx2::sparse_kernels, avx2::decode},
#endif
    {"baseline", always, baseline::attention, baseline::gradient, &baseline::sparse_kernels, baseline::decode},
    {"reference", always, reference::attention, reference::gradient, &reference::sparse_kernels, reference::decode},
};

const Variant& choose() {
  const char* forced = std::getenv("FA_COMPILER_ISA");
  if (forced == nullptr || *forced == '\0') {
    for (const Variant& variant : kVariants) {
      if (variant.supported()) return variant;
    }
  }
  std::string known;
  for (const Variant& variant : kVariants) {
    if (std::string(variant.name) == forced) {
      if (variant.supported()) return variant;
      throw std::runtime_error("FA_COMPILER_ISA=" + std::string(forced) + ": this machine lacks these instructions");
    }
    known += (known.empty() ? "" : ", ") + std::string(variant.name);
  }
  throw std::runtime_error("FA_COMPILER_ISA=" + std::string(forced) + " is unknown; this library has " + known);
}

}  // namespace

const Variant& chosen_variant() { return choose(); }

bool products_may_round() {
  const char* type = std::getenv("FA_COMPILER_FLOAT32_PRODUCTS");
  if (type == nullptr || *type == '\0' || std::string(type) == "float32") return false;
  if (std::string(type) == "bfloat16") return true;
  throw std::runtime_error("FA_COMPILER_FLOAT32_PRODUCTS=" + std::string(type) + " is neither float32 nor bfloat16");
}

}  // namespace fa
