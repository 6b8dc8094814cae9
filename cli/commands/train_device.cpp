#include "commands/train_device.h"

#include <stdexcept>
#include <vector>

#include "commands/device_option.h"
#include "train/cuda/open.h"

namespace logitless::cli {
namespace {

// The first GPU that the library and the model's kernels can use; else -1, and why.
int first_usable(std::string& why_none) {
  const std::vector<DeviceInfo> known = devices(&why_none);
  for (size_t ordinal = 0; ordinal < known.size(); ++ordinal) {
    std::string why_not = known[ordinal].why_unavailable;
    if (why_not.empty()) why_not = train::why_no_cuda();
    if (why_not.empty()) return static_cast<int>(ordinal);
    if (why_none.empty()) why_none = why_not;
  }
  return -1;
}

TrainDevice on_host(const GlobalOptions& globals, std::string note) {
  return {train::make_host_device(), make_context(globals), {}, std::move(note)};
}

TrainDevice on_cuda(const GlobalOptions& globals, int ordinal) {
  return {train::make_cuda_device(ordinal),
          make_context(globals, {}, {.ordinal = ordinal, .model = {}}),
          "cuda:" + std::to_string(ordinal),
          {}};
}

}  // namespace

TrainDevice open_train_device(const GlobalOptions& globals, const std::string& text) {
  train::set_host_threads(globals.threads);  // beside a GPU, too
  if (text != "auto" && text != "cpu" && !text.starts_with("cuda")) {
    throw UsageError("--device: expected auto, cpu, cuda or cuda:N, got '" + text + "'");
  }
  const std::string backend = globals.backend.substr(0, globals.backend.find(':'));
  if (text == "cpu") {
    parse_device(globals, text);  // refuses a --backend of GPUs
    return on_host(globals, {});
  }
  if (text == "auto" && !backend.empty() && backend != "cuda") return on_host(globals, {});
  if (text != "auto" && text != "cuda") {
    const int ordinal = parse_device(globals, text).ordinal;
    if (const std::string why_not = train::why_no_cuda(); !why_not.empty()) {
      throw std::runtime_error("--device: expected a usable CUDA device, got " + text + ": " + why_not);
    }
    return on_cuda(globals, ordinal);
  }
  if (text == "cuda" && !backend.empty() && backend != "cuda") {
    throw UsageError("--device: expected cpu with --backend " + backend + ", got 'cuda'");
  }
  std::string why_none;
  const int ordinal = first_usable(why_none);
  const bool may_be_host = text == "auto" && backend.empty();
  if (ordinal >= 0) {
    try {
      return on_cuda(globals, ordinal);
    } catch (const std::exception& error) {  // such as a GPU whose memory others hold
      if (!may_be_host) throw;
      why_none = error.what();
    }
  }
  if (may_be_host) return on_host(globals, "no GPU: " + why_none);
  throw std::runtime_error("--device: expected a usable CUDA device, got " + text + ": " + why_none);
}

}  // namespace logitless::cli
