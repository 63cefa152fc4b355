#include "flash_attention_score.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace flash_attention_score {
namespace {

constexpr int64_t kCompressedMask = 2048;  // rows and columns of the constant mask of sparse_mode 2, 3 and 4
constexpr int64_t kMaxHeadSize = 768;

[[noreturn]] void refuse(const std::string& node, const std::string& text, ort::ErrorCode code) {
  throw Error{code, node + ": " + text};
}

// ------------------------------------------------------------------------------------------------
// Attributes, read once when the session is made.

template <class Value>
Value one_of(const std::string& node, const char* name, const std::string& text,
             std::initializer_list<std::pair<const char*, Value>> values) {
  std::string known;
  for (const auto& [word, value] : values) {
    if (text == word) return value;
    known += (known.empty() ? "\"" : ", \"") + std::string(word) + "\"";
  }
  refuse(node, std::string(name) + " is \"" + text + "\", expected one of " + known, ort::ErrorCode::invalid_argument);
}

Attributes read_attributes(const NodeInfo& info) {
  const std::string& node = info.title();
  const auto unsupported = [&node](const std::string& what) {
    refuse(node, what + " is not supported by the CPU kernel yet", ort::ErrorCode::not_implemented);
  };
  const auto invalid = [&node](const std::string& text) {
    refuse(node, text, ort::ErrorCode::invalid_argument);
  };
  constexpr int64_t kAllTokens = 2147483647;  // the operator's default
  Attributes a;
  a.scale = info.number("scale_value", 1.0f);
  a.pre_tokens = info.integer("pre_tockens", kAllTokens);
  a.next_tokens = info.integer("next_tockens", kAllTokens);
  a.head_num = info.integer("head_num", 0);
  if (a.head_num <= 0) invalid("head_num is " + std::to_string(a.head_num) + ", expected the number of query heads");
  a.layout = one_of<Layout>(node, "input_layout", info.string("input_layout", ""),
                            {{"BSH", Layout::BSH}, {"SBH", Layout::SBH}, {"BSND", Layout::BSND},
                             {"BNSD", Layout::BNSD}, {"TND", Layout::TND}});
  a.sparse_mode = info.integer("sparse_mode", 0);
  if (a.sparse_mode < 0 || a.sparse_mode > 8) {
    invalid("sparse_mode is " + std::to_string(a.sparse_mode) + ", expected 0 to 8");
  }
  // Without a mask the operator ignores the mode.
  if (a.sparse_mode > 4 && info.has_input(input_atten_mask)) {
    unsupported("sparse_mode " + std::to_string(a.sparse_mode));
  }
  a.pse_type = info.integer("pse_type", 1);
  if (a.pse_type < 0 || a.pse_type > 3) invalid("pse_type is " + std::to_string(a.pse_type) + ", expected 0 to 3");
  if (a.pse_type > 1) unsupported("pse_type " + std::to_string(a.pse_type));
  const float keep_prob = info.number("keep_prob", 1.0f);
  if (!(keep_prob > 0.0f && keep_prob <= 1.0f)) {
    invalid("keep_prob is " + std::to_string(keep_prob) + ", expected more than 0 and at most 1");
  }
  if (keep_prob < 1.0f) unsupported("dropout (keep_prob " + std::to_string(keep_prob) + ")");
  a.statistics_like_input = one_of<bool>(node, "softmax_out_layout", info.string("softmax_out_layout", ""),
                                         {{"", false}, {"same_as_input", true}});
  a.empty_rows = one_of<EmptyRows>(node, "cpu_empty_rows", info.string("cpu_empty_rows", ""),
                                   {{"", EmptyRows::zero}, {"zero", EmptyRows::zero}, {"mean", EmptyRows::mean},
                                    {"unmasked", EmptyRows::unmasked}, {"nan", EmptyRows::nan}});
  a.nan_rows = one_of<NanRows>(node, "cpu_nan_rows", info.string("cpu_nan_rows", ""),
                               {{"", NanRows::nan}, {"zero", NanRows::zero}, {"infinite", NanRows::infinite}});
  for (size_t input : {input_d_scale_q, input_d_scale_k, input_d_scale_v, input_query_rope, input_key_rope, input_sink,
                       input_p_scale}) {
    if (info.has_input(input)) unsupported("the input " + std::string(kInputs[input]));
  }
  return a;
}

bool needs_compressed_mask(const Attributes& a) { return a.sparse_mode >= 2; }

// ------------------------------------------------------------------------------------------------
// One call: the tensors, their common sizes, and the Problem made of them.

struct Inputs {
  Tensor tensors[std::size(kInputs)];

