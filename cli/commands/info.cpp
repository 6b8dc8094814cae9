#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string_view>

#include "commands/options.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

// Instruction sets that matter to a matrix product.
constexpr std::array<std::string_view, 20> kFlags{
    "sse4_2",   "avx",      "f16c",     "fma",         "avx2",        "avx_vnni",    "avx512f",
    "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_bf16", "asimd",    "asimdhp",  "asimddp",     "bf16",        "sve"};

std::string after_colon(const std::string& line) {
  const size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
  return start == std::string::npos ? "" : line.substr(start);
}

// Returns the first line of a file, or what follows the colon in the first line with one of these beginnings;
// empty without such a line.
std::string find_line(const std::string& path, std::initializer_list<const char*> beginnings = {}) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (beginnings.size() == 0) return line;
    for (const char* beginning : beginnings) {
      if (line.starts_with(beginning)) return after_colon(line);
    }
  }
  return "";
}

// Reads "32K", "1024 kB" or a plain number; returns 0 for anything else.
int64_t bytes_in(const std::string& size) {
  int64_t bytes = 0;
  std::string unit;
  std::istringstream(size) >> bytes >> unit;
  return bytes * (unit == "K" || unit == "kB" ? 1024 : unit == "M" ? 1024 * 1024 : 1);
}

// Describes the machine as the operating system does; unknown facts are empty or 0.
ordered_json device_facts() {
  ordered_json flags = ordered_json::array();
  std::istringstream words(find_line("/proc/cpuinfo", {"flags", "Features"}));
  for (std::string word; words >> word;) {
    if (std::find(kFlags.begin(), kFlags.end(), word) != kFlags.end()) flags.push_back(word);
  }
  ordered_json caches = ordered_json::array();
  constexpr int kMaxCaches = 16;
  for (int i = 0; i < kMaxCaches; ++i) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    const std::string size = find_line(folder + "size");
    if (size.empty()) break;
    caches.push_back({{"level", bytes_in(find_line(folder + "level"))},
                      {"type", find_line(folder + "type")},
                      {"bytes", bytes_in(size)}});
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool is_known = ::sched_getaffinity(0, sizeof set, &set) == 0;
  return {{"processor", find_line("/proc/cpuinfo", {"model name", "CPU part"})},
          {"instruction_sets", flags},
          {"processors_online", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"processors_usable", is_known ? CPU_COUNT(&set) : 0},
          {"caches", caches},
          {"memory_bytes", bytes_in(find_line("/proc/meminfo", {"MemTotal:"}))},
          {"memory_available_bytes", bytes_in(find_line("/proc/meminfo", {"MemAvailable:"}))}};
}

// Returns backend, engine and the reason for a problem of this dtype in this memory; only a reason if nothing
// can run it.
ordered_json choice_for(const GlobalOptions& globals, int device, logitless_dtype dtype) {
  Problem problem;
  problem.tokens = problem.vocab = problem.hidden = 256;
  problem.dtype.hidden = problem.dtype.weight = dtype;
  try {
    const PlanInfo info = Plan(make_context(globals, {}, {.ordinal = device, .model = {}}), problem).info();
    return {{"backend", info.backend}, {"engine", info.engine}, {"reason", info.reason}};
  } catch (const Error& error) {
    if (error.argument == "backend") throw;  // --backend names no backend
    return {{"backend", nullptr}, {"engine", nullptr}, {"reason", error.what()}};
  }
}

// Returns the choice for each dtype of hidden and weight.
ordered_json choices(const GlobalOptions& globals, int device) {
  return {{"float32", choice_for(globals, device, LOGITLESS_F32)},
          {"bfloat16", choice_for(globals, device, LOGITLESS_BF16)},
          {"float16", choice_for(globals, device, LOGITLESS_F16)},
          {"float64", choice_for(globals, device, LOGITLESS_F64)}};
}

std::string cuda_version(int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Converts cuBLASLt's own version numbers: 130002 is 13.0.2.
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
                    {"device_record", device.record},
                    {"chosen", choices(globals, ordinal)}});
  }
  return list;
}

ordered_json collect(const GlobalOptions& globals) {
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
          {"device", device_facts()}};
}

}  // namespace

void add_info_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("info", "Show the version, the backends and devices, which are usable, and why");
  command->footer(
      "\nExamples:\n"
      "  logitless info\n"
      "  logitless --json info | jq .cuda_devices\n"
      "\n"
      "For each dtype it shows the kernels that are chosen, with the reason.\n");
  command->callback([&globals] { print_report(collect(globals), globals.json); });
}

}  // namespace logitless::cli
