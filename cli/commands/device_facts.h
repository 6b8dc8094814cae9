#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace logitless::cli {

struct CacheFacts {
  int level = 0;
  std::string type;  // "Data", "Instruction" or "Unified"
  int64_t bytes = 0;
};

// What the operating system says about the machine; empty or 0 where it says nothing.
struct DeviceFacts {
  std::string processor;
  std::vector<std::string> instruction_sets;  // those that matter to a matrix product
  int processors_online = 0;
  int processors_usable = 0;  // by this process (affinity)
  std::vector<CacheFacts> caches;
  int64_t memory_bytes = 0;
  int64_t memory_available_bytes = 0;
};

DeviceFacts read_device_facts();

}  // namespace logitless::cli
