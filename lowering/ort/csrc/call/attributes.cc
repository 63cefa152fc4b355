#include "attributes.hpp"

#include <initializer_list>
#include <string_view>
#include <utility>

#include "../types.hpp"
#include "softcap.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace {

// FlashAttentionScore and its gradient share these attributes and their defaults, so the forward operator's names serve
// both. Only the forward operator has cpu_masked_values and cpu_mask_batch; a gradient gets their defaults.
namespace attr = flash_attention_score::attr;
namespace gradient = flash_attention_score_grad::attr;

template <class Value>
constexpr bool same(const Attribute<Value>& a, const Attribute<Value>& b) {
  return std::string_view(a.name) == b.name && a.fallback == b.fallback && a.required == b.required;
}
template <>
constexpr bool same(const Attribute<const char*>& a, const Attribute<const char*>& b) {
  return std::string_view(a.name) == b.name && std::string_view(a.fallback) == b.fallback && a.required == b.required;
}
static_assert(same(attr::scale_value, gradient::scale_value) && same(attr::keep_prob, gradient::keep_prob) &&
              same(attr::pre_tockens, gradient::pre_tockens) && same(attr::next_tockens, gradient::next_tockens) &&
              same(attr::head_num, gradient::head_num) && same(attr::input_layout, gradient::input_layout) &&
              same(attr::sparse_mode, gradient::sparse_mode) && same(attr::pse_type, gradient::pse_type) &&
              same(attr::cpu_empty_rows, gradient::cpu_empty_rows) &&
              same(attr::cpu_nan_rows, gradient::cpu_nan_rows) && same(attr::cpu_mask_value, gradient::cpu_mask_value) &&
              same(attr::cpu_masked_bias, gradient::cpu_masked_bias) && same(attr::cpu_softcap, gradient::cpu_softcap));

class Reader {
 public:
  Reader(const NodeInfo& info, const Signature& signature)
      : info_(info), signature_(signature), diagnostics_{info.title(), signature} {}

  Attributes read() const {
    Attributes a;
    a.scale = info_.get(attr::scale_value);
    a.pre_tokens = info_.get(attr::pre_tockens);
    a.next_tokens = info_.get(attr::next_tockens);
    a.head_num = info_.get(attr::head_num);
    if (a.head_num <= 0) {
      diagnostics_.invalid(&Rules::heads,
                           "head_num is " + std::to_string(a.head_num) + ", expected the number of query heads");
    }
    a.layout = one_of<Layout>(&Rules::layout, attr::input_layout,
                              {{"BSH", Layout::BSH},
                               {"SBH", Layout::SBH},
                               {"BSND", Layout::BSND},
                               {"BNSD", Layout::BNSD},
                               {"TND", Layout::TND}});
    a.sparse_mode = sparse_mode(a.layout);
    a.pse_type = pse_type();
    a.softcap = softcap(a.scale, a.pse_type);
    a.keep_prob = keep_prob();
    a.statistics_like_input =
        one_of<bool>(&Rules::statistics, signature_.statistics_layout, {{"", false}, {"same_as_input", true}});
    a.empty_rows = one_of<EmptyRows>(&Rules::mask, attr::cpu_empty_rows,
                                     {{"", EmptyRows::zero},
                                      {"zero", EmptyRows::zero},
                                      {"mean", EmptyRows::mean},
                                      {"unmasked", EmptyRows::unmasked},
                                      {"nan", EmptyRows::nan}});
    a.nan_rows = one_of<NanRows>(&Rules::mask, attr::cpu_nan_rows,
                                 {{"", NanRows::nan}, {"zero", NanRows::zero}, {"infinite", NanRows::infinite}});
    a.masked_bias = one_of<bool>(&Rules::mask, attr::cpu_masked_bias, {{"", false}, {"added", true}});
    a.masked_values = one_of<bool>(&Rules::mask, attr::cpu_masked_values, {{"", true}, {"zero", false}});
    a.repeated_masks = one_of<bool>(&Rules::mask, attr::cpu_mask_batch, {{"", false}, {"repeated", true}});
    a.mask_value = info_.get(attr::cpu_mask_value);
    if (a.masked_bias && !(has(Role::pse) && has(Role::atten_mask))) {
      diagnostics_.invalid(&Rules::mask,
                           std::string("cpu_masked_bias is \"added\" without the inputs atten_mask and ") +
                               signature_.name(Role::pse) + ", expected \"\"");
    }
    if (a.masked_bias && !a.masked_values) {
      diagnostics_.invalid(&Rules::mask, "cpu_masked_values is \"zero\" beside cpu_masked_bias, expected \"\"");
    }
    if (a.repeated_masks && a.layout == Layout::TND) {
      diagnostics_.invalid(&Rules::mask, "cpu_mask_batch is \"repeated\" for input_layout TND, expected \"\"");
    }
    if (has(Role::sink) && a.empty_rows != EmptyRows::zero) {
      diagnostics_.invalid(&Rules::sink, "cpu_empty_rows is \"" + info_.get(attr::cpu_empty_rows) +
                                             "\" beside a sink, which no mask excludes, expected \"\" or \"zero\"");
    }
    return a;
  }

