#include "train/checkpoint.h"

#include <vector>

#include "io/safetensors_writer.h"

namespace headroom::train {

void write_checkpoint(const std::filesystem::path& path, const Model& model, std::span<const float> hidden,
                      std::span<const int32_t> targets, const std::map<std::string, std::string>& metadata) {
  std::vector<cli::TensorToWrite> tensors;
  for (const Parameter& parameter : model.parameters()) {
    tensors.push_back(
        {parameter.name, cli::ElementType::kF32, parameter.shape, std::as_bytes(std::span(parameter.value))});
  }
  const auto tokens = static_cast<int64_t>(targets.size());
  tensors.push_back({"hidden", cli::ElementType::kF32, {tokens, model.config().dim}, std::as_bytes(hidden)});
  tensors.push_back({"targets", cli::ElementType::kI32, {tokens}, std::as_bytes(targets)});
  cli::write_safetensors(path.string(), tensors, metadata);
}

}  // namespace headroom::train
