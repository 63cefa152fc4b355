#include "graph_model.hpp"

#include <map>
#include <optional>
#include <set>

#include "onnx_message.hpp"
#include "owners.hpp"
#include "value_types.hpp"

namespace fa::provider {
namespace {

// The numbers of the fields in onnx.proto.
namespace model {
constexpr int ir_version = 1, producer = 2, graph = 7, opset = 8;
}
namespace opset {
constexpr int domain = 1, version = 2;
}
namespace graph {
constexpr int node = 1, name = 2, initializer = 5, input = 11, output = 12, value_info = 13;
}
namespace node {
constexpr int input = 1, output = 2, name = 3, op_type = 4, attribute = 5, domain = 7;
}
namespace attribute {
constexpr int name = 1, f = 2, i = 3, s = 4, t = 5, g = 6, floats = 7, ints = 8, strings = 9, type = 20;
constexpr int64_t kFloat = 1, kInt = 2, kString = 3, kTensor = 4, kGraph = 5, kFloats = 6, kInts = 7, kStrings = 8;
}  // namespace attribute
namespace tensor {
constexpr int dim = 1, type = 2, string_data = 6, name = 8, raw_data = 9, external_data = 13, location = 14;
constexpr int key = 1, value = 2;  // of an entry of external_data
constexpr int64_t kExternal = 1;
}  // namespace tensor
namespace value {
constexpr int name = 1, type = 2;
}
namespace type {
constexpr int tensor = 1, element = 1, shape = 2, dim = 1, dim_value = 1, dim_param = 2;
constexpr int sequence = 4, optional = 9, contained = 1;
}  // namespace type

// From this IR version on, an initializer need not be a graph input, too.
constexpr int64_t kInitializersAlone = 4;

class Writer {
 public:
  explicit Writer(ort::Api api) : api_(api) {}

  GraphModel model(const ort::Graph* graph, const Part& part) {
    Message result;
    int64_t ir_version = 0;
    check(api_, ort::Graph_GetOnnxIRVersion(api_, graph, &ir_version));
    result.add(model::ir_version, std::max(ir_version, kInitializersAlone));
    result.add(model::producer, "onnxruntime");
    result.add(model::graph, graph_message(graph, part, true));
    add_imports(result, graph);
    const auto names = [this](const std::vector<const ort::ValueInfo*>& values) {
      std::vector<std::string> found;
      for (const auto* value : values) found.push_back(name_of(api_, value));
      return found;
    };
    return {result.bytes(), names(part.inputs), names(part.outputs), std::move(weights_), std::move(constants_),
            std::move(copied_)};
  }

 private:
  using Attributes = std::map<std::string, Message>;  // by name

  // The runtime lists all domains that sessions of this process have brought. Written are those of the nodes, and that of
  // ONNX, from which the fused graph has nodes, too.
  void add_imports(Message& result, const ort::Graph* graph) const {
    size_t count = 0;
    check(api_, ort::Graph_GetNumOperatorSets(api_, graph, &count));
    std::vector<const char*> domains(count);
    std::vector<int64_t> versions(count);
    check(api_, ort::Graph_GetOperatorSets(api_, graph, domains.data(), versions.data(), count));
    std::map<std::string, int64_t> imports;
    for (size_t i = 0; i < count; ++i) {
      if (domains_.contains(domains[i])) imports.emplace(domains[i], versions[i]);
    }
    for (const auto& [domain, version] : imports) {
      Message imported;
      imported.add(opset::domain, domain);
      imported.add(opset::version, version);
      result.add(model::opset, imported);
    }
  }

  Message subgraph_message(const ort::Graph* graph, bool of_loop) {
    const Part all{all_of<ort::Node>(api_, ort::Graph_GetNumNodes, ort::Graph_GetNodes, graph),
                   all_of<ort::ValueInfo>(api_, ort::Graph_GetNumInputs, ort::Graph_GetInputs, graph),
                   all_of<ort::ValueInfo>(api_, ort::Graph_GetNumOutputs, ort::Graph_GetOutputs, graph)};
    return graph_message(graph, all, false, of_loop);
  }

