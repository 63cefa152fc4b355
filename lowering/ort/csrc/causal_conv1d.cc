// CausalConv1d and FusedCausalConv1d: the causal convolution of linear.hpp. The tokens before a sequence are rows of a line
// of conv_states, and its last tokens are left in a line. Which rows these are, each operator says in its namespace.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace {

namespace plain = causal_conv1d;
namespace fused = fused_causal_conv1d;

// The inputs that both operators have at the same places.
constexpr size_t kX = plain::input_x, kWeight = plain::input_weight, kStates = plain::input_conv_states;
static_assert(kX == size_t{fused::input_x} && kWeight == size_t{fused::input_weight});
static_assert(kStates == size_t{fused::input_conv_states} && plain::kRequiredInputs == fused::kRequiredInputs);

// In what the operators differ.
struct Kind {
  const char* const* inputs;
  size_t count, query_start_loc, cache_indices;
  bool drops_empty;  // an optional input without elements is absent
  Rule shapes, sizes, contents;
  int64_t most_sequences, most_tokens, least_width, most_width;
};
constexpr Kind kPlain{plain::kInputs, plain::kInputCount, plain::input_query_start_loc, plain::input_cache_indices, true,
                      plain::rule::shapes, plain::rule::sizes, plain::rule::contents, 1024, 16384, 2, 4};
constexpr Kind kFused{fused::kInputs, fused::kInputCount, fused::input_query_start_loc, fused::input_cache_indices, false,
                      fused::rule::shapes, fused::rule::sizes, fused::rule::contents, 256, 8, 3, 3};
constexpr int64_t kLeastChannels = 64, kMostChannels = 16384, kChannelUnit = 16, kMostPacked = 1 << 20;

using Number = uint16_t;  // float16 or bfloat16

const Number* numbers_of(const Tensor& tensor) { return static_cast<const Number*>(tensor.data); }

// Writes rows of channels as channels of rows.
void turn(const Number* from, int64_t rows, int64_t channels, Number* to) {
  for (int64_t n = 0; n < channels; ++n) {
    for (int64_t row = 0; row < rows; ++row) *to++ = from[row * channels + n];
  }
}

// Rows that a sequence leaves in conv_states: its rows [from, from + count) go to a line, from row `at` on.
struct Kept {
  int64_t line, at, from, count;
};

// A sequence has `history` rows from before it, which are 0 if `before` is null, and then its tokens of x. The convolution
// begins with the last width - 1 rows of the history.
struct PackedSequence {
  int64_t first = 0;
  int64_t tokens = 0;
  int64_t history = 0;
  const Number* before = nullptr;
  bool skipped = false;
  std::vector<Kept> kept;
};

struct Call {
  std::vector<Tensor> inputs;
  int64_t batch = 0, channels = 0, width = 0, lines = 0, length = 0;
  bool is_packed = false;
  std::vector<PackedSequence> sequences;

  const Number* line(int64_t number) const { return numbers_of(inputs[kStates]) + number * length * channels; }
};

class LineConvolution : public OpKernel {
 protected:
  LineConvolution(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, const Kind& kind, int64_t skipped)
      : api_(api), node_(node.title()), skipped_(skipped), resources_(api, info), variant_(chosen_variant()), kind_(kind) {}

  [[noreturn]] void fail(Rule rule, const std::string& text) const { refuse(node_, rule, text); }
  Call call_of(ort::KernelContext* context) const;
  void check_shape(const Call& call, size_t input, const Dims& expected) const;
  void check_limits(const Call& call, int64_t least) const;
  void check_lines(const Call& call) const;
  void convolve(ort::KernelContext* context, const Call& call, linear::Convolution convolution, void* y) const;
  void keep(const Call& call, void* states) const;

  ort::Api api_;
  std::string node_;
  int64_t skipped_;  // sequences with this line are skipped

 private:
  void check_sizes(const Call& call) const;

  NodeResources resources_;
  const Variant& variant_;
  const Kind& kind_;
};

