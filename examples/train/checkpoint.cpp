#include "train/checkpoint.h"

#include "io/safetensors_writer.h"

namespace logitless::train {

void write_checkpoint(const std::filesystem::path& path, const std::vector<Parameter>& parameters,
                      std::span<const float> hidden, std::span<const int32_t> targets,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<cli::TensorToWrite> tensors;
  tensors.reserve(parameters.size() + 2);
  for (const Parameter& parameter : parameters) {
    tensors.push_back(
        {parameter.name, cli::ElementType::kF32, parameter.shape, std::as_bytes(std::span(parameter.value))});
  }
  const auto tokens = static_cast<int64_t>(targets.size());
  const auto dim = static_cast<int64_t>(hidden.size()) / tokens;
  tensors.push_back({"hidden", cli::ElementType::kF32, {tokens, dim}, std::as_bytes(hidden)});
  tensors.push_back({"targets", cli::ElementType::kI32, {tokens}, std::as_bytes(targets)});
  cli::write_safetensors(path.string(), tensors, metadata);
}

}  // namespace logitless::train