  Inputs(ort::Api api, const ort::KernelContext* context) {
    size_t count = 0;
    check(api, ort::KernelContext_GetInputCount(api, context, &count));
    for (size_t i = 0; i < count && i < std::size(kInputs); ++i) {
      const ort::Value* value = nullptr;
      check(api, ort::KernelContext_GetInput(api, context, i, &value));
      tensors[i] = tensor_of(api, value);
    }
  }
  const Tensor& operator[](size_t index) const { return tensors[index]; }
};

// The logical shape of query, or of key or value, with strides for their layout.
struct Operand {
  int64_t batch = 0;  // of TND: 1
  int64_t heads = 0;
  int64_t length = 0;  // of TND: all tokens
  int64_t size = 0;
  int64_t batch_stride = 0;  // 0 for a batch of 1, which every entry of the common batch reads
  int64_t head_stride = 0;
  int64_t row_stride = 0;

  Strided strided(void* data) const { return {data, head_stride, row_stride}; }
};

size_t rank_of(Layout layout) { return layout == Layout::BSND || layout == Layout::BNSD ? 4 : 3; }

const char* text_of(Layout layout) {
  static constexpr const char* kNames[] = {"BSH", "SBH", "BSND", "BNSD", "TND"};
  return kNames[static_cast<size_t>(layout)];
}

// `heads` is used where the layout folds heads and head size into one dimension.
Operand strides_of(Layout layout, const Dims& d, int64_t heads) {
  const int64_t n = heads;
  switch (layout) {
    case Layout::BSH:
      return {d[0], n, d[1], n == 0 ? 0 : d[2] / n, d[1] * d[2], n == 0 ? 0 : d[2] / n, d[2]};
    case Layout::SBH:
      return {d[1], n, d[0], n == 0 ? 0 : d[2] / n, d[2], n == 0 ? 0 : d[2] / n, d[1] * d[2]};
    case Layout::BSND:
      return {d[0], d[2], d[1], d[3], d[1] * d[2] * d[3], d[3], d[2] * d[3]};
    case Layout::BNSD:
      return {d[0], d[1], d[2], d[3], d[1] * d[2] * d[3], d[2] * d[3], d[3]};
    case Layout::TND:
      break;
  }
  return {1, d[1], d[0], d[2], 0, d[2], d[1] * d[2]};
}

Operand operand_of(Layout layout, const Dims& dims, int64_t heads) {
  Operand operand = strides_of(layout, dims, heads);
  if (operand.batch == 1) operand.batch_stride = 0;
  return operand;
}

Dims output_dims(Layout layout, const Dims& query, int64_t batch, int64_t heads, int64_t value_size) {
  Dims dims = query;
  if (layout != Layout::TND) dims[layout == Layout::SBH ? 1 : 0] = batch;
  dims.back() = layout == Layout::BSH || layout == Layout::SBH ? heads * value_size : value_size;
  return dims;
}

Type type_of(E element) {
  return element == E::float32 ? Type::float32 : element == E::float16 ? Type::float16 : Type::bfloat16;
}

bool is_one_or(int64_t dim, int64_t full) { return dim == 1 || dim == full; }

class Call {
 public:
  Call(const std::string& node, const Attributes& attributes, const Inputs& inputs, bool mask_checked)
      : node_(node), a_(attributes), in_(inputs), mask_checked_(mask_checked) {
    read_operands();
    read_sequences();
    if (has_mask()) read_mask();
    if (in_[input_real_shift].present()) read_pse();
  }