  // Only the weights of the main graph are left where they are. The runtime takes no external data in subgraphs from
  // memory.
  Message graph_message(const ort::Graph* graph, const Part& part, bool is_main, bool of_loop = false) {
    Message result;
    const char* name = nullptr;
    check(api_, ort::Graph_GetName(api_, graph, &name));
    result.add(graph::name, std::string_view(*name == 0 ? "graph" : name));
    // A Loop does not run without the shapes of its iteration number and condition, so those are scalars where no
    // dimensions are told.
    size_t scalars = of_loop ? 2 : 0;
    for (const auto* value : part.inputs) {
      result.add(graph::input, value_message(value, true, scalars > 0));
      if (scalars > 0) --scalars;
    }
    std::map<std::string, const ort::ValueInfo*> constants;
    for (const auto* value :
         all_of<ort::ValueInfo>(api_, ort::Graph_GetNumInitializers, ort::Graph_GetInitializers, graph)) {
      if (is_constant(api_, value)) constants.emplace(name_of(api_, value), value);
    }
    for (const auto& [constant, value] : constants) {
      result.add(graph::initializer, initializer(constant, value, is_main));
    }
    const auto& outputs = part.outputs;
    for (const auto* value : outputs) result.add(graph::output, value_message(value, true));
    for (const auto* each : part.nodes) {
      result.add(graph::node, node_message(each));
      for (const auto* value : all_of<ort::ValueInfo>(api_, ort::Node_GetNumOutputs, ort::Node_GetOutputs, each)) {
        const bool is_output = std::find(outputs.begin(), outputs.end(), value) != outputs.end();
        if (value != nullptr && !is_output) result.add(graph::value_info, value_message(value, false));
      }
    }
    return result;
  }

  // A value with its type. Of a type that is not written here only the name is; `required` ones throw. `is_scalar` is
  // whether a tensor without dimensions is certainly a scalar.
  Message value_message(const ort::ValueInfo* value, bool required, bool is_scalar = false) const {
    Message result;
    result.add(value::name, name_of(api_, value));
    if (const auto type = type_message(type_info_of(api_, value), is_scalar)) {
      result.add(value::type, *type);
    } else if (required) {
      throw Error{ort::ErrorCode::not_implemented,
                  "'" + name_of(api_, value) + "' is an input or output of a type that a provider cannot write"};
    }
    return result;
  }

  std::optional<Message> type_message(const ort::TypeInfo* found, bool is_scalar = false) const {
    Message type;
    switch (kind_of(api_, found)) {
      case ort::Kind::tensor: {
        type.add(type::tensor, tensor_type_message(tensor_info_of(api_, found), is_scalar));
        return type;
      }
      case ort::Kind::sequence: {
        const ort::SequenceTypeInfo* sequence = nullptr;
        check(api_, ort::CastTypeInfoToSequenceTypeInfo(api_, found, &sequence));
        return containing(type::sequence, ort::GetSequenceElementType, sequence);
      }
      case ort::Kind::optional: {
        const ort::OptionalTypeInfo* optional = nullptr;
        check(api_, ort::CastTypeInfoToOptionalTypeInfo(api_, found, &optional));
        return containing(type::optional, ort::GetOptionalContainedTypeInfo, optional);
      }
      default: return std::nullopt;
    }
  }

  // The type of a sequence or an optional value, by the type that it contains.
  template <class Get, class Info>
  std::optional<Message> containing(int field, const Get& get, const Info* info) const {
    ort::TypeInfo* raw = nullptr;
    check(api_, get(api_, info, &raw));
    const TypePtr contained(raw, {api_});
    const auto inner = type_message(raw);
    if (!inner) return std::nullopt;
    Message outer;
    outer.add(type::contained, *inner);
    Message type;
    type.add(field, outer);
    return type;
  }

  Message tensor_type_message(const ort::TensorInfo* info, bool is_scalar) const {
    const Described found = described(api_, info);
    Message result;
    result.add(type::element, static_cast<int64_t>(found.type));
    if (found.has_shape || is_scalar) result.add(type::shape, shape_message(info, found.dims));
    return result;
  }

  Message shape_message(const ort::TensorInfo* info, const std::vector<int64_t>& dims) const {
    Message result;
    std::vector<const char*> names(dims.size());
    check(api_, ort::GetSymbolicDimensions(api_, info, names.data(), names.size()));
    for (size_t i = 0; i < dims.size(); ++i) {
      Message dim;
      if (dims[i] >= 0) {
        dim.add(type::dim_value, dims[i]);
      } else if (names[i] != nullptr && *names[i] != 0) {
        dim.add(type::dim_param, std::string_view(names[i]));
      }
      result.add(type::dim, dim);
    }
    return result;
  }