 private:
  bool has(Role role) const { return info_.has_input(signature_.positions[static_cast<size_t>(role)]); }

  // The value that belongs to the text of an attribute. Throws if `values` does not contain the text.
  template <class Value>
  Value one_of(Topic topic, const Attribute<const char*>& attribute,
               std::initializer_list<std::pair<const char*, Value>> values) const {
    const std::string text = info_.get(attribute);
    std::string known;
    for (const auto& [name, value] : values) {
      if (text == name) return value;
      known += (known.empty() ? "\"" : ", \"") + std::string(name) + "\"";
    }
    diagnostics_.invalid(topic, std::string(attribute.name) + " is \"" + text + "\", expected one of " + known);
  }

  int64_t sparse_mode(Layout layout) const {
    const int64_t mode = info_.get(attr::sparse_mode);
    const std::string found = "sparse_mode is " + std::to_string(mode);
    if (!has(Role::atten_mask)) return 0;  // the operator ignores the mode
    if (mode < 0 || mode > 8) diagnostics_.invalid(&Rules::mode, found + ", expected 0 to 8");
    if (layout == Layout::TND ? mode == 5 : mode > 6) {
      const char* modes = layout == Layout::TND ? "0 to 4 or 6 to 8" : "0 to 6";
      diagnostics_.invalid(&Rules::mode, found + ", expected " + modes + " for input_layout " + text_of(layout));
    }
    return mode;
  }

  int64_t pse_type() const {
    const int64_t type = info_.get(attr::pse_type);
    const std::string found = "pse_type is " + std::to_string(type);
    if (type < 0 || type > 3) diagnostics_.invalid(&Rules::pse_type, found + ", expected 0 to 3");
    if (type != 1 && !has(Role::pse)) {
      diagnostics_.invalid(&Rules::pse_type,
                           found + " without the input " + signature_.name(Role::pse) + ", expected 1");
    }
    return type;
  }

  float softcap(float scale, int64_t pse_type) const {
    const float cap = info_.get(attr::cpu_softcap);
    const std::string fault = softcap_fault(cap, scale);
    if (!fault.empty()) diagnostics_.invalid(&Rules::softcap, fault);
    if (cap != 0 && pse_type == 1 && has(Role::pse)) {
      diagnostics_.invalid(&Rules::softcap, std::string("pse_type is 1 beside cpu_softcap, expected 0, 2 or 3: ") +
                                                signature_.name(Role::pse) + " is added after the cap");
    }
    return cap;
  }

  float keep_prob() const {
    const float keep = info_.get(attr::keep_prob);
    const std::string found = "keep_prob is " + std::to_string(keep);
    if (!(keep > 0.0f && keep <= 1.0f)) {
      diagnostics_.invalid(&Rules::keep_prob, found + ", expected more than 0 and at most 1");
    }
    if (keep < 1.0f && !has(Role::drop_mask)) {
      diagnostics_.invalid(&Rules::dropout, found + " without the input drop_mask, which only 950 draws itself");
    }
    return keep;
  }

  const NodeInfo& info_;
  const Signature& signature_;
  const Diagnostics diagnostics_;
};

}  // namespace

Attributes read_attributes(const NodeInfo& info, const Signature& signature) { return Reader(info, signature).read(); }

}  // namespace fa
