// AVX-512 with vdpbf16ps, for bfloat16 inputs, and with vpdpbusd, for int8 caches. Every processor that has the first has the
// second. All else is computed as by avx512.
#pragma once

#include "avx512.hpp"

namespace fa::FA_ISA::isa {

struct avx512bf16 : avx512 {
  static constexpr bool kHasPairs = true;

  FA_INLINE Vec add_pair_products(Vec sum, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  FA_INLINE HalfVec narrow_operands(Vec x) { return (HalfVec)_mm512_cvtneps_pbh((__m512)x); }
  FA_INLINE Vec narrow_operands(Vec first, Vec second) {
    return (Vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  }

  static constexpr bool kHasByteProducts = true;

  FA_INLINE IntVec add_byte_products(IntVec sum, Vec a, Vec b) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
};

}  // namespace fa::FA_ISA::isa
