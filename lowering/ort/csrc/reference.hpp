// The part that the reference kernels share: numbers of every type, soft caps, and one row of scores.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "attention.hpp"

namespace fa::reference {

// The IEEE maximum: a NaN stays a NaN.
inline double maximum(double a, double b) { return std::isnan(a) || a > b ? a : b; }

// What becomes of a scaled product x: c * tanh(x / c) with a soft cap c, else x.
inline double capped(double x, float softcap) { return softcap == 0 ? x : softcap * std::tanh(x / softcap); }

inline float to_float(uint16_t bits, Type type) {
  if (type == Type::bfloat16) {
    const uint32_t wide = uint32_t{bits} << 16;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
  }
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) {
    const float inf = std::numeric_limits<float>::infinity();
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * inf;
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

// Rounds to the nearest number, ties to even.
inline uint16_t from_float(float value, Type type) {
  if (type == Type::bfloat16) {
    if (std::isnan(value)) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < std::ldexp(1.0f, -14)) {
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  int exponent;
  const float fraction = std::frexp(magnitude, &exponent);                          // in [0.5, 1)
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(fraction, 11)));  // carries into the exponent
  return sign | static_cast<uint16_t>(((exponent + 13) << 10) + mantissa);
}

inline float read(const void* data, int64_t index, Type type) {
  if (type == Type::float32) return static_cast<const float*>(data)[index];
  return to_float(static_cast<const uint16_t*>(data)[index], type);
}

inline void write(void* data, int64_t index, float value, Type type) {
  if (type == Type::float32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = from_float(value, type);
  }
}

// Query row `i` of query head `head`, and everything that its scores depend on.
struct Row {
  const Problem& problem;
  const Sequence& sequence;
  int64_t head;
  int64_t i;

  int64_t key_head() const { return head / (problem.heads / problem.key_heads); }

  bool attended(int64_t j) const {
    if (j - i < sequence.band_first || (j - i > sequence.band_last && j >= sequence.prefix)) return false;
    if (problem.mask == nullptr) return true;
    return problem.mask[sequence.mask + head * problem.mask_head + i * problem.mask_row + j * problem.mask_column] == 0;
  }

  // q_i . k_j of the given tensors: query and key, or their rope parts.
  double product(const Strided& query, int64_t first_query, const Strided& key, int64_t first_key, int64_t size,
                 int64_t j) const {
    double sum = 0;
    const int64_t q = first_query + head * query.head + i * query.row;
    const int64_t k = first_key + key_head() * key.head + j * key.row;
    for (int64_t d = 0; d < size; ++d) {
      sum += double{read(query.data, q + d, problem.type)} * read(key.data, k + d, problem.type);
    }
    return sum;
  }

  float bias(int64_t j) const {
    if (problem.slopes != nullptr) {
      const double distance = std::fabs(static_cast<double>(j - i + sequence.start));
      return static_cast<float>(-double{problem.slopes[sequence.slopes + head]} *
                                (problem.slope_of_root ? std::sqrt(distance) : distance));
    }
    if (problem.pse == nullptr) return 0;
    const int64_t offset = sequence.pse + head * sequence.pse_head + pse_row_offset(problem, sequence, i);
    return read(problem.pse, offset + j * problem.pse_column, problem.pse_type);
  }

  // q_i . k_j with the rope parts.
  float product(int64_t j) const {
    const double sum = product(problem.query, sequence.query, problem.key, sequence.key, problem.head_size, j);
    return static_cast<float>(sum + product(problem.query_rope, sequence.query_rope, problem.key_rope, sequence.key_rope,
                                            problem.rope_size, j));
  }

  // The score of key j, rounded to float32 as in the operator. The rounding matters: with a bias of -FLT_MAX, the
  // product is lost.
  float score(int64_t j) const {
    if (problem.pse_inside_scale) return (product(j) + bias(j)) * problem.scale;
    return static_cast<float>(capped(product(j) * problem.scale, problem.softcap)) + bias(j);
  }

  // The derivative of the score with respect to the scaled product: 1 - tanh^2 with a soft cap.
  double slope(int64_t j) const {
    if (problem.softcap == 0) return 1;
    const double cosine = std::cosh(double{product(j) * problem.scale} / problem.softcap);
    return 1 / (cosine * cosine);
  }

  // The score of a key that is not attended.
  float masked_score(int64_t j) const {
    if (!problem.masked_bias) return problem.mask_value;
    return problem.mask_value + (problem.pse_inside_scale ? bias(j) * problem.scale : bias(j));
  }

  // The factor of dropout: 0 or 1 / keep_prob.
  double kept(int64_t j) const {
    if (problem.drop_mask == nullptr) return 1;
    const int64_t bit = sequence.drop + (head * sequence.query_length + i) * sequence.key_length + j;
    return (problem.drop_mask[bit / 8] >> (bit % 8) & 1) / double{problem.keep_prob};
  }

  float value(int64_t j, int64_t d) const {
    const int64_t v = sequence.value + key_head() * problem.value.head + j * problem.value.row;
    return read(problem.value.data, v + d, problem.type);
  }
};

}  // namespace fa::reference
