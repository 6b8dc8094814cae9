#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "train/parameter.h"

namespace logitless::train {

// All parameters of a model, and `hidden` [N, D] and `targets` [N] of one batch, in a safetensors file.
// hidden, lm_head.weight and targets are what `logitless loss` needs.
void write_checkpoint(const std::filesystem::path& path, const std::vector<Parameter>& parameters,
                      std::span<const float> hidden, std::span<const int32_t> targets,
                      const std::map<std::string, std::string>& metadata);

}  // namespace logitless::train
