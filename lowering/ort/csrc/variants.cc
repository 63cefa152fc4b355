#include "variants.hpp"

#include <stdexcept>
#include <string>

#include "environment.hpp"
#include "processor.hpp"

namespace fa {

#define FA_VARIANT(isa, attention, gradient, sparse, decode, linear, supported, preferred) FA_DECLARE_KERNELS(isa)
#include "variants.inc"
#undef FA_VARIANT
FA_DECLARE_KERNELS(reference)

namespace {

// CMakeLists.txt writes variants.inc: FA_VARIANT for each instruction set, the best one first. attention_of to linear_of are the
// instruction sets that each kernel is compiled for. `supported` checks that the processor has the instructions and that the
// operating system saves their registers. Where `preferred` does not hold, a worse variant is faster. The reference is used only
// if FA_COMPILER_ISA names it.
//
// The processor is asked once in a process: in a virtual machine each answer takes about 15 microseconds, and every node asks.
#define FA_ONCE(condition)             \
  [] {                                 \
    static const bool is = condition;  \
    return is;                         \
  }
#define FA_VARIANT(isa, attention_of, gradient_of, sparse_of, decode_of, linear_of, supported, preferred)             \
  {#isa, FA_ONCE(supported), FA_ONCE(preferred), attention_of::attention, gradient_of::gradient,                      \
   &sparse_of::sparse_kernels, decode_of::decode, &linear_of::linear_kernels},
constexpr Variant kVariants[] = {
#include "variants.inc"
    FA_VARIANT(reference, reference, reference, reference, reference, reference, true, false)
};
#undef FA_VARIANT
#undef FA_ONCE

const Variant& choose() {
  const std::string forced = environment_variable("FA_COMPILER_ISA");
  if (forced.empty()) {
    for (const Variant& variant : kVariants) {
      if (variant.preferred() && variant.supported()) return variant;
    }
  }
  std::string known;
  for (const Variant& variant : kVariants) {
    if (variant.name == forced) {
      if (variant.supported()) return variant;
      throw std::runtime_error("FA_COMPILER_ISA=" + forced + ": this machine lacks these instructions");
    }
    known += (known.empty() ? "" : ", ") + std::string(variant.name);
  }
  if (forced.empty()) {
    throw std::runtime_error("this library was compiled for the processor of another machine (" + known +
                             "); install a wheel, or compile it here");
  }
  throw std::runtime_error("FA_COMPILER_ISA=" + forced + " is unknown; this library has " + known);
}

}  // namespace

const Variant& chosen_variant() { return choose(); }

bool products_may_round() {
  const std::string type = environment_variable("FA_COMPILER_FLOAT32_PRODUCTS");
  if (type.empty() || type == "float32") return false;
  if (type == "bfloat16") return true;
  throw std::runtime_error("FA_COMPILER_FLOAT32_PRODUCTS=" + type + " is neither float32 nor bfloat16");
}

}  // namespace fa
