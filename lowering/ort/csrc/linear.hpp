// The input of the kernels of linear attention and of the short causal convolution: pointers, strides and numbers, already
// checked. The formulas are in reference_linear.cc.
//
// A head has a state S of key_size x value_size numbers. A token with key k, value v, log decay g, and query q changes it:
//
//     S' = diag(e^g) S
//     S  = S' + k v^T                              Correction::none
//     S  = S' + k (beta (v - S'^T k))^T            Correction::delta
//     S  = S' + k v^T + p (r^T S')                 Correction::general
//     S  = S' + k v^T + p (r^T S)                  the same with reads_before_decay
//     o  = scale S^T q
//
// g is one number for each head, one for each key dimension, or 0 without a gate. All of it is computed in float32, whatever the
// types of the tensors are, except that kernels with products of bfloat16 round the operands of these products.
#pragma once

#include "attention.hpp"

namespace fa::linear {

enum class Gate : uint8_t { none, head, key };

enum class Correction : uint8_t { none, delta, general };

// A tensor with a row of numbers for each token and head. `token` and `head` are strides in elements: element d of token t
// and head n is data[t * token + n * head + d]. A stride of 0 shares the row.
struct Rows {
  const void* data = nullptr;
  int64_t token = 0;
  int64_t head = 0;
  Type type = Type::float32;
};

// States, one for each entry and head. Element (i, j) of S, with key dimension i and value dimension j, is
// data[e * entry + n * head + i * key + j * value] for entry e and head n, where `key` or `value` is 1.
struct States {
  void* data = nullptr;
  int64_t entry = 0;
  int64_t head = 0;
  int64_t key = 0;
  int64_t value = 1;
  Type type = Type::float32;
};

// One sequence: its tokens follow each other. Where two sequences have one entry of the states, the later one continues
// from what the earlier one wrote.
struct Sequence {
  int64_t first = 0;   // its first token in query, key, value, decay, beta and out
  int64_t tokens = 0;
  int64_t past = -1;   // its entry in past_state; -1: the state begins with 0
  int64_t present = 0; // its entry in present_state
};

// `heads` is the number of states of an entry. Key head n * key_heads / heads belongs to state n. The result has
// `out_heads` heads, the larger one of heads and query_heads: query head n * query_heads / out_heads and state
// n * heads / out_heads give head n of the result. Each of these numbers divides the larger ones.
//
// past and present may be the same memory, entry by entry. The state of a sequence without tokens is copied.
struct Problem {
  Gate gate = Gate::none;
  Correction correction = Correction::none;
  bool reads_before_decay = false;  // r reads S instead of S', Correction::general
  int64_t heads = 0;
  int64_t query_heads = 0;
  int64_t key_heads = 0;
  int64_t out_heads = 0;
  int64_t key_size = 0;
  int64_t value_size = 0;
  float scale = 1.0f;
  Rows query;      // query_heads rows of key_size
  Rows key;        // key_heads rows of key_size
  Rows value;      // `heads` rows of value_size
  Rows decay;      // g: `heads` rows of 1 or key_size; not used without a gate
  Rows beta;       // `heads` rows of 1, Correction::delta
  Rows write;      // p: `heads` rows of key_size, Correction::general
  Rows read;       // r: `heads` rows of key_size, Correction::general
  Rows out;        // out_heads rows of value_size; data is null if nobody reads it
  States past;     // data is null if there is none
  States present;  // data is null if nobody reads it
  const Sequence* sequences = nullptr;
  int64_t sequence_count = 0;
};

enum class Activation : uint8_t { none, silu };

// The causal convolution along the tokens, each channel by itself:
//
//     out[t] = activation(bias + sum over j < width of weight[j] * in[t - (width - 1) + j]),
//
// where tokens before the first one come from the past state, or are 0. The present state is the last width - 1 tokens of
// the past and the input together. With adds_input, in[t] is added to out[t] before it is rounded; this needs channels_last.
struct Convolution {
  Activation activation = Activation::none;
  Type type = Type::float32;  // of all tensors
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t tokens = 0;
  int64_t width = 1;
  bool adds_input = false;
  bool channels_last = false;    // input and output [batch, tokens, channels] instead of [batch, channels, tokens]
  const void* input = nullptr;
  const void* weight = nullptr;  // [channels, width]
  const void* bias = nullptr;    // [channels], or null
  const void* past = nullptr;    // [batch, channels, width - 1], or null
  void* out = nullptr;           // null if nobody reads it
  void* present = nullptr;       // [batch, channels, width - 1]; null if nobody reads it; may be `past`
};

// The kernels of one instruction set.
struct Kernels {
  Outcome (*attention)(const Problem&, const Runtime&);
  Outcome (*convolution)(const Convolution&, const Runtime&);
};

}  // namespace fa::linear