  Dims attention_out_dims() const {
    return output_dims(a_.layout, in_[input_query].dims, batch_, query_.heads, problem_.value_size);
  }
  Dims statistics_dims() const {
    if (a_.layout == Layout::TND) return {query_.length, query_.heads, kStatisticsWidth};
    return {batch_, query_.heads, query_.length, kStatisticsWidth};
  }

  // True if some row of the outputs belongs to no query that has a key: those rows are 0.
  bool has_gaps() const { return gaps_; }

  Problem problem(void* out, float* softmax_max, float* softmax_sum) {
    problem_.out = operand_of(a_.layout, attention_out_dims(), query_.heads).strided(out);
    problem_.softmax_max = softmax_max;
    problem_.softmax_sum = softmax_sum;
    problem_.sequences = sequences_.data();
    problem_.sequence_count = static_cast<int64_t>(sequences_.size());
    return problem_;
  }

 private:
  [[noreturn]] void invalid(const std::string& text) const {
    refuse(node_, text, ort::ErrorCode::invalid_argument);
  }
  [[noreturn]] void wrong_shape(size_t input, const std::string& expected) const {
    invalid("input " + std::string(kInputs[input]) + " has shape " + fa::text_of(in_[input].dims) + ", expected " +
            expected);
  }
  bool has_mask() const { return in_[input_atten_mask].present(); }

  void read_operands() {
    const size_t rank = rank_of(a_.layout);
    for (size_t input : {input_query, input_key, input_value}) {
      if (in_[input].rank() != rank) {
        wrong_shape(input, "rank " + std::to_string(rank) + " for input_layout " + text_of(a_.layout));
      }
    }
    const Dims& q = in_[input_query].dims;
    const Dims& k = in_[input_key].dims;
    const Dims& v = in_[input_value].dims;
    int64_t key_heads = 0;
    if (a_.layout == Layout::BSH || a_.layout == Layout::SBH) {
      if (q[2] % a_.head_num != 0) {
        wrong_shape(input_query, "a last dimension that head_num " + std::to_string(a_.head_num) + " divides");
      }
      const int64_t size = q[2] / a_.head_num;
      key_heads = size == 0 ? a_.head_num : k[2] / size;
      if (size != 0 && k[2] % size != 0) {
        wrong_shape(input_key, "a last dimension that is a multiple of the head size " + std::to_string(size));
      }
      if (key_heads != 0 && v[2] % key_heads != 0) {
        wrong_shape(input_value, "a last dimension that the " + std::to_string(key_heads) + " key heads divide");
      }
    }
    query_ = operand_of(a_.layout, q, a_.head_num);
    key_ = operand_of(a_.layout, k, key_heads);
    const Operand value = operand_of(a_.layout, v, key_heads);
    if (query_.heads != a_.head_num && query_.heads != 0) {
      wrong_shape(input_query, std::to_string(a_.head_num) + " heads as head_num says, not " +
                                   std::to_string(query_.heads));
    }
    read_batch({query_.batch, key_.batch, value.batch});
    if (key_.heads != 0 && key_.size != query_.size) {
      wrong_shape(input_key, "the query's head size " + std::to_string(query_.size));
    }
    if (value.heads != key_.heads || value.length != key_.length) {
      wrong_shape(input_value, "the heads and length of key " + fa::text_of(k));
    }
    if (key_.heads != 0 && query_.heads % key_.heads != 0) {
      wrong_shape(input_key, "a number of heads that divides the " + std::to_string(query_.heads) + " query heads, not " +
                                 std::to_string(key_.heads));
    }
    if (query_.size > kMaxHeadSize) wrong_shape(input_query, "a head size of at most 768");
    problem_.type = type_of(in_[input_query].type);
    problem_.heads = query_.heads;
    problem_.key_heads = key_.heads;
    problem_.head_size = query_.size;
    problem_.value_size = key_.heads == 0 ? query_.size : value.size;
    problem_.query = query_.strided(in_[input_query].data);
    problem_.key = key_.strided(in_[input_key].data);
    problem_.value = value.strided(in_[input_value].data);
    problem_.scale = a_.scale;
    problem_.empty_rows = a_.empty_rows;
    problem_.nan_rows = a_.nan_rows;
    value_batch_stride_ = value.batch_stride;
    out_batch_stride_ = operand_of(a_.layout, attention_out_dims(), query_.heads).batch_stride;
  }