  Message initializer(const std::string& name, const ort::ValueInfo* info, bool is_main) {
    const ort::Value* value = nullptr;
    check(api_, ort::ValueInfo_GetInitializerValue(api_, info, &value));
    if (value == nullptr) throw Error{ort::ErrorCode::fail, "the weight '" + name + "' has no value"};
    const Content content = content_of(value);
    const bool stays = is_main && content.bytes > kCopied;
    if (!stays) copied_.insert(name);
    if (!is_main || content.bytes == 0) return tensor_message(name, value);
    const size_t number = stays ? weights_.size() : constants_.size();
    const std::string file = (stays ? "fa_compiler_" : "fa_compiler_small_") + std::to_string(number);
    const Weight weight{name, file, content.data, content.bytes};
    const Message outside = external_message(weight, described(api_, value));
    constants_.push_back({weight, outside.bytes(), value_message(info, true).bytes()});
    if (!stays) return tensor_message(name, value);
    weights_.push_back(weight);
    return outside;
  }

  // The bytes of a tensor; none of one of strings.
  struct Content {
    const void* data = nullptr;
    size_t bytes = 0;
  };
  Content content_of(const ort::Value* value) const {
    if (described(api_, value).type == ort::Element::string) return {};
    Content content;
    void* data = nullptr;
    check(api_, ort::GetTensorSizeInBytes(api_, value, &content.bytes));
    check(api_, ort::GetTensorMutableData(api_, const_cast<ort::Value*>(value), &data));
    content.data = data;
    return content;
  }

  static Message tensor_head(const std::string& name, const Described& found) {
    Message result;
    for (int64_t dim : found.dims) result.add(tensor::dim, dim);
    result.add(tensor::type, static_cast<int64_t>(found.type));
    result.add(tensor::name, name);
    return result;
  }

  Message tensor_message(const std::string& name, const ort::Value* value) const {
    const Described found = described(api_, value);
    Message result = tensor_head(name, found);
    if (found.type == ort::Element::string) {
      add_strings(result, value, found.dims);
      return result;
    }
    const Content content = content_of(value);
    result.add(tensor::raw_data, std::string_view(static_cast<const char*>(content.data), content.bytes));
    return result;
  }

  static Message external_message(const Weight& weight, const Described& found) {
    Message result = tensor_head(weight.name, found);
    add_external(result, "location", weight.file);
    add_external(result, "length", std::to_string(weight.bytes));
    result.add(tensor::location, tensor::kExternal);
    return result;
  }

  static void add_external(Message& result, std::string_view key, std::string_view text) {
    Message entry;
    entry.add(tensor::key, key);
    entry.add(tensor::value, text);
    result.add(tensor::external_data, entry);
  }

  void add_strings(Message& result, const ort::Value* value, const std::vector<int64_t>& dims) const {
    size_t count = 1;
    for (int64_t dim : dims) count *= static_cast<size_t>(dim);
    size_t bytes = 0;
    check(api_, ort::GetStringTensorDataLength(api_, value, &bytes));
    std::string text(bytes, '\0');
    std::vector<size_t> starts(count);
    check(api_, ort::GetStringTensorContent(api_, value, text.data(), bytes, starts.data(), count));
    for (size_t i = 0; i < count; ++i) {
      const size_t end = i + 1 < count ? starts[i + 1] : bytes;
      result.add(tensor::string_data, std::string_view(text).substr(starts[i], end - starts[i]));
    }
  }

