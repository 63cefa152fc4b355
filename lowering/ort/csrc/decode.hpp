// IncreFlashAttention as the kernels get it: one token for each batch entry, and keys and values in place. Plain pointers,
// strides and numbers, already checked. Key and value have the same shape and the same strides.
//
//     S = scale * (q . k) + pse;  masked: -1e12;  O = softmax(S) V
//
// Query and output are [entry][head][size] in every layout, because there is one token. Strides are in elements.
#pragma once

#include "attention.hpp"

namespace fa {

// The type of a tensor's elements.
enum class Cell : uint8_t { float32, float16, bfloat16, int8 };

// (static: see attention.hpp)
static inline int64_t bytes_of(Cell cell) { return cell == Cell::float32 ? 4 : cell == Cell::int8 ? 1 : 2; }

inline constexpr float kMaskedScore = -1e12f;

// A score so far above kMaskedScore gives masked keys no weight: exp(-88) is the smallest normal float.
inline constexpr float kMaskMatters = kMaskedScore + 1e9f;

// One batch entry. If the cache is not paged, `key` and `value` point to the entry's first valid token at head 0.
struct DecodeEntry {
  const void* key = nullptr;
  const void* value = nullptr;
  const int32_t* blocks = nullptr;  // pages: token t is in block blocks[t / block_size]
  int64_t length = 0;
  int64_t head_stride = 0;
  const uint8_t* mask = nullptr;  // of the first valid token on; not 0: masked
  int64_t pse = 0;                // index of the first valid token at head 0
};

struct Decode {
  Cell query_cell = Cell::float32;
  Cell cell = Cell::float32;  // of keys and values
  Cell out_cell = Cell::float32;
  Cell pse_cell = Cell::float32;
  int64_t heads = 0;
  int64_t key_heads = 0;  // query head n reads key head n / (heads / key_heads)
  int64_t size = 0;       // of a head
  const void* query = nullptr;
  void* out = nullptr;
  int64_t row_stride = 0;
  int64_t block_size = 0;  // 0: no pages
  int64_t block_stride = 0;
  const DecodeEntry* entries = nullptr;
  int64_t entry_count = 0;
  const void* pse = nullptr;
  int64_t pse_head = 0;
  float scale = 1.0f;

  // int8 keys and values stand for (x + offset) * scale; [key_heads][size], or one number. Null: not quantised.
  const float* key_scale = nullptr;
  const float* key_offset = nullptr;
  const float* value_scale = nullptr;
  const float* value_offset = nullptr;
  bool antiquant_per_channel = false;

  // int8 results are round(O * scale + offset); [heads][size], or one number.
  const float* quant_scale = nullptr;
  const float* quant_offset = nullptr;
  bool quant_per_channel = false;

  // With an int8 query: products of integers, and exponentials rounded to integers.
  float dequant_scale1 = 0;
  float quant_scale1 = 0;
  float dequant_scale2 = 0;

  int64_t group() const { return heads / key_heads; }
};

using Decoding = Outcome (*)(const Decode&, const Runtime&);

// The offset of token `t` of an entry from the beginning of its tensor (or pool).
static inline int64_t row_of(const Decode& decode, const DecodeEntry& entry, int64_t t) {
  if (decode.block_size == 0) return t * decode.row_stride;
  const int64_t block = entry.blocks[t / decode.block_size];
  return block * decode.block_stride + t % decode.block_size * decode.row_stride;
}

}  // namespace fa
