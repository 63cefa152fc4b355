// Sums and products of attributes, sizes and lengths of a model, which may overflow.
#pragma once

#include <cstdint>

namespace fa {

// A result of sums and products, and whether one of them exceeded 64 bits.
class Checked {
 public:
  Checked(int64_t value) : value_(value) {}

  Checked operator+(Checked other) const {
    Checked sum = *this;
    sum.fits_int64_ = !__builtin_add_overflow(value_, other.value_, &sum.value_) && fits_int64_ && other.fits_int64_;
    return sum;
  }
  Checked operator*(Checked other) const {
    Checked product = *this;
    product.fits_int64_ = !__builtin_mul_overflow(value_, other.value_, &product.value_) && fits_int64_ && other.fits_int64_;
    return product;
  }

  bool fits_int64() const { return fits_int64_; }
  int64_t value() const { return value_; }  // only if fits_int64()

 private:
  int64_t value_;
  bool fits_int64_ = true;
};

}  // namespace fa
