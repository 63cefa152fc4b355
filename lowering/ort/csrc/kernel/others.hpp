// A variant may compute only what its instructions make faster: products of pairs, or of bytes. FA_OTHERS is the variant that
// computes everything else of the same kernel.
#pragma once

#include "../variants.hpp"

#if !defined(FA_OTHERS)
#define FA_OTHERS FA_ISA
#endif

namespace fa {
FA_DECLARE_KERNELS(FA_OTHERS)
}
