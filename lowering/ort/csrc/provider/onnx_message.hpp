// Messages in the wire format of protobuf, which ONNX files have: they are written here, and read field by field.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "../op.hpp"

namespace fa::provider {

// A message that grows field by field. `field` is the number of a field in ONNX's schema (onnx.proto).
class Message {
 public:
  void add(int field, int64_t number) {
    key(field, kVarint);
    varint(static_cast<uint64_t>(number));
  }
  void add(int field, float number) {
    static_assert(std::endian::native == std::endian::little);
    key(field, kFixed32);
    char bytes[sizeof(number)];
    std::memcpy(bytes, &number, sizeof(number));
    bytes_.append(bytes, sizeof(number));
  }
  void add(int field, std::string_view text) {
    key(field, kLengthDelimited);
    varint(text.size());
    bytes_ += text;
  }
  void add(int field, const Message& message) { add(field, std::string_view(message.bytes_)); }
  // A field with its key, as Fields reads it.
  void add_whole(std::string_view field) { bytes_ += field; }

  const std::string& bytes() const { return bytes_; }

 private:
  static constexpr int kVarint = 0, kLengthDelimited = 2, kFixed32 = 5;

  void key(int field, int wire_type) { varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire_type)); }
  void varint(uint64_t number) {
    for (; number >= 0x80; number >>= 7) bytes_ += static_cast<char>(number | 0x80);
    bytes_ += static_cast<char>(number);
  }

  std::string bytes_;
};

// A field of a message: its number, its bytes with the key, and its content if that is a text or a message.
struct Field {
  int number;
  std::string_view whole, content;
};

// Reads the fields of a message from the front.
class Fields {
 public:
  explicit Fields(std::string_view rest) : rest_(rest) {}

  // Empty at the end. Throws an Error if the bytes are no message.
  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    const std::string_view begin = rest_;
    const uint64_t key = varint();
    Field field{static_cast<int>(key >> 3), {}, {}};
    switch (key & 7) {
      case 0: varint(); break;
      case 1: take(8); break;
      case 2: field.content = take(varint()); break;
      case 5: take(4); break;
      default: fail();
    }
    field.whole = begin.substr(0, begin.size() - rest_.size());
    return field;
  }

 private:
  [[noreturn]] static void fail() { throw Error{ort::ErrorCode::fail, "the fused model is damaged"}; }

  std::string_view take(uint64_t count) {
    if (count > rest_.size()) fail();
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  uint64_t varint() {
    uint64_t number = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint8_t>(take(1)[0]);
      number |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return number;
    }
    fail();
  }

  std::string_view rest_;
};

}  // namespace fa::provider
