#include "attributes.hpp"

#include <initializer_list>
#include <utility>

namespace fa {
namespace {

class Reader {
 public:
  Reader(const NodeInfo& info, const Signature& signature)
      : info_(info), signature_(signature), complaints_{info.title(), signature} {}

  Attributes read() const {
    constexpr int64_t kAllTokens = 2147483647;  // the operator's default
    Attributes a;
    a.scale = info_.number("scale_value", 1.0f);
    a.pre_tokens = info_.integer("pre_tockens", kAllTokens);
    a.next_tokens = info_.integer("next_tockens", kAllTokens);
    a.head_num = info_.integer("head_num", 0);
    if (a.head_num <= 0) {
      complaints_.invalid(Topic::heads,
                          "head_num is " + std::to_string(a.head_num) + ", expected the number of query heads");
    }
    a.layout = one_of<Layout>(Topic::layout, "input_layout",
                              {{"BSH", Layout::BSH}, {"SBH", Layout::SBH}, {"BSND", Layout::BSND},
                               {"BNSD", Layout::BNSD}, {"TND", Layout::TND}});
    a.sparse_mode = sparse_mode(a.layout);
    a.pse_type = pse_type();
    a.keep_prob = keep_prob();
    a.statistics_like_input = one_of<bool>(Topic::statistics, signature_.statistics_layout,
                                           {{"", false}, {"same_as_input", true}});
    a.empty_rows = one_of<EmptyRows>(Topic::mask, "cpu_empty_rows",
                                     {{"", EmptyRows::zero}, {"zero", EmptyRows::zero}, {"mean", EmptyRows::mean},
                                      {"unmasked", EmptyRows::unmasked}, {"nan", EmptyRows::nan}});
    a.nan_rows = one_of<NanRows>(Topic::mask, "cpu_nan_rows",
                                 {{"", NanRows::nan}, {"zero", NanRows::zero}, {"infinite", NanRows::infinite}});
    a.masked_bias = one_of<bool>(Topic::mask, "cpu_masked_bias", {{"", false}, {"added", true}});
    a.masked_values = one_of<bool>(Topic::mask, "cpu_masked_values", {{"", true}, {"zero", false}});
    a.mask_value = info_.number("cpu_mask_value", -__builtin_inff());
    if (a.masked_bias && !(has(Role::pse) && has(Role::atten_mask))) {
      complaints_.invalid(Topic::mask, std::string("cpu_masked_bias is \"added\" without the inputs atten_mask and ") +
                                           signature_.name(Role::pse) + ", expected \"\"");
    }
    if (a.masked_bias && !a.masked_values) {
      complaints_.invalid(Topic::mask, "cpu_masked_values is \"zero\" beside cpu_masked_bias, expected \"\"");
    }
    if (has(Role::sink) && a.empty_rows != EmptyRows::zero) {
      complaints_.invalid(Topic::sink, "cpu_empty_rows is \"" + info_.string("cpu_empty_rows", "") +
                                           "\" beside a sink, which no mask excludes, expected \"\" or \"zero\"");
    }
    return a;
  }

 private:
  bool has(Role role) const { return info_.has_input(signature_.place[static_cast<size_t>(role)]); }

  template <class Value>
  Value one_of(Topic topic, const char* name, std::initializer_list<std::pair<const char*, Value>> values) const {
    const std::string text = info_.string(name, "");
    std::string known;
    for (const auto& [word, value] : values) {
      if (text == word) return value;
      known += (known.empty() ? "\"" : ", \"") + std::string(word) + "\"";
    }
    complaints_.invalid(topic, std::string(name) + " is \"" + text + "\", expected one of " + known);
  }

  int64_t sparse_mode(Layout layout) const {
    const int64_t mode = info_.integer("sparse_mode", 0);
    const std::string found = "sparse_mode is " + std::to_string(mode);
    if (!has(Role::atten_mask)) return 0;  // the operator ignores the mode
    if (mode < 0 || mode > 8) complaints_.invalid(Topic::mode, found + ", expected 0 to 8");
    if (layout == Layout::TND ? mode == 5 : mode > 6) {
      const char* modes = layout == Layout::TND ? "0 to 4 or 6 to 8" : "0 to 6";
      complaints_.invalid(Topic::mode, found + ", expected " + modes + " for input_layout " + text_of(layout));
    }
    return mode;
  }

  int64_t pse_type() const {
    const int64_t type = info_.integer("pse_type", 1);
    const std::string found = "pse_type is " + std::to_string(type);
    if (type < 0 || type > 3) complaints_.invalid(Topic::pse_type, found + ", expected 0 to 3");
    if (type != 1 && !has(Role::pse)) {
      complaints_.invalid(Topic::pse_type, found + " without the input " + signature_.name(Role::pse) + ", expected 1");
    }
    return type;
  }

  float keep_prob() const {
    const float keep = info_.number("keep_prob", 1.0f);
    const std::string found = "keep_prob is " + std::to_string(keep);
    if (!(keep > 0.0f && keep <= 1.0f)) {
      complaints_.invalid(Topic::keep_prob, found + ", expected more than 0 and at most 1");
    }
    if (keep < 1.0f && !has(Role::drop_mask)) {
      complaints_.invalid(Topic::dropout, found + " without the input drop_mask, which only 950 draws itself");
    }
    return keep;
  }

  const NodeInfo& info_;
  const Signature& signature_;
  const Complaints complaints_;
};

}  // namespace

Attributes read_attributes(const NodeInfo& info, const Signature& signature) { return Reader(info, signature).read(); }

}  // namespace fa
