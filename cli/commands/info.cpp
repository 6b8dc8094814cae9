#include <headroom/headroom.hpp>

#include <iostream>

#include "commands/commands.h"
#include "commands/context.h"
#include "commands/device_facts.h"
#include "commands/units.h"

namespace headroom::cli {
namespace {

using nlohmann::ordered_json;

// The backend that a problem of this dtype gets with the global options; empty when none can run it.
std::string backend_for(const GlobalOptions& globals, headroom_dtype dtype) {
  Problem problem;
  problem.tokens = problem.vocab = problem.hidden = 256;
  problem.hidden_dtype = problem.classifier_dtype = dtype;
  try {
    return Plan(make_context(globals), problem).info().backend;
  } catch (const Error&) {
    return "";
  }
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

ordered_json collect(const GlobalOptions& globals) {
  const DeviceFacts facts = read_device_facts();
  ordered_json caches = ordered_json::array();
  for (const CacheFacts& cache : facts.caches) {
    caches.push_back({{"level", cache.level}, {"type", cache.type}, {"bytes", cache.bytes}});
  }
  ordered_json list = ordered_json::array();
  for (const BackendInfo& backend : backends()) {
    list.push_back({{"name", backend.name},
                    {"usable", backend.why_unavailable.empty()},
                    {"why_unavailable", backend.why_unavailable},
                    {"description", backend.description}});
  }
  return {{"version", headroom_version()},
          {"backends", list},
          {"chosen",
           {{"float32", backend_for(globals, HEADROOM_F32)},
            {"bfloat16", backend_for(globals, HEADROOM_BF16)},
            {"float16", backend_for(globals, HEADROOM_F16)},
            {"float64", backend_for(globals, HEADROOM_F64)}}},
          {"device",
           {{"processor", facts.processor},
            {"instruction_sets", facts.instruction_sets},
            {"processors_online", facts.processors_online},
            {"processors_usable", facts.processors_usable},
            {"caches", caches},
            {"memory_bytes", facts.memory_bytes},
            {"memory_available_bytes", facts.memory_available_bytes}}}};
}

void print_text(const ordered_json& facts) {
  std::cout << "headroom " << facts["version"].get<std::string>() << "\n\nBackends, in order of preference\n";
  for (const auto& backend : facts["backends"]) {
    const bool usable = backend["usable"];
    std::cout << "  " << backend["name"].get<std::string>() << ": "
              << (usable ? "usable" : "not usable: " + backend["why_unavailable"].get<std::string>())
              << "\n    " << backend["description"].get<std::string>() << "\n";
  }
  std::cout << "\nChosen for\n";
  for (const auto& [dtype, name] : facts["chosen"].items()) {
    const std::string backend = name.is_string() ? name.get<std::string>() : "";
    std::cout << "  " << dtype << ": " << (backend.empty() ? "none" : backend) << "\n";
  }
  const auto& device = facts["device"];
  std::cout << "\nDevice\n  processor: " << device["processor"].get<std::string>()
            << "\n  instruction sets: " << join(device["instruction_sets"].get<std::vector<std::string>>())
            << "\n  processors: " << device["processors_usable"] << " usable of "
            << device["processors_online"] << "\n";
  for (const auto& cache : device["caches"]) {
    std::cout << "  L" << cache["level"] << " cache (" << cache["type"].get<std::string>()
              << "): " << format_bytes(cache["bytes"].get<double>()) << "\n";
  }
  std::cout << "  memory: " << format_bytes(device["memory_bytes"].get<double>()) << ", available "
            << format_bytes(device["memory_available_bytes"].get<double>()) << "\n";
}

}  // namespace

void add_info_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("info", "Version, backends and why each is usable or not, device facts");
  command->footer(
      "\nExamples:\n"
      "  headroom info\n"
      "  headroom --json info | jq .backends\n");
  command->callback([&globals] {
    const ordered_json facts = collect(globals);
    if (globals.json) {
      print_json(facts);
    } else {
      print_text(facts);
    }
  });
}

}  // namespace headroom::cli
