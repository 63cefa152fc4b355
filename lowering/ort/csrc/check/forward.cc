#include <algorithm>

#include "attention.hpp"

namespace fa::check {

// Each path of the kernel (skinny tiles, panels, packed sequences) with sizes that no vector divides, and each feature.
void check_forward(Report& report, Random* random) {
  const std::vector<Form> listed = {
      {2, 2, 33, 29, 16, 16},
      {4, 1, 1, 600, 64, 64},
      {8, 1, 1, 300, 80, 48},
      {4, 2, 5, 301, 7, 5},
      {2, 2, 100, 100, 64, 64, kCausal},
      {1, 1, 300, 700, 32, 32, kCausal},
      {3, 3, 1, 17, 1, 1},
      {2, 1, 197, 197, 128, 96},
      {4, 2, 37, 61, 24, 24, kMask | kBias},
      {2, 2, 130, 70, 33, 20, kMask | kMean | kPacked},
      {4, 4, 21, 50, 16, 16, kSlopes | kSink | kCausal},
      {2, 1, 40, 90, 48, 64, kRope | kPacked | kCausal},
      {2, 2, 29, 31, 16, 16, kDropout | kBias | kPacked},
      {4, 2, 3, 45, 64, 64, kMask | kMaskValue},
      {2, 2, 50, 45, 64, 64, kMask | kMaskValue | kSink},
      {4, 2, 3, 45, 64, 64, kMask | kMaskValue | kBias | kMaskedBias},
      {2, 2, 50, 45, 64, 64, kCausal | kMaskValue | kBias | kMaskedBias},
      {4, 1, 2, 130, 32, 32, kMask | kBias | kSink},
      {4, 2, 2, 130, 32, 32, kSoftcap | kBias},
      {2, 2, 50, 45, 64, 64, kSoftcap | kCausal},
  };
  const std::vector<Form> forms = random == nullptr ? listed : std::vector{drawn_form(*random)};
  for (Type type : kTypes) {
    for (const Form& form : forms) {
      ++report.problems;
      AttentionProblem problem(form, type);
      const Forward found(problem, FA_CHECKED::attention), expected(problem, reference::attention);
      const std::string what = std::string("forward ") + text_of(type) + ", " + text_of(form);
      report.see(what, difference(found.out, expected.out), allowed(type));
      const double statistics = std::max(difference(found.max, expected.max), difference(found.sum, expected.sum));
      report.see(what + ", statistics", statistics, allowed(Type::float32));
    }
  }
}

}  // namespace fa::check
