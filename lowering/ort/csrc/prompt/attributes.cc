#include "attributes.hpp"

#include <algorithm>
#include <utility>

namespace fa::prompt {
namespace {

// A value of input_layout: the layouts of query and attention_out.
struct InputLayout {
  const char* text;
  Layout layout;
  Layout out;
  bool fused_only;  // only FusedInferAttentionScore has it
};

constexpr InputLayout kInputLayouts[] = {
    {"BSH", Layout::BSH, Layout::BSH, false},         {"BSND", Layout::BSND, Layout::BSND, false},
    {"BNSD", Layout::BNSD, Layout::BNSD, false},      {"BNSD_BSND", Layout::BNSD, Layout::BSND, false},
    {"TND", Layout::TND, Layout::TND, true},          {"NTD", Layout::NTD, Layout::NTD, true},
    {"NSD", Layout::NSD, Layout::NSD, true},          {"BSH_BNSD", Layout::BSH, Layout::BNSD, true},
    {"BSND_BNSD", Layout::BSND, Layout::BNSD, true},  {"NTD_TND", Layout::NTD, Layout::TND, true},
    {"TND_NTD", Layout::TND, Layout::NTD, true},      {"BSH_NBSD", Layout::BSH, Layout::NBSD, true},
    {"BSND_NBSD", Layout::BSND, Layout::NBSD, true},  {"BNSD_NBSD", Layout::BNSD, Layout::NBSD, true},
};

const InputLayout& input_layout_of(const NodeInfo& info, const Operator& op) {
  const std::string text = info.get(attr::input_layout);
  std::string known;
  for (const InputLayout& input_layout : kInputLayouts) {
    if (input_layout.fused_only && !op.fused) continue;
    if (text == input_layout.text) return input_layout;
    known += (known.empty() ? "\"" : ", \"") + std::string(input_layout.text) + "\"";
  }
  refuse(info.title(), op.rules.layout, "input_layout is \"" + text + "\", expected one of " + known);
}

// A window clamped to a number that exceeds every length. Sums of a few such numbers do not overflow.
int64_t clamp_window(int64_t tokens) { return std::clamp(tokens, -kNoLimit / 2, kNoLimit / 2); }

}  // namespace

Attributes read_attributes(const NodeInfo& info, const Operator& op) {
  Attributes a;
  const auto refused = [&](Topic topic, const std::string& text) { refuse(info.title(), op.rules.*topic, text); };
  a.heads = info.get(attr::num_heads);
  if (a.heads <= 0) {
    refused(&Rules::heads, "num_heads is " + std::to_string(a.heads) + ", expected the number of query heads");
  }
  const int64_t given = info.get(attr::num_key_value_heads);
  a.key_heads = given == 0 ? a.heads : given;
  if (given < 0 || a.heads % a.key_heads != 0) {
    refused(&Rules::heads, "num_key_value_heads is " + std::to_string(given) + ", expected 0 or a divisor of the " +
                               std::to_string(a.heads) + " query heads");
  }
  const InputLayout& input_layout = input_layout_of(info, op);
  a.layout = input_layout.layout;
  a.out_layout = input_layout.out;
  a.scale = info.get(op.scale);
  a.pre_tokens = clamp_window(info.get(op.pre_tokens));
  a.next_tokens = clamp_window(info.get(op.next_tokens));
  a.sparse_mode = info.get(attr::sparse_mode);
  a.zero_rows = (info.get(attr::inner_precise) & 2) != 0;
  if (!op.fused) return a;
  a.block_size = info.get(attr::block_size);
  a.antiquant_mode = info.get(attr::antiquant_mode);
  a.key_antiquant_mode = info.get(attr::key_antiquant_mode);
  a.value_antiquant_mode = info.get(attr::value_antiquant_mode);
  a.pse_type = info.get(attr::pse_type);
  if (a.pse_type != 0 && a.pse_type != 2 && a.pse_type != 3) {
    refused(&Rules::bias, "pse_type is " + std::to_string(a.pse_type) + ", expected 0, 2 or 3");
  }
  a.statistics = info.get(attr::softmax_lse_flag);
  a.keys = info.get(attr::key_count);
  a.values = info.get(attr::value_count);
  if (a.keys < 1 || a.keys != a.values) {
    refused(&Rules::lists,
            "value_count is " + std::to_string(a.values) + ", expected " + std::to_string(a.keys) + " as key_count");
  }
  return a;
}

}  // namespace fa::prompt
