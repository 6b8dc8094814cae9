#include "cuda/device_models.h"

#include <vector>

namespace headroom::cuda {
namespace {

struct Model {
  const char* short_name;
  Device device;
};

Device make(const char* name, int capability, int processors, uint64_t gigabytes) {
  Device device;
  device.ordinal = -1;
  device.name = name;
  device.capability = capability;
  device.processors = processors;
  device.memory_bytes = gigabytes * 1000000000;
  return device;
}

// Of the vendor's data sheets.
const std::vector<Model>& models() {
  static const std::vector<Model> known{{"a100", make("NVIDIA A100 80GB", 80, 108, 80)},
                                        {"h100", make("NVIDIA H100 SXM", 90, 132, 80)},
                                        {"h200", make("NVIDIA H200", 90, 132, 141)}};
  return known;
}

}  // namespace

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

}  // namespace headroom::cuda
