#include "commands/device_facts.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string_view>

namespace logitless::cli {
namespace {

constexpr std::array<std::string_view, 20> kFlags{
    "sse4_2",   "avx",      "f16c",     "fma",         "avx2",        "avx_vnni",    "avx512f",
    "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
    "amx_bf16", "asimd",    "asimdhp",  "asimddp",     "bf16",        "sve"};

std::string after_colon(const std::string& line) {
  const size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
  return start == std::string::npos ? "" : line.substr(start);
}

void read_cpuinfo(DeviceFacts& facts) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !(line.empty() && !facts.instruction_sets.empty());) {
    if (facts.processor.empty() && (line.starts_with("model name") || line.starts_with("CPU part"))) {
      facts.processor = after_colon(line);
    } else if (facts.instruction_sets.empty() &&
               (line.starts_with("flags") || line.starts_with("Features"))) {
      std::istringstream words(after_colon(line));
      for (std::string word; words >> word;) {
        if (std::find(kFlags.begin(), kFlags.end(), word) != kFlags.end())
          facts.instruction_sets.push_back(word);
      }
    }
  }
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

void read_caches(DeviceFacts& facts) {
  constexpr int kMaxCaches = 16;
  for (int i = 0; i < kMaxCaches; ++i) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    const std::string size = first_line(folder + "size");  // such as "32K"
    if (size.empty()) break;
    CacheFacts cache;
    std::istringstream(first_line(folder + "level")) >> cache.level;
    cache.type = first_line(folder + "type");
    std::istringstream(size) >> cache.bytes;
    cache.bytes *= size.back() == 'K' ? 1024 : size.back() == 'M' ? 1024 * 1024 : 1;
    facts.caches.push_back(cache);
  }
}

void read_memory(DeviceFacts& facts) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    int64_t kib = 0;
    if (!(std::istringstream(after_colon(line)) >> kib)) continue;
    if (line.starts_with("MemTotal:")) facts.memory_bytes = kib * 1024;
    if (line.starts_with("MemAvailable:")) facts.memory_available_bytes = kib * 1024;
  }
}

}  // namespace

DeviceFacts read_device_facts() {
  DeviceFacts facts;
  read_cpuinfo(facts);
  read_caches(facts);
  read_memory(facts);
  facts.processors_online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) facts.processors_usable = CPU_COUNT(&set);
  return facts;
}

}  // namespace logitless::cli
