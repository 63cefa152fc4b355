// Writes one row of the result in the type that the caller wants.
#pragma once

#include "../../decode.hpp"
#include "../convert.hpp"

namespace fa::FA_ISA {

FA_INLINE Type type_of(Cell cell) { return static_cast<Type>(cell); }

// Rounds to the nearest, ties to even, and saturates. NaN becomes 0.
FA_INLINE int8_t to_int8(float x) {
  if (is_nan(x)) return 0;
  const float near = x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
  const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  return static_cast<int8_t>((near + rounder) - rounder);
}

// `index` is that of the row's first number in `out`. `row` may be changed.
static void write_result(const Decode& d, int64_t index, int64_t head, float* row) {
  if (d.quant_scale == nullptr) {
    write_floats(d.out, index, row, d.size, type_of(d.out_cell));
    return;
  }
  auto* out = static_cast<int8_t*>(d.out) + index;
  for (int64_t i = 0; i < d.size; ++i) {
    const int64_t channel = d.quant_per_channel ? head * d.size + i : 0;
    const float offset = d.quant_offset == nullptr ? 0.0f : d.quant_offset[channel];
    const float result = row[i] * d.quant_scale[channel] + offset;
    out[i] = is_nan(result) ? -128 : to_int8(result);  // as ONNX Runtime's QuantizeLinear has it
  }
}

}  // namespace fa::FA_ISA