  // Each of query, key and value has the common batch, or 1 (the extension EXT-BATCH-BROADCAST).
  void read_batch(const int64_t (&found)[3]) {
    static constexpr size_t kOperands[] = {input_query, input_key, input_value};
    batch_ = 1;
    size_t like = 0;
    for (size_t i = 0; i < 3; ++i) {
      if (found[i] == 1 || found[i] == batch_) continue;
      if (batch_ != 1) {
        wrong_shape(kOperands[i], "the batch " + std::to_string(batch_) + " of " + kInputs[kOperands[like]] + ", or 1");
      }
      batch_ = found[i];
      like = i;
    }
  }

  // Cumulative ends without a leading 0; a trailing 0 is a batch that is not computed.
  std::vector<int64_t> read_ends(size_t input, int64_t tokens) const {
    const Tensor& tensor = in_[input];
    if (!tensor.present()) invalid("input " + std::string(kInputs[input]) + " is needed for input_layout TND");
    const auto* values = static_cast<const int64_t*>(tensor.data);
    std::vector<int64_t> ends(values, values + tensor.count());
    size_t used = ends.size();
    while (used > 0 && ends[used - 1] == 0) --used;
    int64_t before = 0;
    for (size_t i = 0; i < ends.size(); ++i) {
      if (i >= used) ends[i] = before;
      if (ends[i] < before || ends[i] > tokens) {
        invalid("input " + std::string(kInputs[input]) + " is " + fa::text_of(Dims(values, values + tensor.count())) +
                ", expected cumulative lengths that do not fall and end at " + std::to_string(tokens) + " or before");
      }
      before = ends[i];
    }
    return ends;
  }

  // All sequences, also those without queries or keys, of which `sequences_` keeps no trace.
  struct Lengths {
    int64_t query_begin, query, key_begin, key;
  };

