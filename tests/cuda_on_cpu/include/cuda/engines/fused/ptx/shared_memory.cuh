#pragma once
// Stands in for the library's header of this name. Addresses are offsets in the block's dynamic shared
// memory.
#include "language.h"

namespace logitless::cuda::fused::ptx {

inline uint32_t dynamic_shared_address() {
  return 0;
}

template <class T>
void store_at(uint32_t address, const T& value) {
  std::memcpy(cuda_on_cpu::shared_at(address, sizeof value), &value, sizeof value);
}
template <class T>
T load_at(uint32_t address) {
  T value;
  std::memcpy(&value, cuda_on_cpu::shared_at(address, sizeof value), sizeof value);
  return value;
}

inline void store_shared(uint32_t address, int a, int b, int c, int d) {
  store_at(address, make_int4(a, b, c, d));
}
inline void store_shared(uint32_t address, float value) {
  store_at(address, value);
}
inline void store_shared(uint32_t address, float4 value) {
  store_at(address, value);
}
inline void store_shared(uint32_t address, uint32_t value) {
  store_at(address, value);
}
inline int load_shared_int(uint32_t address) {
  return load_at<int>(address);
}
inline float load_shared_float(uint32_t address) {
  return load_at<float>(address);
}
inline float4 load_shared_float4(uint32_t address) {
  return load_at<float4>(address);
}
inline uint4 load_shared_uint4(uint32_t address) {
  return load_at<uint4>(address);
}
inline int4 load_shared_int4(uint32_t address) {
  return load_at<int4>(address);
}

}  // namespace logitless::cuda::fused::ptx
