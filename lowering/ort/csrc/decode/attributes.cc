#include "attributes.hpp"

#include <limits>

#include "../call/softcap.hpp"
#include "inputs.hpp"

namespace fa::incre_flash_attention {
namespace {

Layout layout_of(const NodeInfo& info) {
  const std::string text = info.get(attr::input_layout);
  for (Layout layout : {Layout::BSH, Layout::BSND, Layout::BNSD}) {
    if (text == text_of(layout)) return layout;
  }
  refuse(info.title(), rule::one_token,
         "input_layout is \"" + text + "\", expected one of \"BSH\", \"BSND\", \"BNSD\"");
}

}  // namespace

Attributes read_attributes(const NodeInfo& info) {
  constexpr int64_t kMaxGroup = 64;
  Attributes a;
  a.heads = info.get(attr::num_heads);
  if (a.heads <= 0) {
    refuse(info.title(), rule::heads,
           "num_heads is " + std::to_string(a.heads) + ", expected the number of query heads");
  }
  const int64_t given = info.get(attr::num_key_value_heads);
  a.key_heads = given == 0 ? a.heads : given;
  if (given < 0 || a.heads % a.key_heads != 0 || a.heads / a.key_heads > kMaxGroup) {
    refuse(info.title(), rule::heads,
           "num_key_value_heads is " + std::to_string(given) + ", expected 0 or a divisor of the " +
               std::to_string(a.heads) + " query heads, at most 64 times smaller");
  }
  a.scale = info.get(attr::scale_value);
  a.softcap = info.get(attr::cpu_softcap);
  if (const std::string fault = softcap_fault(a.softcap, a.scale); !fault.empty()) {
    refuse(info.title(), rule::softcap, fault);
  }
  a.layout = layout_of(info);
  a.block_size = info.get(attr::block_size);
  const int64_t precision = info.get(attr::inner_precise);
  if (precision != 0 && precision != 1) {
    refuse(info.title(), rule::inner_precise, "inner_precise is " + std::to_string(precision) + ", expected 0 or 1");
  }
  a.keys = info.get(attr::key_count);
  a.values = info.get(attr::value_count);
  if (a.keys < 1 || a.keys != a.values) {
    refuse(info.title(), rule::caches,
           "value_count is " + std::to_string(a.values) + ", expected " + std::to_string(a.keys) + " as key_count");
  }
  if (a.keys > std::numeric_limits<int32_t>::max() || !info.has_input(static_cast<size_t>(2 * a.keys))) {
    refuse(info.title(), rule::caches,
           "key_count is " + std::to_string(a.keys) + ", expected the number of keys in the list");
  }
  return a;
}

}  // namespace fa::incre_flash_attention
