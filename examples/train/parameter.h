#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace logitless::train {

// A learned tensor and the gradient of the last backward call, both row-major fp32.
struct Parameter {
  Parameter(std::string name_, std::vector<int64_t> shape_, bool decays_)
      : name(std::move(name_)), shape(std::move(shape_)), decays(decays_) {
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    value.assign(static_cast<size_t>(count), 0.0F);
    gradient.assign(static_cast<size_t>(count), 0.0F);
  }

  int64_t size() const { return static_cast<int64_t>(value.size()); }

  std::string name;
  std::vector<int64_t> shape;
  bool decays;  // weight decay is for matrices only
  std::vector<float> value;
  std::vector<float> gradient;
};

}  // namespace logitless::train