  void read_sequences() {
    if (a_.layout == Layout::TND) {
      const std::vector<int64_t> query_ends = read_ends(input_actual_seq_qlen, query_.length);
      const std::vector<int64_t> key_ends = read_ends(input_actual_seq_kvlen, key_.length);
      if (query_ends.size() != key_ends.size()) {
        invalid("input actual_seq_kvlen has " + std::to_string(key_ends.size()) + " batches, expected the " +
                std::to_string(query_ends.size()) + " of actual_seq_qlen");
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
      for (size_t input : {input_actual_seq_qlen, input_actual_seq_kvlen}) {
        if (in_[input].present()) {
          invalid("input " + std::string(kInputs[input]) + " has a meaning for input_layout TND only, not for " +
                  text_of(a_.layout));
        }
      }
      for (int64_t b = 0; b < batch_; ++b) lengths_.push_back({0, query_.length, 0, key_.length});
    }
    const bool nothing = query_.size == 0 || key_.heads == 0 || query_.heads == 0;
    int64_t batch = 0;
    for (const Lengths& own : lengths_) {
      longest_query_ = std::max(longest_query_, own.query);
      longest_key_ = std::max(longest_key_, own.key);
      if (nothing || own.query == 0 || own.key == 0) {
        gaps_ = gaps_ || own.query > 0;
      } else {
        add_sequence(own, batch);
      }
      ++batch;
    }
  }

  void add_sequence(const Lengths& own, int64_t batch) {
    Sequence s;
    s.query_length = own.query;
    s.key_length = own.key;
    s.query = batch * query_.batch_stride + own.query_begin * query_.row_stride;
    s.key = batch * key_.batch_stride + own.key_begin * key_.row_stride;
    s.value = batch * value_batch_stride_ + own.key_begin * problem_.value.row;
    const Operand out = operand_of(a_.layout, attention_out_dims(), query_.heads);
    s.out = batch * out_batch_stride_ + own.query_begin * out.row_stride;
    s.statistics_row = kStatisticsWidth;
    s.statistics_head = own.query * kStatisticsWidth;
    if (a_.layout != Layout::TND) {
      s.statistics = batch * query_.heads * query_.length * kStatisticsWidth;
    } else {
      s.statistics = own.query_begin * query_.heads * kStatisticsWidth;
      if (a_.statistics_like_input) {
        s.statistics_row = query_.heads * kStatisticsWidth;
        s.statistics_head = kStatisticsWidth;
      }
    }
    if (has_mask()) set_band(s);
    sequences_.push_back(s);
    batch_of_.push_back(static_cast<size_t>(batch));
  }

  void set_band(Sequence& s) const {
    const int64_t offset = s.key_length - s.query_length;
    const int64_t pre = std::clamp(a_.pre_tokens, -kNoLimit / 2, kNoLimit / 2);
    const int64_t next = std::clamp(a_.next_tokens, -kNoLimit / 2, kNoLimit / 2);
    if (a_.sparse_mode == 0 || a_.sparse_mode == 4) {
      const int64_t origin = a_.sparse_mode == 4 ? offset : 0;
      s.first = origin - pre;
      s.last = origin + next;
    } else if (a_.sparse_mode == 2) {
      s.last = 0;
    } else if (a_.sparse_mode == 3) {
      s.last = offset;
    }
  }

  void read_mask() {
    const Tensor& mask = in_[input_atten_mask];
    const Dims& d = mask.dims;
    if (needs_compressed_mask(a_)) {
      check_compressed_mask(node_, a_, mask, mask_checked_);
      return;
    }
    problem_.mask = static_cast<const uint8_t*>(mask.data);
    if (a_.layout == Layout::TND) {
      read_packed_mask(d);
      return;
    }
    const Dims full = {batch_, query_.heads, query_.length, key_.length};
    if (d.size() != 2 && d.size() != 4) wrong_shape(input_atten_mask, mask_shapes(full));
    for (size_t i = 0; i < d.size(); ++i) {
      if (!is_one_or(d[d.size() - 1 - i], full[3 - i])) wrong_shape(input_atten_mask, mask_shapes(full));
    }
    const int64_t rows = d[d.size() - 2];
    const int64_t columns = d[d.size() - 1];
    problem_.mask_column = columns == key_.length ? 1 : 0;
    problem_.mask_row = rows == 1 ? 0 : columns;
    if (d.size() != 4) return;
    problem_.mask_head = d[1] == 1 ? 0 : rows * columns;
    if (d[0] == 1) return;
    for (size_t n = 0; n < sequences_.size(); ++n) {
      sequences_[n].mask = static_cast<int64_t>(batch_of_[n]) * d[1] * rows * columns;
    }
  }

  static std::string mask_shapes(const Dims& full) {
    return fa::text_of(full) + " or " + fa::text_of({full[2], full[3]}) + ", any of these dimensions may be 1";
  }

  void read_packed_mask(const Dims& d) {
    const size_t leading = d.size() == 4 && d[0] == 1 && d[1] == 1 ? 2 : 0;
    const Dims own = {longest_query_, longest_key_};
    const Dims joint = {lengths_.empty() ? 0 : lengths_.back().query_begin + lengths_.back().query,
                        lengths_.empty() ? 0 : lengths_.back().key_begin + lengths_.back().key};
    const Dims found(d.begin() + static_cast<std::ptrdiff_t>(leading), d.end());
    if (found != own && found != joint) {
      wrong_shape(input_atten_mask, fa::text_of(own) + " (longest batches) or " + fa::text_of(joint) + " (all tokens)");
    }
    problem_.mask_row = found[1];
    problem_.mask_column = 1;
    if (found == own) return;
    for (size_t n = 0; n < sequences_.size(); ++n) {
      const Lengths& lengths = lengths_[batch_of_[n]];
      sequences_[n].mask = lengths.query_begin * found[1] + lengths.key_begin;
    }
  }

  void read_pse() {
    const Tensor& pse = in_[input_real_shift];
    const Dims& d = pse.dims;
    problem_.pse = pse.data;
    problem_.pse_type = type_of(pse.type);
    problem_.pse_inside_scale = a_.pse_type == 1;
    problem_.pse_column = 1;
    const bool packed = a_.layout == Layout::TND;
    const bool compressed = d.size() == 4 && d[2] == kCompressedPseRows && (packed || query_.length > d[2]);
    if (packed && !compressed) {
      read_packed_pse(d);
      return;
    }
    const Dims full = {static_cast<int64_t>(lengths_.size()), query_.heads,
                       compressed ? kCompressedPseRows : query_.length, packed ? longest_key_ : key_.length};
    bool fits = d.size() == 4;
    for (size_t i = 0; fits && i < 4; ++i) fits = is_one_or(d[i], full[i]);
    if (!fits) wrong_shape(input_real_shift, fa::text_of(full) + ", any of these dimensions may be 1");
    if (compressed) check_compressed_pse();
    problem_.pse_compressed = compressed;
    problem_.pse_first_stored = (packed ? longest_key_ : key_.length) - kCompressedPseRows;
    problem_.pse_column = d[3] == full[3] ? 1 : 0;
    for (size_t n = 0; n < sequences_.size(); ++n) {
      Sequence& s = sequences_[n];
      s.pse = d[0] == 1 ? 0 : static_cast<int64_t>(batch_of_[n]) * d[1] * d[2] * d[3];
      s.pse_head = d[1] == 1 ? 0 : d[2] * d[3];
      s.pse_row = d[2] == 1 ? 0 : d[3];
    }
  }

  // Only what lies on or below the diagonal can be rebuilt, so nothing above it may be attended.
  void check_compressed_pse() const {
    for (const Sequence& s : sequences_) {
      if (s.query_length != s.key_length) {
        invalid("input real_shift of " + std::to_string(kCompressedPseRows) + " rows (compressed) needs as many " +
                "queries as keys, found " + std::to_string(s.query_length) + " and " + std::to_string(s.key_length));
      }
      if (s.last > 0) {
        invalid("input real_shift of " + std::to_string(kCompressedPseRows) +
                " rows (compressed) needs a causal atten_mask: sparse_mode 2 or 3, or next_tockens 0 in mode 0");
      }
    }
  }

  // Batches back to back: [N1,S1,S2] or, one row for all queries, [N1,S2] of each.
  void read_packed_pse(const Dims& d) {
    int64_t full = 0;
    int64_t rows = 0;
    bool differ = false;
    for (const Lengths& own : lengths_) {
      full += query_.heads * own.query * own.key;
      rows += query_.heads * own.key;
      differ = differ || own.query != 1;
    }
    const int64_t count = in_[input_real_shift].count();
    if (d.size() < 2 || d[0] != count || (count != full && count != rows)) {
      wrong_shape(input_real_shift, "[B or 1,N1,1024,maxS2] (compressed), or " + std::to_string(rows) + " or " +
                                        std::to_string(full) + " elements on dimension 0 of 2 or more");
    }
    if (full == rows && differ) {
      invalid("input real_shift could be one row or a matrix for each batch with these lengths");
    }
    int64_t at = 0;
    size_t n = 0;
    for (size_t b = 0; b < lengths_.size(); ++b) {
      const int64_t matrix = (count == full ? lengths_[b].query : 1) * lengths_[b].key;
      if (n < sequences_.size() && batch_of_[n] == b) {
        sequences_[n].pse = at;
        sequences_[n].pse_head = matrix;
        sequences_[n].pse_row = count == full ? lengths_[b].key : 0;
        ++n;
      }
      at += query_.heads * matrix;
    }
  }

 public:
  // The mask of sparse_mode 2 to 4 is a constant whose content the kernel does not use; anything else in it
  // would mean another operation.
  static void check_compressed_mask(const std::string& node, const Attributes& a, const Tensor& mask,
                                    bool content_checked) {
    const Dims& d = mask.dims;
    const bool shape_fits = d.size() >= 2 && mask.count() == kCompressedMask * kCompressedMask &&
                            d[d.size() - 1] == kCompressedMask && d[d.size() - 2] == kCompressedMask;
    const std::string input = "input atten_mask of sparse_mode " + std::to_string(a.sparse_mode);
    if (!shape_fits) {
      refuse(node, input + " has shape " + fa::text_of(d) + ", expected [2048,2048]", ort::ErrorCode::invalid_argument);
    }
    if (content_checked) return;
    const auto* row = static_cast<const uint8_t*>(mask.data);
    for (int64_t i = 0; i < kCompressedMask; ++i, row += kCompressedMask) {
      const uint8_t* diagonal = row + i + 1;
      const uint8_t* end = row + kCompressedMask;
      if (std::find_if(row, diagonal, [](uint8_t x) { return x != 0; }) != diagonal ||
          std::find(diagonal, end, 0) != end) {
        refuse(node, input + " differs in row " + std::to_string(i) +
                         " from the expected 1 above the diagonal and 0 elsewhere",
               ort::ErrorCode::invalid_argument);
      }
    }
  }

 private:
  const std::string& node_;
  const Attributes& a_;
  const Inputs& in_;
  const bool mask_checked_;
  Operand query_;
  Operand key_;
  int64_t batch_ = 1;  // common to query, key and value; of TND: 1
  int64_t value_batch_stride_ = 0;
  int64_t out_batch_stride_ = 0;
  int64_t longest_query_ = 0;
  int64_t longest_key_ = 0;
  bool gaps_ = false;
  std::vector<Lengths> lengths_;
  std::vector<Sequence> sequences_;
  std::vector<size_t> batch_of_;  // of each entry of sequences_
  Problem problem_;
};

// Null if nobody reads the output.
void* output(ort::Api api, ort::KernelContext* context, size_t index, const Dims& dims) {
  size_t count = 0;
  check(api, ort::KernelContext_GetOutputCount(api, context, &count));
  if (index >= count) return nullptr;
  ort::Value* value = nullptr;
  check(api, ort::KernelContext_GetOutput(api, context, index, dims.data(), dims.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(api, ort::GetTensorMutableData(api, value, &data));
  return data;
}

size_t bytes_of(const Dims& dims, size_t element) {
  size_t count = element;
  for (int64_t dim : dims) count *= static_cast<size_t>(dim);
  return count;
}

}  // namespace

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info) : Kernel(api, info, NodeInfo(api, info, kName)) {}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : api_(api), node_(node.title()), attributes_(read_attributes(node)), allocator_(allocator_of(api, info)),
      variant_(chosen_variant()) {
  const Tensor mask = node.constant_input(input_atten_mask);
  if (mask.present() && needs_compressed_mask(attributes_)) {
    Call::check_compressed_mask(node_, attributes_, mask, false);
    constant_mask_checked_ = true;
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  const Inputs inputs(api_, context);
  Call call(node_, attributes_, inputs, constant_mask_checked_);
  const Dims out_dims = call.attention_out_dims();
  const Dims statistics_dims = call.statistics_dims();
  auto* softmax_max = static_cast<float*>(output(api_, context, output_softmax_max, statistics_dims));
  auto* softmax_sum = static_cast<float*>(output(api_, context, output_softmax_sum, statistics_dims));
  output(api_, context, output_softmax_out, {0, 0, 0, 0});
  void* out = output(api_, context, output_attention_out, out_dims);
  const Problem problem = call.problem(out, softmax_max, softmax_sum);
  if (call.has_gaps()) {
    std::memset(out, 0, bytes_of(out_dims, problem.type == Type::float32 ? 4 : 2));
    for (float* statistic : {softmax_max, softmax_sum}) {
      if (statistic != nullptr) std::memset(statistic, 0, bytes_of(statistics_dims, sizeof(float)));
    }
  }
  if (problem.sequence_count == 0) return;
  CallRuntime runtime(api_, context, allocator_.get());
  const Outcome outcome = variant_.attention(problem, runtime.runtime());
  runtime.rethrow();
  if (outcome == Outcome::out_of_memory) refuse(node_, "out of memory", ort::ErrorCode::fail);
}

}  // namespace flash_attention_score
}  // namespace fa
