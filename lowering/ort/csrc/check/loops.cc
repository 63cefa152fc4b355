// The inner loops of the forward kernel, each in a function of its own, for a static analysis of their machine code
// (bench/neon.py). It is compiled and never run.
#include "../kernel/exp.hpp"
#include "../kernel/microkernel.hpp"

namespace fa::FA_ISA {

// K Q^T
void scores(RowMajor keys, PanelB queries, int64_t depth, Output out, PrefetchQueue& prefetches) {
  multiply_rows<kMicroRows, 2, Beta::zero, false>(keys, queries, depth, out, prefetches);
}

// P V, added to the sums so far
void weighted_values(ColumnMajor values, PanelB weights, int64_t keys, Output out, PrefetchQueue& prefetches) {
  multiply_rows<kMicroRows, 2, Beta::diagonal, false>(values, weights, keys, out, prefetches);
}

// exp, as many vectors at a time as the softmax of a panel has
void exponentials(const float* __restrict from, float* __restrict to, int64_t lines) {
  for (int64_t n = 0; n < lines; ++n, from += kPanel, to += kPanel) {
    for (int v = 0; v < kPanel; v += kLanes) store(to + v, exp_nonpositive(load(from + v)));
  }
}

}  // namespace fa::FA_ISA
