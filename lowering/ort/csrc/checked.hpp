// Sums and products of numbers that come from outside: attributes, sizes, the content of tensors of lengths. None may wrap.
#pragma once

#include <cstdint>

namespace fa {

// An integer that remembers whether what it was made of ever left 64 bits.
class Checked {
 public:
  Checked(int64_t value) : value_(value) {}

  Checked operator+(Checked other) const {
    Checked sum = *this;
    sum.fits_ = !__builtin_add_overflow(value_, other.value_, &sum.value_) && fits_ && other.fits_;
    return sum;
  }
  Checked operator*(Checked other) const {
    Checked product = *this;
    product.fits_ = !__builtin_mul_overflow(value_, other.value_, &product.value_) && fits_ && other.fits_;
    return product;
  }

  bool fits() const { return fits_; }
  int64_t value() const { return value_; }  // where it fits

 private:
  int64_t value_;
  bool fits_ = true;
};

}  // namespace fa
