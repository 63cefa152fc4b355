#include <algorithm>

#include "../decode.hpp"
#include "check.hpp"

namespace fa::check {
namespace {

enum Feature : unsigned {
  kPaged = 1,       // blocks of 16 tokens, scattered
  kHeadsFirst = 2,  // [heads, tokens, size] instead of [tokens, heads, size]
  kMask = 4,
  kBias = 8,
  kPerChannel = 16,  // the scales of antiquantisation and of the output's quantisation
  kOffsets = 32,
  kInt8Out = 64,
  kSoftcap = 128,
};

struct Form {
  int64_t heads, key_heads, size;
  std::vector<int64_t> lengths;  // keys of each entry
  Cell query, cell;              // int8 keys beside a float query are antiquantised
  unsigned features = 0;
  unsigned seed = 7;  // of the numbers

  bool has(Feature feature) const { return (features & feature) != 0; }
};

std::string text_of(const Form& form) {
  static constexpr const char* kNames[] = {"paged", "heads first", "mask", "bias", "per channel", "offsets", "int8 out", "soft cap"};
  static constexpr const char* kCells[] = {"float32", "float16", "bfloat16", "int8"};
  std::string text = kCells[static_cast<int>(form.query)];
  text.append(" on ").append(kCells[static_cast<int>(form.cell)]);
  text.append(", ").append(std::to_string(form.heads)).append(" heads over ").append(std::to_string(form.key_heads));
  text.append(", size ").append(std::to_string(form.size)).append(", keys");
  for (int64_t length : form.lengths) text.append(" ").append(std::to_string(length));
  for (size_t n = 0; n < std::size(kNames); ++n) {
    if (form.features >> n & 1) text += std::string(", ") + kNames[n];
  }
  return text;
}

// Numbers of a type, or integers of 8 bits.
struct Cells {
  Cells(Cell cell, int64_t count, Random& random)
      : numbers(cell == Cell::int8 ? Type::float32 : static_cast<Type>(cell), cell == Cell::int8 ? 0 : count, random) {
    for (int64_t n = 0; cell == Cell::int8 && n < count; ++n) integers.push_back(static_cast<int8_t>(random() % 256 - 128));
  }
  void* data() { return integers.empty() ? numbers.data() : static_cast<void*>(integers.data()); }

  Numbers numbers;
  std::vector<int8_t> integers;
};

constexpr int64_t kBlock = 16;

class Problem {
 public:
  explicit Problem(const Form& form)
      : form_(form), batch_(static_cast<int64_t>(form.lengths.size())), room_(room_of(form)), random_(form.seed),
        query_(form.query, batch_ * form.heads * form.size, random_),
        key_(form.cell, batch_ * room_ * form.key_heads * form.size, random_),
        value_(form.cell, batch_ * room_ * form.key_heads * form.size, random_),
        pse_(form.query == Cell::int8 ? Cell::float16 : form.query, batch_ * form.heads * room_, random_),
        antiquant_(Type::float32, 4 * form.key_heads * form.size, random_),
        quant_(Type::float32, 2 * form.heads * form.size, random_) {
    d_.query_cell = form.query;
    d_.cell = form.cell;
    d_.heads = form.heads;
    d_.key_heads = form.key_heads;
    d_.size = form.size;
    d_.query = query_.data();
    d_.row_stride = form.has(kHeadsFirst) ? form.size : form.key_heads * form.size;
    d_.scale = 1 / std::sqrt(static_cast<float>(form.size));
    if (form.has(kSoftcap)) d_.softcap = 1.5f;
    if (form.has(kBias)) {
      d_.pse = pse_.data();
      d_.pse_cell = form.query == Cell::int8 ? Cell::float16 : form.query;
      d_.pse_head = room_;
    }
    add_entries();
    add_scales();
  }