void LineConvolution::check_shape(const Call& call, size_t input, const Dims& expected) const {
  fa::check_shape(node_, kind_.shapes, kind_.inputs[input], call.inputs[input], expected);
}

// The inputs and sizes. The sequences have their tokens.
Call LineConvolution::call_of(ort::KernelContext* context) const {
  Call call;
  call.inputs = tensors_of(api_, context, kind_.count);
  for (size_t i = plain::kRequiredInputs; i < call.inputs.size() && kind_.drops_empty; ++i) {
    if (call.inputs[i].present() && call.inputs[i].count() == 0) call.inputs[i] = {};
  }
  const Tensor &x = call.inputs[kX], &weight = call.inputs[kWeight], &states = call.inputs[kStates];
  const Tensor& limits = call.inputs[kind_.query_start_loc];
  if (x.rank() != 2 && x.rank() != 3) {
    fail(kind_.shapes, "input x has the shape " + text_of(x.dims) + ", expected [B,S,dim] or [T,dim]");
  }
  call.is_packed = x.rank() == 2;
  if (call.is_packed && (!limits.present() || limits.rank() != 1)) {
    fail(kind_.shapes, limits.present() ? "input query_start_loc has the shape " + text_of(limits.dims) + ", expected [B+1]"
                                        : "input query_start_loc is absent, expected one with packed tokens");
  }
  if (weight.rank() != 2) fail(kind_.shapes, "input weight has the shape " + text_of(weight.dims) + ", expected [K,dim]");
  if (states.rank() != 3) {
    fail(kind_.shapes, "input conv_states has the shape " + text_of(states.dims) + ", expected [lines,length,dim]");
  }
  call.batch = call.is_packed ? limits.dims[0] - 1 : x.dims[0];
  call.channels = x.dims.back();
  call.width = weight.dims[0];
  call.lines = states.dims[0];
  call.length = states.dims[1];
  check_shape(call, kWeight, {call.width, call.channels});
  check_shape(call, kStates, {call.lines, call.length, call.channels});
  check_shape(call, kind_.query_start_loc, {call.batch + 1});
  if (call.batch < 1 || call.batch > kind_.most_sequences) {
    fail(kind_.shapes, "input x has " + std::to_string(call.batch) + " sequences, expected 1 to " +
                           std::to_string(kind_.most_sequences));
  }
  check_sizes(call);
  for (int64_t n = 0; n < call.batch; ++n) {
    PackedSequence& sequence = call.sequences.emplace_back();
    const int64_t length = x.dims[1];
    sequence.first = call.is_packed ? integers_of(limits)[n] : n * length;
    sequence.tokens = call.is_packed ? integers_of(limits)[n + 1] - sequence.first : length;
  }
  return call;
}

void LineConvolution::check_sizes(const Call& call) const {
  const struct {
    size_t input;
    const char* what;
    int64_t size, least, most;
  } sizes[] = {{kWeight, "rows", call.width, kind_.least_width, kind_.most_width},
               {kX, "channels", call.channels, kLeastChannels, kMostChannels},
               {kX, call.is_packed ? "tokens" : "tokens in a sequence", call.inputs[kX].dims[call.is_packed ? 0 : 1], 1,
                call.is_packed ? kMostPacked : kind_.most_tokens},
               {kStates, "lines", call.lines, call.batch, kAny},
               {kStates, "tokens in a line", call.length, call.width - 1, kAny}};
  for (const auto& each : sizes) {
    if (each.size >= each.least && each.size <= each.most) continue;
    fail(kind_.sizes, std::string("input ") + kind_.inputs[each.input] + " has " + std::to_string(each.size) + " " +
                          each.what + ", expected " + text_of_range(each.least, each.most));
  }
  if (call.channels % kChannelUnit == 0) return;
  fail(kind_.sizes, "input x has " + std::to_string(call.channels) + " channels, expected a multiple of " +
                        std::to_string(kChannelUnit) + ", which are 32 bytes");
}

