#pragma once
#include "core/host_device.h"

namespace headroom::cuda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

// What the exps are relative to: the kernels compute exp2(z log2(e) + shift) with shift = -anchor log2(e),
// whose rounding moves the anchor by up to 2^-24 of itself, for all elements of a row alike.
HEADROOM_HD inline double effective_anchor(float anchor) {
  const float shift = anchor * kLog2E;
  return static_cast<double>(shift) / static_cast<double>(kLog2E);
}

}  // namespace headroom::cuda::sm90
