#include "attributes.hpp"

#include <algorithm>
#include <utility>

namespace fa::prompt {
namespace {

struct Form {
  const char* text;
  Layout layout;
  Layout out;
  bool fused_only;
};

constexpr Form kForms[] = {
    {"BSH", Layout::BSH, Layout::BSH, false},         {"BSND", Layout::BSND, Layout::BSND, false},
    {"BNSD", Layout::BNSD, Layout::BNSD, false},      {"BNSD_BSND", Layout::BNSD, Layout::BSND, false},
    {"TND", Layout::TND, Layout::TND, true},          {"NTD", Layout::NTD, Layout::NTD, true},
    {"NSD", Layout::NSD, Layout::NSD, true},          {"BSH_BNSD", Layout::BSH, Layout::BNSD, true},
    {"BSND_BNSD", Layout::BSND, Layout::BNSD, true},  {"NTD_TND", Layout::NTD, Layout::TND, true},
    {"TND_NTD", Layout::TND, Layout::NTD, true},      {"BSH_NBSD", Layout::BSH, Layout::NBSD, true},
    {"BSND_NBSD", Layout::BSND, Layout::NBSD, true},  {"BNSD_NBSD", Layout::BNSD, Layout::NBSD, true},
};

const Form& form_of(const NodeInfo& info, const Operator& op) {
  const std::string text = info.string("input_layout", "BSH");
  std::string known;
  for (const Form& form : kForms) {
    if (form.fused_only && !op.fused) continue;
    if (text == form.text) return form;
    known += (known.empty() ? "\"" : ", \"") + std::string(form.text) + "\"";
  }
  refuse(info.title(), op, Rule::layout, "input_layout is \"" + text + "\", expected one of " + known);
}

// Far beyond every length, and no sum of a few such numbers overflows.
int64_t bounded(int64_t tokens) { return std::clamp(tokens, -kNoLimit / 2, kNoLimit / 2); }

}  // namespace

void refuse(const std::string& node, const Operator& op, Rule rule, const std::string& text) {
  const int number = op.constraint[static_cast<size_t>(rule)];
  throw Error{ort::ErrorCode::invalid_argument, node + ": " + text + " (" + op.list + "." + std::to_string(number) + ")"};
}

Attributes read_attributes(const NodeInfo& info, const Operator& op) {
  constexpr int64_t kAllTokens = 2147483647;
  constexpr int64_t kAllTokensOfPrompt = 214748647;  // as every header of PromptFlashAttention has it
  Attributes a;
  const auto refused = [&](Rule rule, const std::string& text) { refuse(info.title(), op, rule, text); };
  a.heads = info.integer("num_heads", 0);
  if (a.heads <= 0) {
    refused(Rule::heads, "num_heads is " + std::to_string(a.heads) + ", expected the number of query heads");
  }
  const int64_t stated = info.integer("num_key_value_heads", 0);
  a.key_heads = stated == 0 ? a.heads : stated;
  if (stated < 0 || a.heads % a.key_heads != 0) {
    refused(Rule::heads, "num_key_value_heads is " + std::to_string(stated) + ", expected 0 or a divisor of the " +
                             std::to_string(a.heads) + " query heads");
  }
  const Form& form = form_of(info, op);
  a.layout = form.layout;
  a.out_layout = form.out;
  a.scale = info.number(op.scale, 1.0f);
  a.pre_tokens = bounded(info.integer("pre_tokens", op.fused ? kAllTokens : kAllTokensOfPrompt));
  a.next_tokens = bounded(info.integer("next_tokens", op.fused ? kAllTokens : 0));
  a.sparse_mode = info.integer("sparse_mode", 0);
  a.zero_rows = (info.integer("inner_precise", 1) & 2) != 0;
  if (!op.fused) return a;
  a.block_size = info.integer("block_size", 0);
  a.antiquant_mode = info.integer("antiquant_mode", 0);
  a.key_antiquant_mode = info.integer("key_antiquant_mode", 0);
  a.value_antiquant_mode = info.integer("value_antiquant_mode", 0);
  a.pse_type = info.integer("pse_type", 0);
  if (a.pse_type != 0 && a.pse_type != 2 && a.pse_type != 3) {
    refused(Rule::bias, "pse_type is " + std::to_string(a.pse_type) + ", expected 0, 2 or 3");
  }
  a.statistics = info.integer("softmax_lse_flag", 0) != 0;
  a.keys = info.integer("key_count", 1);
  a.values = info.integer("value_count", 1);
  if (a.keys < 1 || a.keys != a.values) {
    refused(Rule::lists, "value_count is " + std::to_string(a.values) + ", expected " + std::to_string(a.keys) +
                             " as key_count");
  }
  return a;
}

}  // namespace fa::prompt
