#pragma once
#include <cmath>

#include "core/host_device.h"

namespace logitless::cuda {

// Returns 1 / cap (0 for no softcap), rounded so that cap times it is at least 1. A saturated logit, |z| =
// cap, then has the slope 0, not the rounding error of 1 - 1.
LOGITLESS_HD inline float inverse_softcap(float cap) {
  if (cap == 0) return 0;
  const float inverse = 1 / cap;
  return cap * inverse < 1 ? inverse * (1 + 0x1p-23f) : inverse;
}

// Derivative of t at the transformed logit.
LOGITLESS_HD inline float softcap_slope(float z, float inverse_cap) {
  const float ratio = z * inverse_cap;
#ifdef __CUDA_ARCH__
  return __saturatef(std::fma(-ratio, ratio, 1.0f));
#else
  return std::fmax(std::fma(-ratio, ratio, 1.0f), 0.0f);
#endif
}

}  // namespace logitless::cuda