  Message node_message(const ort::Node* each) {
    Message result;
    const auto text = [&](const auto& slot) {
      const char* found = nullptr;
      check(api_, slot(api_, each, &found));
      return std::string_view(found);
    };
    for (const auto* value : all_of<ort::ValueInfo>(api_, ort::Node_GetNumInputs, ort::Node_GetInputs, each)) {
      result.add(node::input, name_of(api_, value));
    }
    for (const auto* value : all_of<ort::ValueInfo>(api_, ort::Node_GetNumOutputs, ort::Node_GetOutputs, each)) {
      result.add(node::output, name_of(api_, value));
    }
    result.add(node::name, text(ort::Node_GetName));
    result.add(node::op_type, text(ort::Node_GetOperatorType));
    result.add(node::domain, text(ort::Node_GetDomain));
    domains_.emplace(text(ort::Node_GetDomain));
    Attributes attributes;
    for (const auto* found : all_of<ort::OpAttr>(api_, ort::Node_GetNumAttributes, ort::Node_GetAttributes, each)) {
      add_attribute(attributes, found, std::string(text(ort::Node_GetOperatorType)));
    }
    add_subgraphs(attributes, each, text(ort::Node_GetOperatorType) == "Loop");
    for (const auto& [name, message] : attributes) result.add(node::attribute, message);
    return result;
  }

  void add_subgraphs(Attributes& attributes, const ort::Node* each, bool is_loop) {
    size_t count = 0;
    check(api_, ort::Node_GetNumSubgraphs(api_, each, &count));
    if (count == 0) return;
    std::vector<const ort::Graph*> graphs(count);
    std::vector<const char*> names(count);
    check(api_, ort::Node_GetSubgraphs(api_, each, graphs.data(), count, names.data()));
    for (size_t i = 0; i < count; ++i) {
      Message made;
      made.add(attribute::name, std::string_view(names[i]));
      made.add(attribute::g, subgraph_message(graphs[i], is_loop));
      made.add(attribute::type, attribute::kGraph);
      attributes.emplace(names[i], made);
    }
  }

  void add_attribute(Attributes& attributes, const ort::OpAttr* found, const std::string& op_type) {
    ort::AttributeKind kind{};
    ort::Status* status = ort::OpAttr_GetType(api_, found, &kind);
    if (kind == ort::AttributeKind::graph) {  // add_subgraphs writes it
      if (status != nullptr) ort::ReleaseStatus(api_, status);
      return;
    }
    const char* name = nullptr;
    if (status == nullptr) status = ort::OpAttr_GetName(api_, found, &name);
    if (status != nullptr) {
      ort::ReleaseStatus(api_, status);
      throw Error{ort::ErrorCode::not_implemented,
                  "an attribute of a node " + op_type + " is of a type that a provider cannot read"};
    }
    Message made;
    made.add(attribute::name, std::string_view(name));
    add_content(made, found, kind, name);
    attributes.emplace(name, made);
  }

  void add_content(Message& made, const ort::OpAttr* found, ort::AttributeKind kind, const char* name) {
    using Kind = ort::AttributeKind;
    if (kind == Kind::tensor) {
      ort::Value* raw = nullptr;
      check(api_, ort::OpAttr_GetTensorAttributeAsOrtValue(api_, found, &raw));
      const auto release = [this](ort::Value* value) { ort::ReleaseValue(api_, value); };
      const std::unique_ptr<ort::Value, decltype(release)> value(raw, release);
      made.add(attribute::t, tensor_message("", value.get()));
      made.add(attribute::type, attribute::kTensor);
      return;
    }
    const std::string bytes = content(found, kind);
    const auto add_all = [&]<class Stored>(Stored, int field, int64_t type) {
      for (size_t at = 0; at + sizeof(Stored) <= bytes.size(); at += sizeof(Stored)) {
        Stored number;
        std::memcpy(&number, bytes.data() + at, sizeof(Stored));
        made.add(field, number);
      }
      made.add(attribute::type, type);
    };
    switch (kind) {
      case Kind::integer: return add_all(int64_t{}, attribute::i, attribute::kInt);
      case Kind::integers: return add_all(int64_t{}, attribute::ints, attribute::kInts);
      case Kind::number: return add_all(float{}, attribute::f, attribute::kFloat);
      case Kind::numbers: return add_all(float{}, attribute::floats, attribute::kFloats);
      case Kind::string:
        made.add(attribute::s, std::string_view(bytes));
        return made.add(attribute::type, attribute::kString);
      case Kind::strings: {
        // The texts follow each other, each with a final 0.
        for (size_t at = 0; at < bytes.size();) {
          const size_t end = std::min(bytes.find('\0', at), bytes.size());
          made.add(attribute::strings, std::string_view(bytes).substr(at, end - at));
          at = end + 1;
        }
        return made.add(attribute::type, attribute::kStrings);
      }
      default:
        throw Error{ort::ErrorCode::not_implemented,
                    std::string("the attribute '") + name + "' has a type that a provider cannot read"};
    }
  }

