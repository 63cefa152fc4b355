// Writes messages in the wire format of protobuf, which ONNX files have.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

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

}  // namespace fa::provider
