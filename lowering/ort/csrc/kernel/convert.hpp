// Conversions between float16 or bfloat16 and float32, rounding to the nearest with ties to even.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

FA_INLINE float widen_bfloat16(uint16_t x) { return from_bits(uint32_t{x} << 16); }

// Exponent and mantissa move to their place, and one multiplication corrects the exponent's bias. The multiplication also
// makes subnormal numbers right. Infinity and NaN get the largest exponent.
FA_INLINE float widen_float16(uint16_t x) {
  const uint32_t magnitude = (x & 0x7fffu) << 13;
  const uint32_t scaled = to_bits(from_bits(magnitude) * 0x1p112f);
  const uint32_t bits = magnitude >= (0x1fu << 23) ? magnitude | 0x7f800000u : scaled;
  return from_bits(bits | (x & 0x8000u) << 16);
}

// The same for vectors.
FA_INLINE Vec widen_bfloat16s(HalfVec x) { return (Vec)(__builtin_convertvector(x, BitVec) << 16); }

FA_INLINE Vec widen_float16s(HalfVec x) { return Isa::widen_float16s(x); }
FA_INLINE Vec widen_int8s(Int8Vec x) { return Isa::widen_int8s(x); }

FA_INLINE uint16_t narrow_bfloat16(float x) {
  const uint32_t bits = to_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(x) ? (bits >> 16 | 0x40u) : rounded);
}

// A small number is rounded by adding a power of two whose last place is that of float16. A normal number is rounded in
// integers.
FA_INLINE uint16_t narrow_float16(float x) {
  const uint32_t sign = to_bits(x) >> 16 & 0x8000u;
  const uint32_t magnitude = to_bits(x) & 0x7fffffffu;
  const uint32_t small = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  uint32_t bits = magnitude < (113u << 23) ? small : normal;
  bits = magnitude >= to_bits(65520.0f) ? 0x7c00u : bits;
  bits = magnitude > 0x7f800000u ? 0x7e00u : bits;
  return static_cast<uint16_t>(sign | bits);
}

// The same for vectors.
FA_INLINE HalfVec narrow_bfloat16s(Vec x) { return Isa::narrow_bfloat16s(x); }
FA_INLINE HalfVec narrow_float16s(Vec x) { return Isa::narrow_float16s(x); }

// How to store one vector of floats as numbers of a type.
struct WriteFloats {
  using Number = float;
  FA_INLINE void put(Number* p, Vec v) { store(p, v); }
};
struct WriteFloat16 {
  using Number = uint16_t;
  FA_INLINE void put(Number* p, Vec v) { store_as(p, narrow_float16s(v)); }
};
struct WriteBfloat16 {
  using Number = uint16_t;
  FA_INLINE void put(Number* p, Vec v) { store_as(p, narrow_bfloat16s(v)); }
};

// `count` elements from element `index` on, as floats: the tensor's own memory if it is float32, else a conversion in
// `buffer`.
FA_INLINE const float* as_floats(const void* data, int64_t index, int64_t count, Type type, float* buffer) {
  if (type == Type::float32) return static_cast<const float*>(data) + index;
  const uint16_t* in = static_cast<const uint16_t*>(data) + index;
  if (type == Type::bfloat16) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = widen_bfloat16(in[i]);
    return buffer;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(buffer + i, widen_float16s(load_as<HalfVec>(in + i)));
  }
  for (; i < count; ++i) buffer[i] = widen_float16(in[i]);
  return buffer;
}

FA_INLINE void write_floats(void* data, int64_t index, const float* from, int64_t count, Type type) {
  if (type == Type::float32) {
    float* out = static_cast<float*>(data) + index;
    for (int64_t i = 0; i < count; ++i) out[i] = from[i];
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(data) + index;
  int64_t i = 0;
  if (type == Type::bfloat16) {
    for (; i + kLanes <= count; i += kLanes) WriteBfloat16::put(out + i, load(from + i));
    for (; i < count; ++i) out[i] = narrow_bfloat16(from[i]);
    return;
  }
  for (; i + kLanes <= count; i += kLanes) WriteFloat16::put(out + i, load(from + i));
  for (; i < count; ++i) out[i] = narrow_float16(from[i]);
}

}  // namespace fa::FA_ISA
