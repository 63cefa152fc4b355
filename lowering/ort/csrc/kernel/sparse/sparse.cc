// The kernels of the sparse family, compiled once for each instruction set: FA_ISA is the namespace of this copy.
#include "attention.hpp"
#include "gradient.hpp"
#include "index_gradient.hpp"
#include "select.hpp"

namespace fa::FA_ISA {

extern const sparse::Kernels sparse_kernels;
const sparse::Kernels sparse_kernels = {sparse_attention, sparse_gradient, select_best_keys, index_gradient};

}  // namespace fa::FA_ISA
