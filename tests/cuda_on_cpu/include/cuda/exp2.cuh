#pragma once
// In the place of the library's header of this name, which has one instruction of a GPU.
#include <cfloat>
#include <cmath>

namespace headroom::cuda {

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < FLT_MIN ? 0.0f : y;
}

}  // namespace headroom::cuda
