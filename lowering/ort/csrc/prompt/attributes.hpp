// PromptFlashAttention and FusedInferAttentionScore: what distinguishes the two, and the attributes of a node, read and
// checked once, when the session is made.
#pragma once

#include "../call/layout.hpp"
#include "../call/signature.hpp"
#include "../types.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace prompt {

// The inputs of both operators by the places that they have in the second: the first has only the first twelve of them.
using Input = fused_infer_attention_score::Input;
using namespace fused_infer_attention_score;

static_assert(prompt_flash_attention::input_quant_offset2 == static_cast<int>(input_quant_offset2) &&
              prompt_flash_attention::input_atten_mask == static_cast<int>(input_atten_mask));

// The constraints by what they are about; PromptFlashAttention does not have all of them.
struct Rules {
  Rule types = {}, layout = {}, heads = {}, sizes = {}, mask = {}, bias = {}, scales = {}, rows = {}, pages = {};
  Rule padding = {}, lists = {}, packed = {}, rope = {}, prefix = {}, antiquant = {}, lengths = {};
};
using Topic = Rule Rules::*;

struct Operator {
  Rules rules;
  const char* const* names;  // of the inputs
  size_t inputs;
  Attribute<float> scale;
  Attribute<int64_t> pre_tokens, next_tokens;
  bool fused;  // FusedInferAttentionScore
};

struct Attributes {
  int64_t heads = 0;
  int64_t key_heads = 0;  // 0 in the node means as many as `heads`
  float scale = 1.0f;
  Layout layout = Layout::BSH;
  Layout out_layout = Layout::BSH;
  int64_t pre_tokens = 0;
  int64_t next_tokens = 0;
  int64_t sparse_mode = 0;
  bool zero_rows = false;  // bit 1 of inner_precise
  int64_t block_size = 0;
  int64_t antiquant_mode = 0;
  int64_t key_antiquant_mode = 0;
  int64_t value_antiquant_mode = 0;
  int64_t pse_type = 0;
  bool statistics = false;  // softmax_lse is asked for
  int64_t keys = 1;         // tensors of the dynamic inputs
  int64_t values = 1;

  bool packed() const { return layout == Layout::TND || layout == Layout::NTD; }
};

Attributes read_attributes(const NodeInfo& info, const Operator& op);

}  // namespace prompt
}  // namespace fa
