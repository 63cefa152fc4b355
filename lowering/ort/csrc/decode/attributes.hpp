// The attributes of IncreFlashAttention, read and checked once, when the session is made.
#pragma once

#include "../call/layout.hpp"

namespace fa::incre_flash_attention {

struct Attributes {
  int64_t heads = 0;
  int64_t key_heads = 0;  // as many as `heads` if the node says 0
  float scale = 1.0f;
  float softcap = 0;
  Layout layout = Layout::BSH;
  int64_t block_size = 0;
  int64_t keys = 1;  // number of tensors in the dynamic inputs key and value
  int64_t values = 1;
};

Attributes read_attributes(const NodeInfo& info);

}  // namespace fa::incre_flash_attention
