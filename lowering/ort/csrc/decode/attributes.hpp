// The attributes of IncreFlashAttention, read and checked once, when the session is made, and its errors.
#pragma once

#include "../call/layout.hpp"

namespace fa::incre_flash_attention {

struct Attributes {
  int64_t heads = 0;
  int64_t key_heads = 0;  // 0 in the node means as many as `heads`
  float scale = 1.0f;
  Layout layout = Layout::BSH;
  int64_t block_size = 0;
  int64_t keys = 1;  // tensors of the dynamic inputs
  int64_t values = 1;
};

// Throws an error that begins with the node's title and ends with the constraint's number.
[[noreturn]] void refuse(const std::string& node, int constraint, const std::string& text);

Attributes read_attributes(const NodeInfo& info);

}  // namespace fa::incre_flash_attention