  // The result in the type `out`; integers as floats.
  Numbers run(Decoding decoding) {
    const int64_t count = batch_ * form_.heads * form_.size;
    const bool integers = form_.has(kInt8Out);
    const Cell cell = form_.query == Cell::int8 ? Cell::float16 : form_.query;
    Numbers out(static_cast<Type>(cell), count);
    std::vector<int8_t> narrow(static_cast<size_t>(count), -77);
    d_.out_cell = integers ? Cell::int8 : cell;
    d_.out = integers ? narrow.data() : out.data();
    if (decoding(d_, runtime()) != Outcome::done) return Numbers(Type::float32, count, NAN);
    if (!integers) return out;
    Numbers wide(Type::float32, count);
    for (int64_t n = 0; n < count; ++n) wide.floats()[n] = narrow[static_cast<size_t>(n)];
    return wide;
  }

 private:
  static int64_t room_of(const Form& form) {
    const int64_t longest = *std::max_element(form.lengths.begin(), form.lengths.end());
    return (longest + kBlock - 1) / kBlock * kBlock;
  }

  void add_entries() {
    const int64_t width = form_.key_heads * form_.size, blocks = room_ / kBlock;
    for (int64_t n = 0; n < batch_ * blocks; ++n) table_.push_back(static_cast<int32_t>(n));
    std::shuffle(table_.begin(), table_.end(), random_);
    for (int64_t n = 0; n < batch_ * room_; ++n) mask_.push_back(random_() % 3 == 0);
    const int64_t bytes = form_.cell == Cell::float32 ? 4 : form_.cell == Cell::int8 ? 1 : 2;
    for (int64_t n = 0; n < batch_; ++n) {
      const int64_t begin = form_.has(kPaged) ? 0 : n * room_ * width * bytes;
      DecodeEntry entry;
      entry.key = static_cast<const char*>(key_.data()) + begin;
      entry.value = static_cast<const char*>(value_.data()) + begin;
      entry.length = form_.lengths[static_cast<size_t>(n)];
      const int64_t tokens = form_.has(kPaged) ? kBlock : room_;
      entry.head_stride = form_.has(kHeadsFirst) ? tokens * form_.size : form_.size;
      if (form_.has(kPaged)) entry.blocks = table_.data() + n * blocks;
      if (form_.has(kMask)) entry.mask = mask_.data() + n * room_;
      entry.pse = n * form_.heads * room_;
      entries_.push_back(entry);
    }
    if (form_.has(kPaged)) {
      d_.block_size = kBlock;
      d_.block_stride = kBlock * width;
    }
    d_.entries = entries_.data();
    d_.entry_count = batch_;
  }

  void add_scales() {
    const int64_t channels = form_.key_heads * form_.size, out_channels = form_.heads * form_.size;
    if (form_.query == Cell::int8) {
      d_.dequant_scale1 = 1e-3f;
      d_.quant_scale1 = 127;
      d_.dequant_scale2 = 1e-3f;
    } else if (form_.cell == Cell::int8) {
      for (int64_t n = 0; n < 2 * channels; ++n) antiquant_.floats()[n] *= 0.01f;
      d_.antiquant_per_channel = form_.has(kPerChannel);
      d_.key_scale = antiquant_.floats();
      d_.value_scale = antiquant_.floats() + channels;
      if (form_.has(kOffsets)) {
        d_.key_offset = antiquant_.floats() + 2 * channels;
        d_.value_offset = antiquant_.floats() + 3 * channels;
      }
    }
    if (form_.has(kInt8Out)) {
      for (int64_t n = 0; n < 2 * out_channels; ++n) quant_.floats()[n] *= 500;  // the largest are saturated
      d_.quant_per_channel = form_.has(kPerChannel);
      d_.quant_scale = quant_.floats();
      if (form_.has(kOffsets)) d_.quant_offset = quant_.floats() + out_channels;
    }
  }

