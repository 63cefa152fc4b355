// AVX-512 with vdpbf16ps, for bfloat16 inputs. Every processor that has it has vpdpbusd. All else is computed as by avx512vnni.
//
// On Intel's processors vdpbf16ps multiplies half as many numbers in a cycle as the multiply-add of floats. There this variant is
// used only where the environment names it.
#pragma once

#include "avx512vnni.hpp"

namespace fa::FA_ISA::isa {

struct avx512bf16 : avx512vnni {
  static constexpr bool kHasPairs = true;

  FA_INLINE Vec add_pair_products(Vec sum, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  // GCC loads the pair by an instruction of its own. A micro-tile of one vector then takes 4/3 of the time.
  FA_INLINE Vec add_products_of_pair(Vec sum, const float& a, Vec b) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(a));
    return sum;
  }
  FA_INLINE HalfVec narrow_operands(Vec x) { return (HalfVec)_mm512_cvtneps_pbh((__m512)x); }
  FA_INLINE Vec narrow_operands(Vec first, Vec second) {
    return (Vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  }
};

}  // namespace fa::FA_ISA::isa
