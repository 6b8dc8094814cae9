#include "commands/head_config.h"

#include "support/format.h"

namespace logitless::cli {
namespace {

constexpr const char* kScale = "--scale";
constexpr const char* kSoftcap = "--softcap";

std::string part(const char* option, double value, const std::vector<LogitTransform>& from,
                 const std::string& file) {
  std::string keys;
  for (const LogitTransform& transform : from) {
    keys += (keys.empty() ? "" : ", ") + transform.key + " " + format_number(transform.value);
  }
  return keys.empty() ? ""
                      : std::string(option) + " " + format_number(value) + " (" + keys + " in " + file + ")";
}

}  // namespace

ModelConfig read_head_config(const std::string& file, const CLI::App& command) {
  return read_model_config(file,
                           {.scale = command.count(kScale) != 0, .softcap = command.count(kSoftcap) != 0});
}

void apply(const ModelConfig& config, const CLI::App& command, LossOptions& options) {
  if (command.count(kScale) == 0) options.scale = config.scale;
  if (command.count(kSoftcap) == 0) options.softcap = config.softcap;
}

nlohmann::ordered_json applied_json(const ModelConfig& config) {
  nlohmann::ordered_json applied = nlohmann::ordered_json::array();
  const auto add = [&](const char* option, const std::vector<LogitTransform>& from) {
    for (const LogitTransform& transform : from) {
      applied.push_back({{"option", option}, {"key", transform.key}, {"value", transform.value}});
    }
  };
  add("scale", config.scale_from);
  add("softcap", config.softcap_from);
  return {{"file", config.file}, {"applied", applied}};
}

std::string applied_text(const ModelConfig& config) {
  const std::string scale = part("scale", config.scale, config.scale_from, config.file);
  const std::string softcap = part("softcap", config.softcap, config.softcap_from, config.file);
  return scale + (scale.empty() || softcap.empty() ? "" : ", ") + softcap;
}

}  // namespace logitless::cli
