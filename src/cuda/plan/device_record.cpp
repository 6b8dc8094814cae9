#include "cuda/plan/device_record.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "core/number_text.h"
#include "core/status.h"
#include "cuda/engines/engine.h"
#ifdef LOGITLESS_WITH_JSON
#include <nlohmann/json.hpp>
#endif

namespace logitless::cuda {

std::string record_path(const Device& device) {
  const auto variable = [](const char* name) -> std::string_view {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
  };
  std::string folder(variable("LOGITLESS_DEVICE_RECORDS"));
  if (folder.empty() && std::getenv("LOGITLESS_DEVICE_RECORDS") != nullptr) return "";
  if (folder.empty()) {
    folder = variable("XDG_CONFIG_HOME");
    if (!folder.starts_with('/')) folder.clear();  // its specification says to ignore relative paths
    if (folder.empty() && !variable("HOME").empty()) folder = std::string(variable("HOME")) + "/.config";
    if (folder.empty()) return "";
    folder += "/logitless/devices";
  }
  std::string name = device.name + "-" + std::to_string(device.processors);
  for (char& letter : name) {
    const auto code = static_cast<unsigned char>(letter);
    letter = std::isalnum(code) != 0 ? static_cast<char>(std::tolower(code)) : '-';
  }
  return folder + "/" + name + ".json";
}

#ifndef LOGITLESS_WITH_JSON

std::string why_no_records() {
  return "this build has no device records: install nlohmann_json (Debian: nlohmann-json3-dev) and build "
         "again";
}
std::string text_of(const DeviceRecord& /*record*/) {
  throw Error(Status::kUnsupported, why_no_records());
}
DeviceRecord parse_record(const std::string& /*text*/, const std::string& /*source*/) {
  throw Error(Status::kUnsupported, why_no_records());
}
void add_record(Device& /*device*/) {}

#else

namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kFormat = 1;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// For messages: short ASCII text. dump() calls itself for nested values, whose depth is the file's choice.
std::string shown(const json& value) {
  if (value.is_discarded()) return "text that is no JSON";
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  return value.dump(-1, ' ', /*ensure_ascii=*/true).substr(0, 60);
}

// Reads members of objects, and names those that are missing or wrong.
class Reader {
 public:
  Reader(const json& object, std::string place, const std::string& source)
      : object_(object), place_(std::move(place)), source_(source) {
    if (!object.is_object()) refuse("", "an object", object);
  }

  Reader part(const char* name) const { return {member(name), place_ + name + ".", source_}; }
  std::string text(const char* name) const {
    const json& value = member(name);
    if (!value.is_string()) refuse(name, "a string", value);
    return value.get<std::string>();
  }
  double number(const char* name, double lowest) const {
    const json& value = member(name);
    const double read = value.is_number() ? value.get<double>() : NAN;
    if (!(read >= lowest && read <= 1e30)) refuse(name, "a number from " + number_text(lowest), value);
    return read;
  }
  int64_t count(const char* name) const {
    const json& value = member(name);
    if (!value.is_number_integer() || value < 0 || value > (int64_t{1} << 40)) refuse(name, "a count", value);
    return value.get<int64_t>();
  }
  const json& list(const char* name) const {
    const json& value = member(name);
    if (!value.is_array()) refuse(name, "a list", value);
    return value;
  }
  bool has(const char* name) const { return object_.contains(name) && !object_[name].is_null(); }
  [[noreturn]] void refuse(const std::string& name, const std::string& expected, const json& got) const {
    const std::string member = place_ + name;
    throw_invalid("device record " + source_ + (member.empty() ? "" : ": " + member), expected, shown(got));
  }
  // Returns the engine of this name, or throws.
  std::string engine(const char* name) const {
    if (engine_named(text(name)) == nullptr) {
      refuse(name, "an engine of CUDA", object_[name]);
    }
    return text(name);
  }

 private:
  const json& member(const char* name) const {
    if (!object_.contains(name)) refuse(name, "a value", "nothing");
    return object_[name];
  }

