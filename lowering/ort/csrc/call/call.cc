#include "call.hpp"

#include <algorithm>

namespace fa {
namespace {

constexpr int64_t kMaxHeadSize = 768;

}  // namespace

Call::Call(const Signature& signature, const std::string& node, const Attributes& attributes, const CallInputs& inputs,
           bool compressed_mask_checked)
    : signature_(signature),
      a_(attributes),
      inputs_(inputs),
      diagnostics_{node, signature},
      compressed_mask_checked_(compressed_mask_checked) {
  read_operands();
  read_rope();
  read_lengths();
  read_sequences();
  read_start();
  if (has_mask()) read_mask();
  if (inputs_.has(Role::pse)) read_pse();
  if (a_.keep_prob < 1.0f) read_dropout();
  if (inputs_.has(Role::sink)) read_sink();
}

Dims Call::statistics_dims() const {
  if (packed()) return {query_.length, query_.heads, kStatisticsWidth};
  return {batch_, query_.heads, query_.length, kStatisticsWidth};
}

Problem Call::problem(void* out, float* softmax_max, float* softmax_sum) {
  problem_.out = out_.strided(out);
  problem_.softmax_max = softmax_max;
  problem_.softmax_sum = softmax_sum;
  problem_.sequences = sequences_.data();
  problem_.sequence_count = static_cast<int64_t>(sequences_.size());
  return problem_;
}

void Call::wrong_shape(Topic topic, Role role, const std::string& expected) const {
  invalid(topic, text(role) + " has shape " + fa::text_of(in(role).dims) + ", expected " + expected);
}

// Whether a mask or bias may have this batch size. With cpu_mask_batch it may divide the batch: entry b of the batch then
// reads entry b % size of the mask.
bool Call::is_mask_batch(int64_t size) const {
  const auto batch = static_cast<int64_t>(lengths_.size());
  return is_one_or(size, batch) || (a_.repeated_masks && size > 0 && batch % size == 0);
}

// The end of an error message: which other sizes a mask or bias may have.
std::string Call::smaller_masks() const {
  return std::string(", any of these dimensions may be 1") + (a_.repeated_masks ? ", the first one a divisor" : "");
}

// The first element of an optional tensor of integers, the only one the operator reads; 0 if there is none.
int64_t Call::first_integer(Role role) const {
  const Tensor& tensor = in(role);
  if (!tensor.present()) return 0;
  if (tensor.rank() != 1) wrong_shape(&Rules::starts, role, "rank 1");
  return tensor.count() == 0 ? 0 : *static_cast<const int64_t*>(tensor.data);
}

void Call::read_operands() {
  for (Role role : {Role::query, Role::key, Role::value}) {
    if (in(role).rank() != rank_of(a_.layout)) {
      wrong_shape(&Rules::layout, role,
                  "rank " + std::to_string(rank_of(a_.layout)) + " for input_layout " + fa::text_of(a_.layout));
    }
  }
  const Dims& q = in(Role::query).dims;
  const Dims& k = in(Role::key).dims;
  const Dims& v = in(Role::value).dims;
  int64_t key_heads = 0;
  if (folds_heads(a_.layout)) {
    if (q[2] % a_.head_num != 0) {
      wrong_shape(&Rules::heads, Role::query,
                  "a last dimension that head_num " + std::to_string(a_.head_num) + " divides");
    }
    const int64_t size = q[2] / a_.head_num;
    key_heads = size == 0 ? a_.head_num : k[2] / size;
    if (size != 0 && k[2] % size != 0) {
      wrong_shape(&Rules::head_size, Role::key,
                  "a last dimension that is a multiple of the head size " + std::to_string(size));
    }
    if (key_heads == 0 ? v[2] != 0 : v[2] % key_heads != 0) {
      wrong_shape(&Rules::head_groups, Role::value,
                  "a last dimension that the " + std::to_string(key_heads) + " key heads divide");
    }
  }
  query_ = operand_of(a_.layout, q, a_.head_num);
  key_ = operand_of(a_.layout, k, key_heads);
  value_ = operand_of(a_.layout, v, key_heads);
  apply_key_length(Role::key, key_);
  apply_key_length(Role::value, value_);
  if (query_.heads != a_.head_num && query_.heads != 0) {
    wrong_shape(&Rules::heads, Role::query,
                std::to_string(a_.head_num) + " heads as head_num says, not " + std::to_string(query_.heads));
  }
  read_batch({query_.batch, key_.batch, value_.batch});
  if (key_.heads != 0 && key_.size != query_.size) {
    wrong_shape(&Rules::head_size, Role::key, "the query's head size " + std::to_string(query_.size));
  }
  if (value_.heads != key_.heads || value_.length != key_.length) {
    wrong_shape(&Rules::batch, Role::value, "the heads and length of key " + fa::text_of(k));
  }
  if (key_.heads != 0 && query_.heads % key_.heads != 0) {
    wrong_shape(&Rules::head_groups, Role::key,
                "a number of heads that divides the " + std::to_string(query_.heads) + " query heads, not " +
                    std::to_string(key_.heads));
  }
  if (query_.size > kMaxHeadSize) wrong_shape(&Rules::head_size, Role::query, "a head size of at most 768");
  problem_.type = type_of(in(Role::query).type);
  problem_.heads = query_.heads;
  problem_.key_heads = key_.heads;
  problem_.head_size = query_.size;
  problem_.value_size = key_.heads == 0 ? query_.size : value_.size;
  if (problem_.value_size > kMaxHeadSize) wrong_shape(&Rules::head_size, Role::value, "a head size of at most 768");
  out_dims_ = output_dims(a_.layout, q, batch_, query_.heads, problem_.value_size);
  out_ = operand_of(a_.layout, out_dims_, query_.heads);
  problem_.query = query_.strided(in(Role::query).data);
  problem_.key = key_.strided(in(Role::key).data);
  problem_.value = value_.strided(in(Role::value).data);
  problem_.scale = a_.scale;
  problem_.softcap = a_.softcap;
  problem_.empty_rows = a_.empty_rows;
  problem_.mask_value = a_.mask_value;
  problem_.masked_bias = a_.masked_bias;
  problem_.masked_values = a_.masked_values;
  problem_.nan_rows = a_.nan_rows;
}

// Shortens `operand` (key, value or key_rope) to the keys in use. Outside TND, actual_seq_kvlen is their number (the
// extension EXT-KEY-LENGTH), and the tensor may have rows beyond it, which are not read. The strides stay those of the
// whole tensor.
void Call::apply_key_length(Role role, Operand& operand) const {
  if (packed() || !signature_.forward || !inputs_.has(Role::key_ends)) return;
  const Tensor& given = in(Role::key_ends);
  if (given.rank() != 1 || given.count() != 1) wrong_shape(&Rules::lengths, Role::key_ends, "[1]");
  const int64_t length = *static_cast<const int64_t*>(given.data);
  if (length < 0 || length > operand.length) {
    invalid(&Rules::lengths, text(Role::key_ends) + " is " + std::to_string(length) + ", expected 0 to " +
                                 std::to_string(operand.length) + ", the rows of " + signature_.name(role));
  }
  operand.length = length;
}

// Sets batch_ from the batch sizes of query, key and value. They are equal; in the forward operator each may also be 1
// (the extension EXT-BATCH-BROADCAST).
void Call::read_batch(const int64_t (&batches)[3]) {
  static constexpr Role kOperands[] = {Role::query, Role::key, Role::value};
  batch_ = signature_.forward ? 1 : batches[0];
  Role like = Role::query;
  for (size_t i = 0; i < 3; ++i) {
    if ((batches[i] == 1 && signature_.forward) || batches[i] == batch_) continue;
    if (batch_ != 1 || !signature_.forward) {
      wrong_shape(&Rules::batch, kOperands[i],
                  "the batch " + std::to_string(batch_) + " of " + signature_.name(like) +
                      (signature_.forward ? ", or 1" : ""));
    }
    batch_ = batches[i];
    like = kOperands[i];
  }
}

void Call::read_rope() {
  const bool query = inputs_.has(Role::query_rope);
  if (query != inputs_.has(Role::key_rope)) {
    invalid(&Rules::rope, text(query ? Role::key_rope : Role::query_rope) + " is absent beside " +
                              signature_.name(query ? Role::query_rope : Role::key_rope) + ", expected both or none");
  }
  if (!query) return;
  query_rope_ = rope_operand(Role::query_rope, Role::query, query_);
  key_rope_ = rope_operand(Role::key_rope, Role::key, key_);
  if (key_.heads != 0 && key_rope_.size != query_rope_.size) {
    wrong_shape(&Rules::rope, Role::key_rope, "the head size " + std::to_string(query_rope_.size) + " of query_rope");
  }
  problem_.rope_size = query_rope_.size;
  problem_.query_rope = query_rope_.strided(in(Role::query_rope).data);
  problem_.key_rope = key_rope_.strided(in(Role::key_rope).data);
}

// The rope part of query or key, which `nope` describes. Their shapes are equal except for the head size.
Operand Call::rope_operand(Role role, Role nope_role, const Operand& nope) const {
  const Dims& d = in(role).dims;
  bool matches = d.size() == in(nope_role).rank();
  if (matches && folds_heads(a_.layout)) matches = nope.heads == 0 ? d[2] == 0 : d[2] % nope.heads == 0;
  Operand rope;
  if (matches) {
    rope = operand_of(a_.layout, d, nope.heads);
    if (role == Role::key_rope) apply_key_length(role, rope);
    matches = rope.batch == nope.batch && rope.heads == nope.heads && rope.length == nope.length;
  }
  if (!matches) {
    wrong_shape(&Rules::rope, role,
                "the shape " + fa::text_of(in(nope_role).dims) + " of " + signature_.name(nope_role) +
                    " with another head size");
  }
  return rope;
}

// Reads the cumulative lengths of a packed tensor, without a leading 0. Each trailing 0 is an empty batch, and is
// replaced with the end of the batch before it.
std::vector<int64_t> Call::read_ends(Role role, int64_t tokens) const {
  const Tensor& tensor = in(role);
  if (!tensor.present()) invalid(&Rules::lengths, text(role) + " is needed for input_layout TND");
  if (tensor.rank() != 1) wrong_shape(&Rules::lengths, role, "rank 1");
  const auto* values = static_cast<const int64_t*>(tensor.data);
  std::vector<int64_t> ends(values, values + tensor.count());
  size_t used = ends.size();
  while (used > 0 && ends[used - 1] == 0) --used;
  int64_t previous_end = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    if (i >= used) ends[i] = previous_end;
    if (ends[i] < previous_end || ends[i] > tokens) {
      invalid(&Rules::lengths,
              text(role) + " is " + fa::text_of(std::span(values, static_cast<size_t>(tensor.count()))) +
                  ", expected cumulative lengths that do not fall and end at " + std::to_string(tokens) + " or before");
    }
    previous_end = ends[i];
  }
  return ends;
}