// The limits of packed sequences begin with 0, end with the tokens, and rise by `least` or more.
void LineConvolution::check_limits(const Call& call, int64_t least) const {
  if (!call.is_packed) return;
  const Tensor& limits = call.inputs[kind_.query_start_loc];
  bool rises = integers_of(limits)[0] == 0;
  for (const PackedSequence& sequence : call.sequences) rises = rises && sequence.tokens >= least;
  if (!rises) {
    fail(kind_.contents, std::string("input query_start_loc is not a list that ") + (least == 0 ? "does not fall" : "rises") +
                             " and begins with 0");
  }
  const int64_t end = integers_of(limits)[call.batch], tokens = call.inputs[kX].dims[0];
  if (end == tokens) return;
  fail(kind_.contents, "input query_start_loc ends with " + std::to_string(end) + ", expected " + std::to_string(tokens) +
                           ", the tokens of x");
}

// cache_indices names lines of conv_states, each once, or none.
void LineConvolution::check_lines(const Call& call) const {
  const Tensor& indices = call.inputs[kind_.cache_indices];
  std::vector<bool> named(static_cast<size_t>(call.lines));
  for (int64_t n = 0; indices.present() && n < indices.count(); ++n) {
    const int64_t line = integers_of(indices)[n];
    if (line == skipped_) continue;
    if (line < 0 || line >= call.lines) {
      fail(kind_.contents, "input cache_indices has " + std::to_string(line) + ", expected a line of conv_states or " +
                               std::to_string(skipped_));
    }
    if (named[static_cast<size_t>(line)]) fail(kind_.contents, "input cache_indices names a line twice, expected each once");
    named[static_cast<size_t>(line)] = true;
  }
}

// Computes y. `convolution` has the activation and the bias. The rows of skipped sequences are 0.
void LineConvolution::convolve(ort::KernelContext* context, const Call& call, linear::Convolution c, void* y) const {
  const Number* x = numbers_of(call.inputs[kX]);
  const int64_t channels = call.channels, history = call.width - 1;
  std::vector<Number> turned(static_cast<size_t>(channels * call.width)), past;
  turn(numbers_of(call.inputs[kWeight]), call.width, channels, turned.data());
  c.type = type_of(call.inputs[kX].type);
  c.channels = channels;
  c.width = call.width;
  c.channels_last = true;
  c.weight = turned.data();
  CallRuntime runtime(api_, context, resources_);
  const std::vector<PackedSequence>& all = call.sequences;
  for (size_t n = 0, end = 0; n < all.size(); n = end) {
    const PackedSequence& first = all[n];
    // Sequences of one length that follow each other are a batch.
    bool reads = false;
    for (end = n; end < all.size() && all[end].tokens == first.tokens && all[end].skipped == first.skipped; ++end) {
      reads = reads || all[end].before != nullptr;
    }
    const int64_t entries = static_cast<int64_t>(end - n), start = first.first * channels;
    Number* out = static_cast<Number*>(y) + start;
    if (first.tokens == 0) continue;
    if (first.skipped) {
      std::memset(out, 0, static_cast<size_t>(entries * first.tokens * channels) * sizeof(Number));
      continue;
    }
    past.assign(static_cast<size_t>(reads ? entries * channels * history : 0), 0);
    for (int64_t entry = 0; entry < entries && reads; ++entry) {
      const PackedSequence& sequence = all[n + static_cast<size_t>(entry)];
      if (sequence.before == nullptr) continue;
      turn(sequence.before + (sequence.history - history) * channels, history, channels,
           past.data() + entry * channels * history);
    }
    c.batch = entries;
    c.tokens = first.tokens;
    c.input = x + start;
    c.past = reads ? past.data() : nullptr;
    c.out = out;
    runtime.finish(variant_.linear->convolution(c, runtime.runtime()), node_);
  }
}

