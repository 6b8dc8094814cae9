#pragma once
#include "cuda/rows/device_rows.cuh"
#include "cuda/run/float64/kernels.h"

namespace logitless::cuda::float64 {

struct Logit {
  double z;
  double slope;  // T dz / d(scale * dot + bias), the derivative of the softcap
};

__device__ inline Logit logit(const Inputs& in, double dot, int64_t row, int64_t column) {
  const double bias = in.bias != nullptr ? in.bias_scale * in.bias[column] : 0;
  const double inverse = in.temperature != nullptr ? inverse_temperature(in.temperature[row]) : 1;
  const double z = in.transform.logit(dot, bias, inverse);
  return {z, in.transform.slope(z, inverse)};
}

}  // namespace logitless::cuda::float64