void Call::read_lengths() {
  if (packed()) {
    const std::vector<int64_t> query_ends = read_ends(Role::query_ends, query_.length);
    const std::vector<int64_t> key_ends = read_ends(Role::key_ends, key_.length);
    if (query_ends.size() != key_ends.size()) {
      invalid(&Rules::lengths, text(Role::key_ends) + " has " + std::to_string(key_ends.size()) +
                                   " batches, expected the " + std::to_string(query_ends.size()) + " of " +
                                   signature_.name(Role::query_ends));
    }
    int64_t query = 0;
    int64_t key = 0;
    for (size_t b = 0; b < query_ends.size(); ++b) {
      lengths_.push_back({query, query_ends[b] - query, key, key_ends[b] - key});
      query = query_ends[b];
      key = key_ends[b];
    }
    gaps_ = query != query_.length;
  } else {
    for (Role role : {Role::query_ends, Role::key_ends}) {
      if (inputs_.has(role) && !(role == Role::key_ends && signature_.forward)) {
        invalid(&Rules::lengths,
                text(role) + " has a meaning for input_layout TND only, not for " + fa::text_of(a_.layout));
      }
    }
    lengths_.reserve(static_cast<size_t>(batch_));
    for (int64_t b = 0; b < batch_; ++b) lengths_.push_back({0, query_.length, 0, key_.length});
  }
  for (const Lengths& lengths : lengths_) {
    longest_query_ = std::max(longest_query_, lengths.query);
    longest_key_ = std::max(longest_key_, lengths.key);
  }
}