// Writes conv_states. They may be the memory of the input, so the rows of a sequence are read before one of them is written.
void LineConvolution::keep(const Call& call, void* states) const {
  const Tensor& given = call.inputs[kStates];
  const Number* x = numbers_of(call.inputs[kX]);
  const size_t row = static_cast<size_t>(call.channels) * sizeof(Number);
  if (states != given.data) std::memcpy(states, given.data, static_cast<size_t>(given.count()) * sizeof(Number));
  std::vector<Number> rows;
  for (const PackedSequence& sequence : call.sequences) {
    rows.clear();
    for (const Kept& kept : sequence.kept) {
      for (int64_t n = kept.from; n < kept.from + kept.count; ++n) {
        if (n < sequence.history && sequence.before == nullptr) {
          rows.insert(rows.end(), static_cast<size_t>(call.channels), 0);
          continue;
        }
        const Number* from = n < sequence.history ? sequence.before + n * call.channels
                                                  : x + (sequence.first + n - sequence.history) * call.channels;
        rows.insert(rows.end(), from, from + call.channels);
      }
    }
    const Number* from = rows.data();
    for (const Kept& kept : sequence.kept) {
      Number* to = static_cast<Number*>(states) + (kept.line * call.length + kept.at) * call.channels;
      std::memcpy(to, from, static_cast<size_t>(kept.count) * row);
      from += kept.count * call.channels;
    }
  }
}

}  // namespace

namespace causal_conv1d {
namespace {

class Kernel final : public LineConvolution {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  void check(const Call& call, bool is_step) const;

  linear::Activation activation_ = linear::Activation::silu;
};

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : LineConvolution(api, info, node, kPlain, node.get(attr::null_block_id)) {
  const std::string asked = node.get(attr::activation_mode);
  if (asked == "none") activation_ = linear::Activation::none;
  if (asked != "none" && asked != "silu" && !asked.empty()) {
    fail(rule::activation, "activation_mode is '" + asked + "', expected silu, none or nothing");
  }
}

void Kernel::check(const Call& call, bool is_step) const {
  const Tensor &modes = call.inputs[input_initial_state_mode], &accepted = call.inputs[input_num_accepted_tokens];
  check_shape(call, input_bias, {call.channels});
  for (size_t input : {input_cache_indices, input_initial_state_mode, input_num_accepted_tokens}) {
    check_shape(call, input, {call.batch});
  }
  if (modes.present() && is_step) {
    const std::string beside = accepted.present() ? "num_accepted_tokens" : "one token in a sequence";
    fail(rule::kinds, "input initial_state_mode is given with " + beside + ", expected none in a step");
  }
  if (accepted.present() && call.width != kPlain.most_width) {
    fail(rule::kinds, "input num_accepted_tokens is given with " + std::to_string(call.width) + " rows of weight, expected " +
                          std::to_string(kPlain.most_width));
  }
  check_limits(call, accepted.present() ? 1 : 0);
  check_lines(call);
  for (int64_t n = 0; modes.present() && n < call.batch; ++n) {
    const int32_t mode = integers_of(modes)[n];
    if (mode != 0 && mode != 1) {
      fail(rule::contents, "input initial_state_mode has " + std::to_string(mode) + ", expected 0 or 1");
    }
  }
  if (!accepted.present()) return;
  int64_t longest = 0;
  for (const PackedSequence& sequence : call.sequences) longest = std::max(longest, sequence.tokens);
  if (call.length < call.width - 2 + longest) {
    fail(rule::accepted_tokens, "input conv_states has " + std::to_string(call.length) +
                                    " tokens in a line, expected at least " + std::to_string(call.width - 2 + longest));
  }
  for (int64_t n = 0; n < call.batch; ++n) {
    const int64_t count = integers_of(accepted)[n], most = call.length - (call.width - 1);
    if (count >= 0 && count <= most) continue;
    fail(rule::accepted_tokens, "input num_accepted_tokens has " + std::to_string(count) + ", expected 0 to " +
                                    std::to_string(most));
  }
}

// A step reads the rows behind the accepted tokens, and leaves all but the first of what it has at the beginning of the line.
// A prompt reads the first rows if it may, and leaves its last rows at the end.
void Kernel::compute(ort::KernelContext* context) const {
  Call call = call_of(context);
  const Tensor &x = call.inputs[kX], &indices = call.inputs[input_cache_indices], &bias = call.inputs[input_bias];
  const Tensor &modes = call.inputs[input_initial_state_mode], &accepted = call.inputs[input_num_accepted_tokens];
  const bool is_step = accepted.present() || (!call.is_packed && x.dims[1] == 1);
  check(call, is_step);
  for (int64_t n = 0; n < call.batch; ++n) {
    PackedSequence& sequence = call.sequences[static_cast<size_t>(n)];
    const int64_t line = indices.present() ? integers_of(indices)[n] : n;
    sequence.skipped = indices.present() && line == skipped_;
    if (sequence.skipped || sequence.tokens == 0) continue;
    const int64_t offset = accepted.present() ? std::max(integers_of(accepted)[n] - 1, 0) : 0;
    sequence.history = call.width - 1;
    const bool reads = is_step || (modes.present() && integers_of(modes)[n] == 1);
    if (reads) sequence.before = call.line(line) + offset * call.channels;
    const int64_t rows = sequence.history + sequence.tokens, count = std::min(is_step ? rows - 1 : rows, call.length);
    sequence.kept = {is_step ? Kept{line, 0, 1, count} : Kept{line, call.length - count, rows - count, count}};
  }
  linear::Convolution c;
  c.activation = activation_;
  c.bias = bias.present() ? bias.data : nullptr;
  if (void* y = output_of(api_, context, output_y, x.dims); y != nullptr) convolve(context, call, c, y);
  void* states = output_of(api_, context, output_conv_states, call.inputs[kStates].dims);
  if (states != nullptr) keep(call, states);
}

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace causal_conv1d

namespace fused_causal_conv1d {
namespace {

// The inputs of prefix caching, which are given together.
constexpr Input kBlocks[] = {input_block_idx_first_scheduled_token, input_block_idx_last_scheduled_token,
                              input_initial_state_idx};
constexpr int64_t kMostBlocks = 1024;

// What the inputs of prefix caching say of a sequence: the first block that it changes, the last one, and the one that it
// begins with.
struct Blocks {
  int64_t first, last, initial;
};

class Kernel final : public LineConvolution {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  void check(const Call& call) const;
  void check_lengths(const Call& call) const;
  void check_counts(const Call& call) const;
  void check_blocks(const Call& call) const;
  void set_lines(Call& call, int64_t n) const;
  void keep_blocks(const Call& call, int64_t n, PackedSequence& sequence) const;
  void reset(const Call& call, void* y) const;

