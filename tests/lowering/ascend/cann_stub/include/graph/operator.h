// A stand-in for CANN's header: what the plugin calls of ge::Operator, with the same signatures. It writes down what it
// is told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <sstream>
#include <string>

namespace ge {

using char_t = char;
using float32_t = float;
using graphStatus = uint32_t;
const graphStatus GRAPH_FAILED = 0xFFFFFFFF;
const graphStatus GRAPH_SUCCESS = 0;

class AscendString {
 public:
  AscendString() = default;
  AscendString(const char_t* text) : text_(text) {}
  const char_t* GetString() const { return text_.c_str(); }

 private:
  std::string text_;
};

class Operator {
 public:
  // Of the stand-in only.
  Operator(const std::string& name, const std::string& attribute) : name_(name) {
    if (!attribute.empty()) {
      texts_["attribute"] = attribute;
    }
  }
  std::string Record() const { return record_.str(); }

  graphStatus GetName(AscendString& name) const {
    name = AscendString(name_.c_str());
    return GRAPH_SUCCESS;
  }
  graphStatus GetAttr(const char_t* name, AscendString& value) const {
    const auto found = texts_.find(name);
    if (found == texts_.end()) {
      return GRAPH_FAILED;
    }
    value = AscendString(found->second.c_str());
    return GRAPH_SUCCESS;
  }
  Operator& SetAttr(const char_t* name, int64_t value) { return Note(name, "Int", std::to_string(value)); }
  Operator& SetAttr(const char_t* name, int32_t value) { return Note(name, "Int32", std::to_string(value)); }
  Operator& SetAttr(const char_t* name, uint32_t value) { return Note(name, "UInt32", std::to_string(value)); }
  Operator& SetAttr(const char_t* name, bool value) { return Note(name, "Bool", value ? "1" : "0"); }
  Operator& SetAttr(const char_t* name, const char_t* value) { return Note(name, "String", value); }
  Operator& SetAttr(const char_t* name, const AscendString& value) { return Note(name, "String", value.GetString()); }
  Operator& SetAttr(const char_t* name, float32_t value) {
    std::ostringstream text;
    text.precision(9);
    text << value;
    return Note(name, "Float", text.str());
  }
  void DynamicInputRegisterByIndex(const char_t* name, const uint32_t count, size_t index) {
    record_ << "dynamic\t" << name << '\t' << count << '\t' << index << '\n';
  }

 private:
  Operator& Note(const char_t* name, const char* kind, const std::string& value) {
    record_ << "attr\t" << name << '\t' << kind << '\t' << value << '\n';
    return *this;
  }

  std::string name_;
  std::map<std::string, std::string> texts_;
  std::ostringstream record_;
};

}  // namespace ge
