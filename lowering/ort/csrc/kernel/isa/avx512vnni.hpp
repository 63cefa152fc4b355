// AVX-512 with vpdpbusd, for int8 caches.
#pragma once

#include "avx512.hpp"

namespace fa::FA_ISA::isa {

struct avx512vnni : avx512 {
  static constexpr bool kHasByteProducts = true;

  FA_INLINE IntVec add_byte_products(IntVec sum, Vec a, Vec b) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
};

}  // namespace fa::FA_ISA::isa