  int64_t max_query_len_, block_size_;
  bool adds_input_, resets_;
};

bool keeps_blocks(const Call& call) {
  return std::any_of(std::begin(kBlocks), std::end(kBlocks), [&](size_t input) { return call.inputs[input].present(); });
}

Blocks blocks_of(const Call& call, int64_t n) {
  const auto block = [&](size_t input) { return int64_t{integers_of(call.inputs[input])[n]}; };
  return {block(kBlocks[0]), block(kBlocks[1]), block(kBlocks[2])};
}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : LineConvolution(api, info, node, kFused, node.get(attr::pad_slot_id)),
      max_query_len_(node.get(attr::max_query_len)),
      block_size_(node.get(attr::block_size)) {
  const auto flag = [&](const Attribute<int64_t>& attribute, Rule rule, int64_t most) {
    const int64_t value = node.get(attribute);
    if (value >= 0 && value <= most) return value == 1;
    fail(rule, std::string(attribute.name) + " is " + std::to_string(value) + ", expected 0" + (most == 1 ? " or 1" : ""));
  };
  flag(attr::activation_mode, rule::activation_mode, 0);
  adds_input_ = flag(attr::residual_connection, rule::residual_connection, 1);
  resets_ = flag(attr::conv_mode, rule::conv_mode, 1);
}

void Kernel::check(const Call& call) const {
  for (size_t input : {input_bias, input_initial_state_mode}) {
    if (!call.inputs[input].present()) continue;
    fail(rule::unread, std::string("input ") + kInputs[input] + " is given, expected none: the operator does not read it");
  }
  for (size_t input : {input_num_accepted_tokens, input_num_computed_tokens, kBlocks[0], kBlocks[1], kBlocks[2]}) {
    check_shape(call, input, {call.batch});
  }
  const Tensor& indices = call.inputs[input_cache_indices];
  const bool keeps = keeps_blocks(call);
  if (!keeps) check_shape(call, input_cache_indices, {call.batch});
  if (keeps && indices.present()) {
    const int64_t blocks = indices.rank() == 2 ? indices.dims[1] : 0;
    check_shape(call, input_cache_indices, {call.batch, blocks});
    if (blocks < 1 || blocks > kMostBlocks) {
      fail(rule::shapes, "input cache_indices has " + std::to_string(blocks) + " blocks, expected 1 to " +
                             std::to_string(kMostBlocks));
    }
  }
  check_lengths(call);
  for (size_t input : {input_num_computed_tokens, input_cache_indices, kBlocks[0], kBlocks[1], kBlocks[2]}) {
    if (call.inputs[input].present() || !(keeps || (resets_ && input == input_num_computed_tokens))) continue;
    fail(rule::prefix_caching, std::string("input ") + kInputs[input] + " is absent " +
                                   (keeps ? "with prefix caching" : "with conv_mode 1") + ", expected one");
  }
  if (keeps && block_size_ < 2) {
    fail(rule::prefix_caching, "block_size is " + std::to_string(block_size_) + ", expected 2 or more");
  }
  check_limits(call, 1);
  check_lines(call);
  check_counts(call);
  if (keeps) check_blocks(call);
}

void Kernel::check_lengths(const Call& call) const {
  int64_t longest = 0;
  for (const PackedSequence& sequence : call.sequences) longest = std::max(longest, sequence.tokens);
  if (!call.is_packed && call.length < longest + 1) {
    fail(rule::sizes, "input conv_states has " + std::to_string(call.length) + " tokens in a line, expected at least " +
                          std::to_string(longest + 1));
  }
  if (call.is_packed && max_query_len_ != longest) {
    fail(rule::sizes, "max_query_len is " + std::to_string(max_query_len_) + ", expected " + std::to_string(longest) +
                          ", the longest sequence");
  }
}

void Kernel::check_counts(const Call& call) const {
  for (size_t input : {input_num_computed_tokens, kBlocks[0], kBlocks[1], kBlocks[2]}) {
    const Tensor& tensor = call.inputs[input];
    for (int64_t n = 0; tensor.present() && n < call.batch; ++n) {
      if (integers_of(tensor)[n] >= 0) continue;
      fail(rule::contents, std::string("input ") + kInputs[input] + " has a negative entry, expected 0 or more");
    }
  }
  const Tensor& accepted = call.inputs[input_num_accepted_tokens];
  for (int64_t n = 0; accepted.present() && n < call.batch; ++n) {
    const int64_t most = std::min(call.sequences[static_cast<size_t>(n)].tokens, call.length - 1);
    const int64_t count = integers_of(accepted)[n];
    if (count >= 1 && count <= most) continue;
    fail(rule::contents, "input num_accepted_tokens has " + std::to_string(count) + ", expected 1 to " +
                             std::to_string(most));
  }
}

void Kernel::check_blocks(const Call& call) const {
  const int64_t count = call.inputs[input_cache_indices].dims[1];
  for (int64_t n = 0; n < call.batch; ++n) {
    const auto [first, last, initial] = blocks_of(call, n);
    if (first <= last && initial <= std::min(first + 1, last) && last < count) continue;
    fail(rule::contents, "input block_idx_last_scheduled_token has " + std::to_string(last) + " beside " +
                             std::to_string(first) + " and " + std::to_string(initial) + ", which do not fit");
  }
}

// A sequence reads a line up to its last tokens or, after a speculation, up to those behind the accepted ones, unless it
// begins. It leaves its last rows at the end of a line.
void Kernel::set_lines(Call& call, int64_t n) const {
  PackedSequence& sequence = call.sequences[static_cast<size_t>(n)];
  const Tensor &accepted = call.inputs[input_num_accepted_tokens], &computed = call.inputs[input_num_computed_tokens];
  const Tensor& indices = call.inputs[input_cache_indices];
  const int64_t history = call.width - 1;
  int64_t read = indices.present() ? 0 : n, write = read;
  if (keeps_blocks(call)) {
    const Blocks blocks = blocks_of(call, n);
    const int32_t* lines = integers_of(indices) + n * indices.dims[1];
    read = lines[blocks.initial];
    write = lines[blocks.last];
  } else if (indices.present()) {
    read = write = integers_of(indices)[n];
  }
  sequence.skipped = indices.present() && write == skipped_;
  if (sequence.skipped) return;
  sequence.history = history;
  if (!computed.present() || integers_of(computed)[n] != 0) {
    if (indices.present() && read == skipped_) {
      fail(rule::contents, "input initial_state_idx names a block without a line, expected one that is not " +
                               std::to_string(skipped_));
    }
    sequence.history += accepted.present() ? integers_of(accepted)[n] - 1 : call.length - history;
    sequence.before = call.line(read);
  }
  const int64_t rows = sequence.history + sequence.tokens, count = std::min(rows, call.length);
  sequence.kept.push_back({write, call.length - count, rows - count, count});
  if (keeps_blocks(call)) keep_blocks(call, n, sequence);
}

// The rows before the end of each block that the sequence fills are left at the end of the block's line.
void Kernel::keep_blocks(const Call& call, int64_t n, PackedSequence& sequence) const {
  const auto [first, last, initial] = blocks_of(call, n);
  const int32_t* lines = integers_of(call.inputs[input_cache_indices]) + n * call.inputs[input_cache_indices].dims[1];
  const int64_t history = call.width - 1, done = integers_of(call.inputs[input_num_computed_tokens])[n] % block_size_;
  const int64_t tokens = sequence.tokens, left = (tokens % block_size_ + done) % block_size_;
  // Where the last block ends: before the tokens that are left in another one, or else one block before the end.
  const int64_t end = tokens - (left == 0 ? block_size_ : left);
  for (int64_t block = first; block < last; ++block) {
    const int64_t behind = last - 1 - block;  // blocks that end later
    if (end < 0 || (behind > 0 && block_size_ > end / behind)) {
      fail(rule::contents, "input block_idx_first_scheduled_token leaves more blocks than the sequence fills");
    }
    if (lines[block] == skipped_) continue;
    const int64_t from = sequence.history - history + end - behind * block_size_;
    sequence.kept.push_back({lines[block], call.length - history, from, history});
  }
}

// The first tokens of a text give 0, before x is added.
void Kernel::reset(const Call& call, void* y) const {
  const Number* x = numbers_of(call.inputs[kX]);
  for (int64_t n = 0; n < call.batch; ++n) {
    const PackedSequence& sequence = call.sequences[static_cast<size_t>(n)];
    const int64_t computed = integers_of(call.inputs[input_num_computed_tokens])[n];
    const int64_t count = std::min(std::max(call.width - 1 - computed, int64_t{0}), sequence.tokens) * call.channels;
    Number* to = static_cast<Number*>(y) + sequence.first * call.channels;
    if (sequence.skipped) continue;
    if (adds_input_) {
      std::copy_n(x + sequence.first * call.channels, count, to);
    } else {
      std::fill_n(to, count, Number{0});
    }
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  Call call = call_of(context);
  check(call);
  for (int64_t n = 0; n < call.batch; ++n) set_lines(call, n);
  linear::Convolution c;
  c.adds_input = adds_input_;
  if (void* y = output_of(api_, context, output_y, call.inputs[kX].dims); y != nullptr) {
    convolve(context, call, c, y);
    if (resets_) reset(call, y);
  }
  void* states = output_of(api_, context, output_conv_states, call.inputs[kStates].dims);
  if (states != nullptr) keep(call, states);
}

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace fused_causal_conv1d
}  // namespace fa
