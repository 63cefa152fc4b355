// A stand-in for CANN's header: registration as the plugin uses it. A registration is kept, to be called by name.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "graph/operator.h"

namespace domi {

using Status = uint32_t;
const Status SUCCESS = 0;
const Status FAILED = 0xFFFFFFFF;

enum FrameworkType { CAFFE = 0, MINDSPORE = 1, TENSORFLOW = 3, ANDROID_NN, ONNX, FRAMEWORK_RESERVED };
enum class ImplyType : unsigned int { BUILDIN = 0, TVM, CUSTOM };

using ParseParamByOpFunc = std::function<Status(const ge::Operator&, ge::Operator&)>;

class OpRegistrationData {
 public:
  OpRegistrationData(const char* om_optype) : om_optype_(om_optype) {}
  OpRegistrationData& FrameworkType(const domi::FrameworkType& type) {
    framework_ = type;
    return *this;
  }
  OpRegistrationData& OriginOpType(const char* type) {
    origin_ = type;
    return *this;
  }
  OpRegistrationData& ParseParamsByOperatorFn(const ParseParamByOpFunc& parse) {
    parse_ = parse;
    return *this;
  }
  OpRegistrationData& ImplyType(const domi::ImplyType&) { return *this; }

  std::string om_optype_;
  domi::FrameworkType framework_ = FRAMEWORK_RESERVED;
  std::string origin_;
  ParseParamByOpFunc parse_;
};

inline std::map<std::string, OpRegistrationData>& Registered() {
  static std::map<std::string, OpRegistrationData> all;
  return all;
}

class OpReceiver {
 public:
  OpReceiver(OpRegistrationData& data) { Registered().emplace(data.origin_, data); }
};

}  // namespace domi

#define REGISTER_CUSTOM_OP(name) REGISTER_CUSTOM_OP_COUNTED(__COUNTER__, name)
#define REGISTER_CUSTOM_OP_COUNTED(count, name) REGISTER_CUSTOM_OP_NUMBERED(count, name)
#define REGISTER_CUSTOM_OP_NUMBERED(count, name) \
  static ::domi::OpReceiver register_op##count __attribute__((unused)) = ::domi::OpRegistrationData(name)
