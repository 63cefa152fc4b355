#include "plan.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "digest.hpp"

namespace fa::provider {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "fa_compiler plan 2\n";
constexpr const char* kSuffix = ".plan";

// Reads the content of a plan from the front. Throws an Error if it ends too early.
class PlanReader {
 public:
  explicit PlanReader(std::string_view rest) : rest_(rest) {}

  std::string_view bytes(uint64_t count) {
    if (count > rest_.size()) throw Error{ort::ErrorCode::fail, "it ends too early"};
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  uint64_t number() {
    uint64_t number = 0;
    const std::string_view taken = bytes(sizeof(number));
    for (size_t i = 0; i < taken.size(); ++i) number |= uint64_t{static_cast<uint8_t>(taken[i])} << (8 * i);
    return number;
  }
  std::string_view text() { return bytes(number()); }
  Digest digest() {
    Digest digest;
    std::memcpy(digest.data(), bytes(digest.size()).data(), digest.size());
    return digest;
  }
  // A number of items, each of which has at least `size` bytes.
  uint64_t count(size_t size) {
    const uint64_t count = number();
    if (count > rest_.size() / size) throw Error{ort::ErrorCode::fail, "it ends too early"};
    return count;
  }
  bool at_end() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

struct Read {
  uint64_t place;
  Digest digest;
};

struct Entry {
  Digest graph;
  std::string_view message, model;
  std::vector<int64_t> sizes;
  std::vector<Read> weights;
};

// The parts of a file, which point into its bytes.
struct Plan {
  std::string_view package, runtime, level, source;
  std::vector<Entry> entries;
};

Entry entry_of(PlanReader& reader) {
  Entry entry{reader.digest(), reader.text(), reader.text(), {}, {}};
  entry.sizes.resize(reader.count(sizeof(int64_t)));
  for (int64_t& size : entry.sizes) size = static_cast<int64_t>(reader.number());
  entry.weights.resize(reader.count(sizeof(uint64_t) + sizeof(Digest)));
  for (Read& weight : entry.weights) {
    weight.place = reader.number();
    weight.digest = reader.digest();
  }
  return entry;
}

// Throws an Error if the bytes are not those of a plan.
Plan plan_of(std::string_view bytes) {
  if (!bytes.starts_with(kMagic)) {
    throw Error{ort::ErrorCode::fail, "it is not a plan, or one of another release of fa_compiler"};
  }
  bytes.remove_prefix(kMagic.size());
  PlanReader reader(bytes);
  const Digest digest = reader.digest();
  bytes.remove_prefix(digest.size());
  if (digest_of(bytes) != digest) throw Error{ort::ErrorCode::fail, "it is damaged"};
  Plan plan{reader.text(), reader.text(), reader.text(), reader.text(), {}};
  // An entry has at least its digest and four numbers.
  plan.entries.reserve(reader.count(sizeof(Digest) + 4 * sizeof(uint64_t)));
  while (plan.entries.size() < plan.entries.capacity()) plan.entries.push_back(entry_of(reader));
  if (!reader.at_end()) throw Error{ort::ErrorCode::fail, "it has more bytes than its entries"};
  return plan;
}

// Throws an Error if the plan is for other releases.
void check_releases(const Plan& plan, const std::string& runtime) {
  const auto check = [](const char* name, std::string_view made_for, std::string_view here) {
    if (made_for == here) return;
    throw Error{ort::ErrorCode::fail, std::string("it was made for ") + name + " " + std::string(made_for) +
                                          ", and this is " + std::string(here)};
  };
  check("ONNX Runtime", plan.runtime, runtime);
  check("fa_compiler", plan.package, kVersion);
}

// Throws an Error if a weight that the matcher has read holds something else.
void check_weights(const Entry& entry, const GraphModel& graph) {
  for (const Read& read : entry.weights) {
    if (read.place >= graph.weights.size()) throw Error{ort::ErrorCode::fail, "it is damaged"};
    const Weight& weight = graph.weights[read.place];
    if (digest_of({static_cast<const char*>(weight.data), weight.bytes}) != read.digest) {
      throw Error{ort::ErrorCode::fail, "it was made for other values of the weight '" + weight.name + "'"};
    }
  }
}

std::string content_of(const fs::path& path) {
  std::error_code none;
  if (!fs::exists(path, none)) throw Error{ort::ErrorCode::fail, "there is no such file"};
  std::ifstream file(path, std::ios::binary);
  std::string content;
  char chunk[1 << 16];
  do {
    file.read(chunk, sizeof(chunk));
    content.append(chunk, static_cast<size_t>(file.gcount()));
  } while (file);
  if (!file.eof()) throw Error{ort::ErrorCode::fail, "it cannot be read"};
  return content;
}

// The plans of a folder, in the order of their names. Throws an Error if it cannot be listed.
std::vector<fs::path> plans_in(const fs::path& place) {
  std::vector<fs::path> files;
  std::error_code failure;
  fs::directory_iterator entry(place, failure);
  for (; !failure && entry != fs::directory_iterator(); entry.increment(failure)) {
    if (entry->path().extension() == kSuffix) files.push_back(entry->path());
  }
  if (failure) throw Error{ort::ErrorCode::fail, failure.message()};
  std::sort(files.begin(), files.end());
  return files;
}

// The answer of a file for the graph with this key; empty if the file is for other graphs only. Throws an Error if the file
// cannot be used.
std::optional<Answer> answer_in(const Plan& plan, const Digest& key, const GraphModel& graph) {
  const auto found =
      std::find_if(plan.entries.begin(), plan.entries.end(), [&](const Entry& entry) { return entry.graph == key; });
  if (found == plan.entries.end()) return std::nullopt;
  check_weights(*found, graph);
  std::vector<uint64_t> read;
  for (const Read& weight : found->weights) read.push_back(weight.place);
  return Answer{std::string(found->model), found->sizes, std::move(read), ort::Severity::info, std::string(found->message)};
}

// Session options and messages are UTF-8 on every system.
fs::path path_of(const std::string& text) { return std::u8string(text.begin(), text.end()); }
std::string text_of(const fs::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}

}  // namespace

std::optional<Answer> Plans::answer(const GraphModel& graph,
                                    const std::function<void(const std::string&)>& refused) const {
  const Digest key = digest_of(graph.bytes);
  const fs::path place = path_of(place_);
  std::error_code none;
  const bool is_folder = fs::is_directory(place, none);
  std::vector<fs::path> files{place};
  try {
    if (is_folder) files = plans_in(place);
  } catch (const Error& error) {
    refused("the folder " + place_ + " with plans cannot be read: " + error.text);
    return std::nullopt;
  }
  for (const fs::path& file : files) {
    try {
      const std::string content = content_of(file);
      const Plan plan = plan_of(content);
      check_releases(plan, runtime_);
      if (auto answer = answer_in(plan, key, graph)) return answer;
      if (is_folder) continue;
      throw Error{ort::ErrorCode::fail, "it is for another graph: it was made of " + std::string(plan.source) +
                                            " with the optimisation level " + std::string(plan.level)};
    } catch (const Error& error) {
      refused("the plan " + text_of(file) + " is not used: " + error.text);
    }
  }
  if (is_folder) refused("no plan in the folder " + place_ + " has this graph");
  return std::nullopt;
}

}  // namespace fa::provider
