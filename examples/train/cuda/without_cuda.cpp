#include <stdexcept>

#include "train/cuda/open.h"

namespace logitless::train {

std::string why_no_cuda() {
  return "this build has no CUDA backend";
}

std::unique_ptr<Device> make_cuda_device(int /*ordinal*/) {
  throw std::runtime_error("train: " + why_no_cuda());
}

}  // namespace logitless::train
