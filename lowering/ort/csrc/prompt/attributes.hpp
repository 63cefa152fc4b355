// The differences between PromptFlashAttention and FusedInferAttentionScore, and the attributes of a node. The
// attributes are read and checked once, when the session is made.
#pragma once

#include "../call/layout.hpp"
#include "../call/signature.hpp"
#include "../types.hpp"

namespace fa {

using E = ort::Element;
#include "../descriptors.inc"

namespace prompt {

// The positions of the inputs of FusedInferAttentionScore. PromptFlashAttention has only the first twelve of these
// inputs, at the same positions.
using Input = fused_infer_attention_score::Input;
using namespace fused_infer_attention_score;

static_assert(prompt_flash_attention::input_quant_offset2 == static_cast<int>(input_quant_offset2) &&
              prompt_flash_attention::input_atten_mask == static_cast<int>(input_atten_mask));

// The numbers of the constraints, by subject. PromptFlashAttention does not have all of them.
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
  int64_t key_heads = 0;  // as many as `heads` if the node says 0
  float scale = 1.0f;
  Layout layout = Layout::BSH;
  Layout out_layout = Layout::BSH;
  int64_t pre_tokens = 0;
  int64_t next_tokens = 0;
  int64_t sparse_mode = 0;
  bool zero_rows = false;  // bit 1 of inner_precise: rows without a key are 0
  int64_t block_size = 0;
  int64_t antiquant_mode = 0;
  int64_t key_antiquant_mode = 0;
  int64_t value_antiquant_mode = 0;
  int64_t pse_type = 0;
  bool statistics = false;  // softmax_lse_flag
  int64_t keys = 1;         // number of tensors in the dynamic inputs key and value
  int64_t values = 1;

  bool packed() const { return layout == Layout::TND || layout == Layout::NTD; }
};

Attributes read_attributes(const NodeInfo& info, const Operator& op);

}  // namespace prompt
}  // namespace fa
