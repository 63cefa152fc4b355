// A variant with tile registers computes products of pairs. FA_OTHERS is the variant that computes everything else.
#pragma once

#include "../variants.hpp"

#if defined(FA_OTHERS)
namespace fa {
FA_DECLARE_KERNELS(FA_OTHERS)
}
#else
#define FA_OTHERS FA_ISA
#endif
