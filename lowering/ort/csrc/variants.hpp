// The variants of the kernels in the library, and the choice of one. FA_COMPILER_ISA overrides the choice.
#pragma once

#include "decode.hpp"
#include "gradient.hpp"
#include "linear.hpp"
#include "sparse/problem.hpp"

namespace fa {

struct Variant {
  const char* name;
  bool (*supported)();
  bool (*preferred)();  // whether it is chosen where it is supported
  Attention attention;
  Gradient gradient;
  const sparse::Kernels* sparse;
  Decoding decode;
  const linear::Kernels* linear;
};

// Declares the kernels of one variant, in namespace fa. Those of an instruction set are compiled from kernel/, those of
// the reference from reference*.cc.
#define FA_DECLARE_KERNELS(isa)                                \
  namespace isa {                                              \
  Outcome attention(const Problem&, const Runtime&);           \
  Outcome gradient(const Gradients&, const Runtime&);          \
  Outcome decode(const Decode&, const Runtime&);               \
  extern const sparse::Kernels sparse_kernels;                 \
  extern const linear::Kernels linear_kernels;                 \
  }

// The variant that FA_COMPILER_ISA names, or the best one that this machine runs. Throws std::runtime_error if the name
// is unknown or the machine lacks the instructions.
const Variant& chosen_variant();

// Whether FA_COMPILER_FLOAT32_PRODUCTS is bfloat16: see Problem::rounded_products. False if it is not set. Throws
// std::runtime_error if it names another type.
bool products_may_round();

}  // namespace fa
