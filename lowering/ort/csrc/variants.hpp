// The compiled kernel variants, the choice among them, and the environment variable that forces one.
#pragma once

#include "decode.hpp"
#include "gradient.hpp"
#include "sparse/problem.hpp"

namespace fa {

struct Variant {
  const char* name;
  bool (*supported)();
  Attention attention;
  Gradient gradient;
  const sparse::Kernels* sparse;
  Decoding decode;
};

// Declares the kernels of one variant, in namespace fa. Each instruction set compiles them from kernel/, the reference has
// its own.
#define FA_DECLARE_KERNELS(isa)                                \
  namespace isa {                                              \
  Outcome attention(const Problem&, const Runtime&);           \
  Outcome gradient(const Gradients&, const Runtime&);          \
  Outcome decode(const Decode&, const Runtime&);               \
  extern const sparse::Kernels sparse_kernels;                 \
  }

// The variant that FA_COMPILER_ISA names, or the best this machine runs. Throws std::runtime_error when
// the name is unknown or the machine lacks the instructions.
const Variant& chosen_variant();

// FA_COMPILER_FLOAT32_PRODUCTS=bfloat16: see Problem::rounded_products. Off unless asked for. Throws std::runtime_error
// when the type is another.
bool products_may_round();

}  // namespace fa
