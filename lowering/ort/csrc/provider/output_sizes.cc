#include "output_sizes.hpp"

#include <algorithm>
#include <utility>

#include "../op.hpp"

namespace fa::provider {
namespace {

class Reader {
 public:
  explicit Reader(std::span<const int64_t> numbers) : numbers_(numbers) {}

  int64_t next() {
    if (at_ == numbers_.size()) throw Error{ort::ErrorCode::fail, "the sizes of the outputs end too early"};
    return numbers_[at_++];
  }

  // A number of items or an index, which is less than `limit`.
  size_t next_below(size_t limit) {
    const int64_t number = next();
    if (number < 0 || static_cast<uint64_t>(number) >= limit) {
      throw Error{ort::ErrorCode::fail, "the sizes of the outputs hold " + std::to_string(number)};
    }
    return static_cast<size_t>(number);
  }

 private:
  std::span<const int64_t> numbers_;
  size_t at_ = 0;
};

}  // namespace

OutputSizes::OutputSizes(std::span<const int64_t> numbers, size_t inputs, size_t outputs) {
  Reader reader(numbers);
  const size_t limit = numbers.size() + 1;
  const auto place = [&] {
    const size_t input = reader.next_below(inputs);
    return Place{input, reader.next_below(limit)};
  };
  for (size_t pairs = reader.next_below(limit); pairs > 0; --pairs) {
    const Place first = place();
    equal_.emplace_back(first, place());
  }
  while (outputs_.size() < outputs) {
    const int64_t rank = reader.next();
    auto& output = outputs_.emplace_back();
    if (rank < 0) continue;
    output.emplace();
    while (output->size() < static_cast<size_t>(rank)) {
      Dimension& dimension = output->emplace_back();
      for (size_t terms = reader.next_below(limit); terms > 0; --terms) {
        Term& term = dimension.emplace_back(Term{reader.next(), {}});
        for (size_t factors = reader.next_below(limit); factors > 0; --factors) term.factors.push_back(place());
      }
    }
  }
}

bool OutputSizes::read(const Place& place, std::span<const Shape> inputs, int64_t& size) {
  const Shape& shape = inputs[place.input];
  if (place.axis >= shape.size()) return false;
  size = shape[place.axis];
  return true;
}

std::optional<Shape> OutputSizes::shape(size_t output, std::span<const Shape> inputs) const {
  const auto& dimensions = outputs_[output];
  if (!dimensions) return std::nullopt;
  // The formulas are not proven for empty tensors.
  for (const Shape& input : inputs) {
    if (std::find(input.begin(), input.end(), 0) != input.end()) return std::nullopt;
  }
  for (const auto& [first, second] : equal_) {
    int64_t left = 0;
    int64_t right = 0;
    if (!read(first, inputs, left) || !read(second, inputs, right) || left != right) return std::nullopt;
  }
  Shape shape;
  for (const Dimension& dimension : *dimensions) {
    int64_t sum = 0;
    for (const Term& term : dimension) {
      int64_t product = term.coefficient;
      for (const Place& factor : term.factors) {
        int64_t size = 0;
        if (!read(factor, inputs, size)) return std::nullopt;
        product *= size;
      }
      sum += product;
    }
    if (sum < 0) return std::nullopt;
    shape.push_back(sum);
  }
  return shape;
}

}  // namespace fa::provider
