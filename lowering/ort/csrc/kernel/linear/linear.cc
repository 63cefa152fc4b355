// The kernels of linear attention, compiled once for each instruction set: FA_ISA is the namespace of this copy.
#include "convolution.hpp"
#include "driver.hpp"

namespace fa::FA_ISA {

static Outcome linear_attention(const linear::Problem& problem, const Runtime& runtime) {
  return lin::Driver(problem, runtime).run();
}

static Outcome causal_convolution(const linear::Convolution& convolution, const Runtime& runtime) {
  switch (convolution.type) {
    case Type::float32: return lin::Convolver<Type::float32>(convolution, runtime).run();
    case Type::float16: return lin::Convolver<Type::float16>(convolution, runtime).run();
    case Type::bfloat16: break;
  }
  return lin::Convolver<Type::bfloat16>(convolution, runtime).run();
}

extern const linear::Kernels linear_kernels;
const linear::Kernels linear_kernels = {linear_attention, causal_convolution};

}  // namespace fa::FA_ISA