  Form form_;
  int64_t batch_, room_;
  Random random_;
  Cells query_, key_, value_, pse_;
  Numbers antiquant_, quant_;
  std::vector<int32_t> table_;
  std::vector<uint8_t> mask_;
  std::vector<DecodeEntry> entries_;
  Decode d_;
};

Form drawn_form(Random& random) {
  Form form;
  form.key_heads = one_of(random, {1, 2, 3, 4});
  form.heads = form.key_heads * one_of(random, {1, 1, 2, 3, 4, 8});
  form.size = one_of(random, {8, 16, 24, 33, 64, 80, 128});
  for (int64_t n = one_of(random, {1, 2, 3}); n > 0; --n) {
    form.lengths.push_back(one_of(random, {0, 1, 7, 16, 31, 64, 90, 130, 513}));
  }
  if (form.lengths.size() == 1) form.lengths[0] += 1;
  form.query = static_cast<Cell>(random() % 4);
  form.cell = random() % 3 == 0 || form.query == Cell::int8 ? Cell::int8 : form.query;
  form.features = static_cast<unsigned>(random() & random()) & (2 * kSoftcap - 1);
  if (form.size % 8 != 0) form.features &= ~unsigned{kInt8Out};
  form.seed = static_cast<unsigned>(random());
  return form;
}

// The difference that a form allows. Where numbers are rounded to 8 bits, a half may be rounded to the other side: of the
// results, or of the probabilities that an int8 query has, which are at most 1.
double allowed_in(const Form& form, const Numbers& expected) {
  constexpr double kSteps = 127;
  if (form.has(kInt8Out)) {
    double largest = 1;
    for (int64_t n = 0; n < expected.size(); ++n) largest = std::max(largest, std::fabs(static_cast<double>(expected[n])));
    return 1 / largest;
  }
  return form.query == Cell::int8 ? 1 / kSteps : allowed(static_cast<Type>(form.query));
}

}  // namespace

void check_decode(Report& report, Random* random) {
  constexpr Cell f32 = Cell::float32, f16 = Cell::float16, bf16 = Cell::bfloat16, i8 = Cell::int8;
  const std::vector<Form> listed = {
      {4, 4, 64, {300}, f32, f32},
      {8, 2, 80, {1, 0, 77}, f32, f32, kMask | kBias},
      {8, 1, 33, {700, 90}, f32, f32, kPaged | kHeadsFirst},
      {4, 2, 64, {130, 200}, f16, f16, kMask | kBias | kHeadsFirst},
      {16, 2, 128, {513}, f16, f16, kPaged},
      {4, 4, 24, {65, 64}, bf16, bf16, kBias},
      {6, 2, 40, {90, 7}, bf16, bf16, kPaged | kMask},
      {4, 2, 64, {150, 31}, f32, i8, kOffsets},
      {8, 2, 48, {150, 31}, f16, i8, kPerChannel | kOffsets | kPaged},
      {4, 4, 32, {99}, bf16, i8, kPerChannel | kMask},
      {6, 2, 128, {513, 128}, f32, i8, kMask | kBias | kSoftcap},
      {7, 1, 64, {300, 130}, f16, i8, kPaged | kHeadsFirst | kOffsets},
      {4, 2, 32, {60, 80}, f16, f16, kInt8Out | kPerChannel | kOffsets},
      {4, 2, 64, {60, 80}, f32, f32, kInt8Out},
      {4, 2, 64, {60, 80}, i8, i8, kBias},
      {8, 2, 32, {40, 120}, i8, i8, kInt8Out | kOffsets | kMask},
      {8, 2, 80, {1, 0, 77}, f32, f32, kMask | kBias | kSoftcap},
      {4, 2, 64, {60, 80}, i8, i8, kSoftcap},
  };
  const std::vector<Form> forms = random == nullptr ? listed : std::vector{drawn_form(*random)};
  for (const Form& form : forms) {
    ++report.problems;
    Problem problem(form);
    const Numbers found = problem.run(baseline::decode), expected = problem.run(reference::decode);
    report.see(std::string("decode ").append(text_of(form)), difference(found, expected), allowed_in(form, expected));
  }
}

}  // namespace fa::check