// Makes a sequence of each batch that has queries and keys.
void Call::read_sequences() {
  const bool no_heads = query_.size == 0 || key_.heads == 0 || query_.heads == 0;
  sequences_.reserve(lengths_.size());
  batch_of_.reserve(lengths_.size());
  int64_t batch = 0;
  for (const Lengths& lengths : lengths_) {
    if (no_heads || lengths.query == 0 || lengths.key == 0) {
      gaps_ = gaps_ || lengths.query > 0;
    } else {
      add_sequence(lengths, batch);
    }
    ++batch;
  }
}

void Call::add_sequence(const Lengths& lengths, int64_t batch) {
  const auto offset = [batch](const Operand& operand, int64_t begin) {
    return batch * operand.batch_stride + begin * operand.row_stride;
  };
  Sequence s;
  s.query_length = lengths.query;
  s.key_length = lengths.key;
  s.query = offset(query_, lengths.query_begin);
  s.query_rope = offset(query_rope_, lengths.query_begin);
  s.key = offset(key_, lengths.key_begin);
  s.key_rope = offset(key_rope_, lengths.key_begin);
  s.value = offset(value_, lengths.key_begin);
  s.out = offset(out_, lengths.query_begin);
  s.statistics_row = kStatisticsWidth;
  s.statistics_head = lengths.query * kStatisticsWidth;
  if (!packed()) {
    s.statistics = batch * query_.heads * query_.length * kStatisticsWidth;
  } else if (signature_.forward || !a_.statistics_like_input) {
    s.statistics = lengths.query_begin * query_.heads * kStatisticsWidth;
    if (a_.statistics_like_input) {
      s.statistics_row = query_.heads * kStatisticsWidth;
      s.statistics_head = kStatisticsWidth;
    }
  } else {
    // In the gradient, statistics of "same_as_input" are [N1,T1,8].
    s.statistics = lengths.query_begin * kStatisticsWidth;
    s.statistics_head = query_.length * kStatisticsWidth;
  }
  sequences_.push_back(s);
  batch_of_.push_back(static_cast<size_t>(batch));
}

}  // namespace fa
