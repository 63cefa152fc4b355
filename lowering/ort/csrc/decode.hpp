// The input of the kernel of IncreFlashAttention: pointers, strides and numbers, already checked. Each batch entry has
// one query token. Keys and values are read in place; key and value have the same shape and the same strides.
//
//     S = scale * (q . k) + pse, or -1e12 if the key is masked;  O = softmax(S) V
//     with a soft cap c: S = c * tanh(scale * (q . k) / c) + pse
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

// If the maximum of a row is at least this score, masked keys have no weight: their exponential is 0 in float32.
inline constexpr float kMaskMatters = kMaskedScore + 1e9f;

// One batch entry. `key` and `value` point to its first valid token at head 0, or, with pages, to the pool of blocks.
struct DecodeEntry {
  const void* key = nullptr;
  const void* value = nullptr;
  const int32_t* blocks = nullptr;  // with pages: token t is in block blocks[t / block_size]
  int64_t length = 0;
  int64_t head_stride = 0;
  const uint8_t* mask = nullptr;  // from the first valid token on; not 0: masked
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
  float softcap = 0;  // 0: none

  // An int8 key or value x means (x + offset) * scale. Each is [key_heads][size], or one number; null: not quantised.
  const float* key_scale = nullptr;
  const float* key_offset = nullptr;
  const float* value_scale = nullptr;
  const float* value_offset = nullptr;
  bool antiquant_per_channel = false;

  // int8 results are round(O * scale + offset); [heads][size], or one number.
  const float* quant_scale = nullptr;
  const float* quant_offset = nullptr;
  bool quant_per_channel = false;

  // With an int8 query, scores are products of integers times dequant_scale1. Exponentials times quant_scale1 are
  // rounded to integers, and the weighted sum of the values is multiplied by dequant_scale2.
  float dequant_scale1 = 0;
  float quant_scale1 = 0;
  float dequant_scale2 = 0;

  int64_t group() const { return heads / key_heads; }
};

using Decoding = Outcome (*)(const Decode&, const Runtime&);

// The offset of token `t` at head 0 from the pointer `key` or `value` of the entry.
static inline int64_t row_of(const Decode& decode, const DecodeEntry& entry, int64_t t) {
  if (decode.block_size == 0) return t * decode.row_stride;
  const int64_t block = entry.blocks[t / decode.block_size];
  return block * decode.block_stride + t % decode.block_size * decode.row_stride;
}

}  // namespace fa