  // The bytes of an attribute that is not a tensor. The first call of ReadOpAttr fails and tells how many there are.
  std::string content(const ort::OpAttr* found, ort::AttributeKind kind) const {
    size_t size = 0;
    ort::Status* status = ort::ReadOpAttr(api_, found, kind, nullptr, 0, &size);
    if (status != nullptr) ort::ReleaseStatus(api_, status);
    std::string bytes(size, '\0');
    if (size > 0) check(api_, ort::ReadOpAttr(api_, found, kind, bytes.data(), size, &size));
    return bytes;
  }

  ort::Api api_;
  std::vector<Weight> weights_;
  std::vector<Constant> constants_;
  std::set<std::string> copied_;
  std::set<std::string> domains_{""};
};

}  // namespace

GraphModel model_of(ort::Api api, const ort::Graph* graph, const Part& part) { return Writer(api).model(graph, part); }

namespace {

// The content of the only field of this number in a message; empty if there is none.
std::string_view content_of(std::string_view message, int number) {
  Fields fields(message);
  while (const auto field = fields.next()) {
    if (field->number == number) return field->content;
  }
  return {};
}

// Whether a tensor of the fused model is the constant as it was.
bool is_unchanged(std::string_view message, const Constant& constant) {
  const std::string_view outside = content_of(message, tensor::external_data);
  if (!outside.empty()) return true;  // only unchanged weights are external
  const std::string_view before(static_cast<const char*>(constant.weight.data), constant.weight.bytes);
  return content_of(message, tensor::raw_data) == before;
}

std::string graph_with_constants_outside(std::string_view graph, const std::vector<Constant>& constants) {
  std::map<std::string_view, const Constant*> absent;  // from the graph
  for (const Constant& constant : constants) absent.emplace(constant.weight.name, &constant);
  Message result;
  Fields fields(graph);
  while (const auto field = fields.next()) {
    if (field->number == graph::initializer) {
      const auto found = absent.find(content_of(field->content, tensor::name));
      if (found != absent.end()) {
        const Constant& constant = *found->second;
        absent.erase(found);
        if (is_unchanged(field->content, constant)) {
          result.add(graph::initializer, constant.tensor);
          continue;
        }
      }
    }
    result.add_whole(field->whole);
  }
  for (const auto& [name, constant] : absent) {
    result.add(graph::initializer, constant->tensor);
    result.add(graph::input, constant->input);
  }
  return result.bytes();
}

}  // namespace

std::string with_constants_outside(std::string_view model, const std::vector<Constant>& constants) {
  Message result;
  Fields fields(model);
  while (const auto field = fields.next()) {
    if (field->number == model::graph) {
      result.add(model::graph, graph_with_constants_outside(field->content, constants));
    } else {
      result.add_whole(field->whole);
    }
  }
  return result.bytes();
}

std::string trial_model(const std::vector<Constant>& constants) {
  const auto value_named = [](std::string_view name) {
    Message dim, shape, tensor_type, type, value;
    dim.add(type::dim_value, int64_t{1});
    shape.add(type::dim, dim);
    tensor_type.add(type::element, static_cast<int64_t>(ort::Element::float32));
    tensor_type.add(type::shape, shape);
    type.add(type::tensor, tensor_type);
    value.add(value::name, name);
    value.add(value::type, type);
    return value;
  };
  constexpr std::string_view kInput = "fa_compiler_x", kOutput = "fa_compiler_y";
  Message node, graph, opset, result;
  node.add(node::input, kInput);
  node.add(node::output, kOutput);
  node.add(node::op_type, std::string_view("Neg"));
  graph.add(graph::node, node);
  graph.add(graph::name, std::string_view("trial"));
  graph.add(graph::input, value_named(kInput));
  graph.add(graph::output, value_named(kOutput));
  opset.add(opset::version, int64_t{13});
  result.add(model::ir_version, int64_t{7});
  result.add(model::graph, graph);
  result.add(model::opset, opset);
  return with_constants_outside(result.bytes(), constants);
}

}  // namespace fa::provider
