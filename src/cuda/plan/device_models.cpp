#include "cuda/plan/device_models.h"

#include <vector>

namespace logitless::cuda {
namespace {

struct Model {
  const char* short_name;
  const char* word;  // of the name that a driver reports
  Device device;
};

struct Facts {
  int capability, processors;
  double gigabytes;
  int shared_kilobytes;  // of a thread block
  int l2_megabytes;
  double teraflops;  // dense, 16-bit operands, sums in float32
  double gigabytes_per_second;
};

Device make(const char* name, const Facts& facts) {
  Device device;
  device.ordinal = -1;
  device.name = name;
  device.capability = facts.capability;
  device.processors = facts.processors;
  device.memory_bytes = static_cast<uint64_t>(facts.gigabytes * 1e9);
  device.shared_bytes = int64_t{facts.shared_kilobytes} << 10;
  device.l2_bytes = int64_t{facts.l2_megabytes} << 20;
  device.flops = facts.teraflops * 1e12;
  device.bytes_per_second = facts.gigabytes_per_second * 1e9;
  return device;
}

// All sources are the vendor's unless noted. Data sheets: "A100 80GB" (SXM), "A10", "L40S", "H100" and "H200"
// (SXM), "HGX B200". The 148 multiprocessors and 126 MB of L2 of a B200 are as a device reports them:
// github.com/pytorch/ao, pull request 4002.
// White papers on GA102, Ada and RTX Blackwell: the L2 of A10, L40S, RTX 4090 and RTX 5090, and the rates of
// the last two. Their rates with sums in float32 are half of those with sums in float16. Shared memory: "CUDA
// Programming Guide", technical specifications by compute capability.
const std::vector<Model>& models() {
  static const std::vector<Model> known{
      {"a100", "A100", make("NVIDIA A100 80GB", {80, 108, 80, 163, 40, 312, 2039})},
      {"a10", "A10", make("NVIDIA A10", {86, 72, 24, 99, 6, 125, 600})},
      {"l40s", "L40S", make("NVIDIA L40S", {89, 142, 48, 99, 96, 362.05, 864})},
      {"rtx-4090", "RTX 4090", make("NVIDIA GeForce RTX 4090", {89, 128, 24, 99, 72, 165.2, 1008})},
      {"rtx-5090", "RTX 5090", make("NVIDIA GeForce RTX 5090", {120, 170, 32, 99, 96, 209.5, 1792})},
      {"h100", "H100", make("NVIDIA H100 SXM", {90, 132, 80, 227, 50, 989.5, 3350})},
      {"h200", "H200", make("NVIDIA H200", {90, 132, 141, 227, 50, 989.5, 4800})},
      {"b200", "B200", make("NVIDIA B200", {100, 148, 180, 227, 126, 2250, 8000})}};
  return known;
}

}  // namespace

void add_rates(Device& device) {
  const auto is_word = [&](const std::string& word) {
    const size_t at = device.name.find(word);
    if (at == std::string::npos) return false;
    const size_t end = at + word.size();
    return end == device.name.size() || device.name[end] == ' ' || device.name[end] == '-';
  };
  for (const Model& model : models()) {
    const double memory =
        static_cast<double>(device.memory_bytes) / static_cast<double>(model.device.memory_bytes);
    if (!is_word(model.word) || device.capability != model.device.capability ||
        device.processors != model.device.processors || memory < 0.85 || memory > 1.15)
      continue;
    device.flops = model.device.flops;
    device.bytes_per_second = model.device.bytes_per_second;
  }
}

const Device* device_model(const std::string& name) {
  for (const Model& model : models()) {
    if (name == model.short_name) return &model.device;
  }
  return nullptr;
}

std::string known_models() {
  std::string names;
  for (const Model& model : models()) names += (names.empty() ? "" : ", ") + std::string(model.short_name);
  return names;
}

}  // namespace logitless::cuda
