#include "attributes.hpp"

#include <limits>

namespace fa::incre_flash_attention {
namespace {

Layout layout_of(const NodeInfo& info) {
  const std::string text = info.string("input_layout", "BSH");
  for (Layout layout : {Layout::BSH, Layout::BSND, Layout::BNSD}) {
    if (text == text_of(layout)) return layout;
  }
  refuse(info.title(), 2, "input_layout is \"" + text + "\", expected one of \"BSH\", \"BSND\", \"BNSD\"");
}

}  // namespace

void refuse(const std::string& node, int constraint, const std::string& text) {
  throw Error{ort::ErrorCode::invalid_argument, node + ": " + text + " (IFA." + std::to_string(constraint) + ")"};
}

Attributes read_attributes(const NodeInfo& info) {
  constexpr int64_t kMostInGroup = 64;
  Attributes a;
  a.heads = info.integer("num_heads", 0);
  if (a.heads <= 0) {
    refuse(info.title(), 3, "num_heads is " + std::to_string(a.heads) + ", expected the number of query heads");
  }
  const int64_t stated = info.integer("num_key_value_heads", 0);
  a.key_heads = stated == 0 ? a.heads : stated;
  if (stated < 0 || a.heads % a.key_heads != 0 || a.heads / a.key_heads > kMostInGroup) {
    refuse(info.title(), 3, "num_key_value_heads is " + std::to_string(stated) + ", expected 0 or a divisor of the " +
                                std::to_string(a.heads) + " query heads, at most 64 times smaller");
  }
  a.scale = info.number("scale_value", 1.0f);
  a.layout = layout_of(info);
  a.block_size = info.integer("block_size", 0);
  const int64_t precision = info.integer("inner_precise", 1);
  if (precision != 0 && precision != 1) {
    refuse(info.title(), 14, "inner_precise is " + std::to_string(precision) + ", expected 0 or 1");
  }
  a.keys = info.integer("key_count", 1);
  a.values = info.integer("value_count", 1);
  if (a.keys < 1 || a.keys != a.values) {
    refuse(info.title(), 5, "value_count is " + std::to_string(a.values) + ", expected " + std::to_string(a.keys) +
                                " as key_count");
  }
  if (a.keys > std::numeric_limits<int32_t>::max() || !info.has_input(static_cast<size_t>(2 * a.keys))) {
    refuse(info.title(), 5, "key_count is " + std::to_string(a.keys) + ", expected the number of keys in the list");
  }
  return a;
}

}  // namespace fa::incre_flash_attention
