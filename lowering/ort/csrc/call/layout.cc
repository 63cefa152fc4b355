#include "layout.hpp"

namespace fa {
namespace {

Operand strides_of(Layout layout, const Dims& d, int64_t heads) {
  const int64_t n = heads;
  switch (layout) {
    case Layout::BSH:
      return {d[0], n, d[1], n == 0 ? 0 : d[2] / n, d[1] * d[2], n == 0 ? 0 : d[2] / n, d[2]};
    case Layout::SBH:
      return {d[1], n, d[0], n == 0 ? 0 : d[2] / n, d[2], n == 0 ? 0 : d[2] / n, d[1] * d[2]};
    case Layout::BSND:
      return {d[0], d[2], d[1], d[3], d[1] * d[2] * d[3], d[3], d[2] * d[3]};
    case Layout::BNSD:
      return {d[0], d[1], d[2], d[3], d[1] * d[2] * d[3], d[2] * d[3], d[3]};
    case Layout::NTD:
    case Layout::NSD:
      return {1, d[0], d[1], d[2], 0, d[1] * d[2], d[2]};
    case Layout::NBSD:
      return {d[1], d[0], d[2], d[3], d[2] * d[3], d[1] * d[2] * d[3], d[3]};
    case Layout::TND:
      break;
  }
  return {1, d[1], d[0], d[2], 0, d[2], d[1] * d[2]};
}

}  // namespace

size_t rank_of(Layout layout) {
  return layout == Layout::BSND || layout == Layout::BNSD || layout == Layout::NBSD ? 4 : 3;
}

const char* text_of(Layout layout) {
  static constexpr const char* kNames[] = {"BSH", "SBH", "BSND", "BNSD", "TND", "NTD", "NSD", "NBSD"};
  return kNames[static_cast<size_t>(layout)];
}

Operand operand_of(Layout layout, const Dims& dims, int64_t heads) {
  Operand operand = strides_of(layout, dims, heads);
  if (operand.batch == 1) operand.batch_stride = 0;
  return operand;
}

Dims output_dims(Layout layout, const Dims& query, int64_t batch, int64_t heads, int64_t value_size) {
  Dims dims = query;
  if (layout != Layout::TND) dims[layout == Layout::SBH ? 1 : 0] = batch;
  dims.back() = folds_heads(layout) ? heads * value_size : value_size;
  return dims;
}

}  // namespace fa
