#include <logitless/logitless.hpp>

#include <iostream>

#include "commands/commands.h"
#include "commands/context.h"
#include "commands/device_facts.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

// What a problem of this dtype gets where its tensors are: backend, implementation, and why; only the last
// where nothing can run it.
ordered_json choice_for(const GlobalOptions& globals, int device, logitless_dtype dtype) {
  Problem problem;
  problem.tokens = problem.vocab = problem.hidden = 256;
  problem.hidden_dtype = problem.classifier_dtype = dtype;
  try {
    const PlanInfo info = Plan(make_context(globals, {}, {.ordinal = device, .model = {}}), problem).info();
    return {{"backend", info.backend}, {"implementation", info.implementation}, {"reason", info.reason}};
  } catch (const Error& error) {
    return {{"backend", nullptr}, {"implementation", nullptr}, {"reason", error.what()}};
  }
}

// By dtype of hidden and classifier.
ordered_json choices(const GlobalOptions& globals, int device) {
  return {{"float32", choice_for(globals, device, LOGITLESS_F32)},
          {"bfloat16", choice_for(globals, device, LOGITLESS_BF16)},
          {"float16", choice_for(globals, device, LOGITLESS_F16)},
          {"float64", choice_for(globals, device, LOGITLESS_F64)}};
}

std::string cuda_version(int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// cuBLASLt counts otherwise: 130002 is 13.0.2.
ordered_json cublaslt_version(int64_t version) {
  if (version == 0) return nullptr;
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

ordered_json cuda_devices(const GlobalOptions& globals, std::string* why_none) {
  ordered_json list = ordered_json::array();
  for (const DeviceInfo& device : devices(why_none)) {
    const auto ordinal = static_cast<int>(list.size());
    const std::string why_not = device.why_unavailable;
    list.push_back({{"device", "cuda:" + std::to_string(ordinal)},
                    {"name", device.name},
                    {"usable", why_not.empty()},
                    {"why_unavailable", why_not},
                    {"compute_capability", std::to_string(device.compute_capability / 10) + "." +
                                               std::to_string(device.compute_capability % 10)},
                    {"multiprocessors", device.multiprocessors},
                    {"memory_bytes", device.memory_bytes},
                    {"driver_cuda_version", cuda_version(device.driver_version)},
                    {"runtime_cuda_version", cuda_version(device.runtime_version)},
                    {"cublaslt_version", cublaslt_version(device.cublaslt_version)},
                    {"chosen", choices(globals, ordinal)}});
  }
  return list;
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
  std::string why_none;
  const ordered_json cuda = cuda_devices(globals, &why_none);
  ordered_json list = ordered_json::array();
  for (const BackendInfo& backend : backends()) {
    list.push_back({{"name", backend.name},
                    {"usable", backend.why_unavailable.empty()},
                    {"why_unavailable", backend.why_unavailable},
                    {"description", backend.description}});
  }
  return {{"version", logitless_version()},
          {"backends", list},
          {"chosen", choices(globals, LOGITLESS_HOST_MEMORY)},
          {"cuda_devices", cuda},
          {"why_no_cuda_devices", why_none},
          {"device",
           {{"processor", facts.processor},
            {"instruction_sets", facts.instruction_sets},
            {"processors_online", facts.processors_online},
            {"processors_usable", facts.processors_usable},
            {"caches", caches},
            {"memory_bytes", facts.memory_bytes},
            {"memory_available_bytes", facts.memory_available_bytes}}}};
}

void print_choices(const ordered_json& chosen, int indent) {
  for (const auto& [dtype, choice] : chosen.items()) {
    const std::string reason = choice["reason"].get<std::string>();
    std::cout << std::string(static_cast<size_t>(indent), ' ') << dtype << ": ";
    if (choice["backend"].is_null()) {
      std::cout << "none (" << reason << ")\n";
    } else {
      std::cout << choice["backend"].get<std::string>() << ", " << choice["implementation"].get<std::string>()
                << " (" << reason << ")\n";
    }
  }
}

void print_cuda(const ordered_json& facts) {
  const auto& list = facts["cuda_devices"];
  if (list.empty()) {
    std::cout << "\nCUDA devices: none (" << facts["why_no_cuda_devices"].get<std::string>() << ")\n";
    return;
  }
  std::cout << "\nCUDA devices\n";
  for (const auto& device : list) {
    const auto& cublaslt = device["cublaslt_version"];
    std::cout << "  " << device["device"].get<std::string>() << ": " << device["name"].get<std::string>()
              << ", compute capability " << device["compute_capability"].get<std::string>() << ", "
              << device["multiprocessors"] << " multiprocessors, "
              << format_bytes(device["memory_bytes"].get<double>()) << "\n    CUDA "
              << device["driver_cuda_version"].get<std::string>() << " (driver), "
              << device["runtime_cuda_version"].get<std::string>() << " (runtime), cuBLASLt "
              << (cublaslt.is_null() ? "not found" : cublaslt.get<std::string>()) << "\n";
    if (device["usable"]) {
      print_choices(device["chosen"], 4);
    } else {
      std::cout << "    not usable: " << device["why_unavailable"].get<std::string>() << "\n";
    }
  }
}

void print_text(const ordered_json& facts) {
  std::cout << "logitless " << facts["version"].get<std::string>()
            << "\n\nBackends, in order of preference\n";
  for (const auto& backend : facts["backends"]) {
    const bool usable = backend["usable"];
    std::cout << "  " << backend["name"].get<std::string>() << ": "
              << (usable ? "usable" : "not usable: " + backend["why_unavailable"].get<std::string>())
              << "\n    " << backend["description"].get<std::string>() << "\n";
  }
  std::cout << "\nChosen for tensors in host memory\n";
  print_choices(facts["chosen"], 2);
  print_cuda(facts);
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
  CLI::App* command = app.add_subcommand(
      "info", "Version, backends, CUDA devices and why each is usable or not, device facts");
  command->footer(
      "\nExamples:\n"
      "  logitless info\n"
      "  logitless --json info | jq .cuda_devices\n"
      "\n"
      "For each dtype it says which kernels compute it and why.\n");
  command->callback([&globals] {
    const ordered_json facts = collect(globals);
    if (globals.json) {
      print_json(facts);
    } else {
      print_text(facts);
    }
  });
}

}  // namespace logitless::cli
