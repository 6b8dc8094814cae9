#pragma once
// Stands in for the library's header of this name, whose comment says which lane holds what. Lanes exchange
// their fragments.
#include "core/dtype.h"
#include "language.h"

namespace logitless::cuda::mma::ptx {

template <DType kType>
float half_of(uint32_t packed, int which) {
  const auto bits = static_cast<unsigned short>(packed >> (16 * which));
  if constexpr (kType == DType::kBF16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  return __half2float(__ushort_as_half(bits));
}

template <DType kType>
void multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const cuda_on_cpu::Lanes& lanes = cuda_on_cpu::exchange_words(mine, 6);
  const int lane = cuda_on_cpu::lane_of_warp(), g = lane / 4, q = lane % 4;
  float sums[4] = {};
  for (int k = 0; k < 16; ++k) {
    const int upper = k / 8, pair = k % 8 / 2, which = k % 2;
    const uint32_t* row = lanes.words[4 * g + pair];
    const float low = half_of<kType>(row[2 * upper], which), high = half_of<kType>(row[2 * upper + 1], which);
    for (int b = 0; b < 2; ++b) {
      const float factor = half_of<kType>(lanes.words[4 * (2 * q + b) + pair][4 + upper], which);
      sums[b] += low * factor;
      sums[2 + b] += high * factor;
    }
  }
  for (int i = 0; i < 4; ++i) d[i] += sums[i];
}

}  // namespace logitless::cuda::mma::ptx