  const json& object_;
  std::string place_;
  const std::string& source_;
};

TimedRun run_of(const Reader& reader) {
  TimedRun run;
  run.tokens = reader.count("tokens");
  run.vocab = reader.count("vocab");
  run.hidden = reader.count("hidden");
  run.engine = reader.engine("engine");
  const auto work = std::ranges::find(kWorkNames, reader.text("work"));
  if (work == kWorkNames.end()) reader.refuse("work", "loss, exact or sparsified", reader.text("work"));
  run.work = static_cast<Work>(work - kWorkNames.begin());
  run.median_seconds = reader.number("median_seconds", 0);
  run.repeats = reader.count("repeats");
  run.plan = reader.text("plan");
  return run;
}

// The records in plan/records, which CMake writes into this table.
struct BuiltIn {
  const char* name;
  const char* text;
};
const BuiltIn kBuiltIn[] = {
#include <device_records.inc>  // from CMake
    {"", ""}};

// Throws if there is no regular file, or one that is larger than any record. The stream alone would open a
// folder, and wait for a pipe.
std::string text_in(const std::string& path) {
  constexpr uintmax_t kMostBytes = 16 << 20;
  std::error_code error;
  const uintmax_t bytes = std::filesystem::file_size(path, error);  // the largest number if there is an error
  std::string text(bytes <= kMostBytes ? bytes : 0, '\0');
  if (bytes > kMostBytes ||
      !std::ifstream(path, std::ios::binary).read(text.data(), static_cast<std::streamsize>(text.size()))) {
    throw_invalid("device record " + path, "a file of at most 16 MiB that can be read",
                  error ? error.message() : std::to_string(bytes) + " bytes");
  }
  return text;
}

bool is_of(const DeviceRecord& record, const Device& device) {
  return record.device.name == device.name && record.device.capability == device.capability &&
         record.device.processors == device.processors;
}

}  // namespace

std::string why_no_records() {
  return "";
}

std::string text_of(const DeviceRecord& record) {
  const Measured& measured = record.device.measured;
  ordered_json engines = ordered_json::object(), runs = ordered_json::array();
  for (size_t i = 0; i < kWorkNames.size(); ++i) {
    if (!measured.engines[i].empty()) engines[kWorkNames[i]] = measured.engines[i];
  }
  for (const TimedRun& run : record.runs) {
    runs.push_back({{"tokens", run.tokens},
                    {"vocab", run.vocab},
                    {"hidden", run.hidden},
                    {"engine", run.engine},
                    {"work", kWorkNames[static_cast<size_t>(run.work)]},
                    {"median_seconds", run.median_seconds},
                    {"repeats", run.repeats},
                    {"plan", run.plan}});
  }
  const ordered_json document{{"format", kFormat},
                              {"device",
                               {{"name", record.device.name},
                                {"compute_capability", record.device.capability},
                                {"multiprocessors", record.device.processors}}},
                              {"driver", version_text(record.driver_version)},
                              {"logitless", record.library_version},
                              {"file", measured.source},
                              {"date", record.date},
                              {"rates",
                               {{"matmul_flops", measured.matmul_flops},
                                {"bytes_per_second", measured.bytes_per_second},
                                {"mma_share", measured.mma_share}}},
                              {"engines", engines},
                              {"runs", runs}};
  // A path may be any bytes; JSON is UTF-8.
  return document.dump(1, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace) + "\n";
}

DeviceRecord parse_record(const std::string& text, const std::string& source) {
  const json document = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Reader reader(document, "", source);
  if (reader.count("format") != kFormat) reader.refuse("format", std::to_string(kFormat), document["format"]);
  DeviceRecord record;
  const Reader device = reader.part("device"), rates = reader.part("rates"), engines = reader.part("engines");
  record.device.name = device.text("name");
  record.device.capability = static_cast<int>(device.count("compute_capability"));
  record.device.processors = static_cast<int>(device.count("multiprocessors"));
  record.library_version = reader.text("logitless");
  record.date = reader.text("date");
  Measured& measured = record.device.measured;
  measured.source = source;
  const auto rate = [&](const char* name, double lowest) {
    return rates.number(name, 0) == 0 ? 0 : rates.number(name, lowest);
  };
  measured.matmul_flops = rate("matmul_flops", kLeastRate);
  measured.bytes_per_second = rate("bytes_per_second", kLeastRate);
  measured.mma_share = rate("mma_share", kLeastShare);
  for (size_t i = 0; i < kWorkNames.size(); ++i) {
    if (engines.has(kWorkNames[i])) measured.engines[i] = engines.engine(kWorkNames[i]);
  }
  for (const json& run : reader.list("runs")) record.runs.push_back(run_of({run, "runs.", source}));
  return record;
}

void add_record(Device& device) {
  const std::string path = record_path(device);
  // A folder that this user may not enter has no record.
  if (std::error_code ignored; !path.empty() && std::filesystem::exists(path, ignored)) {
    try {
      const DeviceRecord record = parse_record(text_in(path), path);
      if (is_of(record, device)) device.measured = record.device.measured;
    } catch (const Error& error) {
      device.measured.why_unreadable = error.what();
    }
    return;
  }
  for (const BuiltIn& built_in : kBuiltIn) {
    if (*built_in.name == '\0') continue;
    const DeviceRecord record = parse_record(built_in.text, "built in");
    if (is_of(record, device)) device.measured = record.device.measured;
  }
}

#endif

}  // namespace logitless::cuda
