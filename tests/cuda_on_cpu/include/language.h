#pragma once
// CUDA's additions to C++, for a compiler that does not know them. Without nvcc, CUDA's headers define
// attributes of functions as nothing, and types, bf16 and fp16 are usable.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../grid.h"

#undef __shared__
#define __shared__ static thread_local
#undef __global__
#define __global__ inline
#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#ifndef __grid_constant__
#define __grid_constant__
#endif

extern thread_local constinit uint3 threadIdx LOGITLESS_INITIAL_EXEC;
extern thread_local constinit uint3 blockIdx LOGITLESS_INITIAL_EXEC;
extern thread_local constinit dim3 blockDim LOGITLESS_INITIAL_EXEC;
extern thread_local constinit dim3 gridDim LOGITLESS_INITIAL_EXEC;
inline constexpr int warpSize = 32;

// Barriers.
inline void __syncthreads() {
  cuda_on_cpu::wait_for_block();
}
inline int __syncthreads_or(int value) {
  return cuda_on_cpu::any_of_block(value);
}
inline void __syncwarp(unsigned mask = 0xffffffff) {
  cuda_on_cpu::exchange(mask, 0);
}
inline void __threadfence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Warps.
namespace cuda_on_cpu {
template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// The value of the lane that find(lane, first lane of its part, width) names, or the lane's own where that is
// outside its part.
template <class T, class Find>
T shuffled(unsigned mask, T value, int width, Find find) {
  const Lanes& lanes = exchange(mask, bits_of(value));
  const int lane = lane_of_warp(), first = lane / width * width;
  const int from = find(lane, first);
  if (from < first || from >= first + width) return value;
  if ((mask >> from & 1) == 0) fail("a shuffle reads a lane that is not in the mask");
  return value_of<T>(lanes.value[from]);
}
template <class T, class Join>
T joined(unsigned mask, T value, Join join) {
  const Lanes& lanes = exchange(mask, bits_of(value));
  bool any = false;
  T all{};
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const T one = value_of<T>(lanes.value[lane]);
    all = any ? join(all, one) : one;
    any = true;
  }
  return all;
}
}  // namespace cuda_on_cpu

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return cuda_on_cpu::shuffled(mask, value, width,
                               [&](int, int first) { return first + (from & (width - 1)); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32) {
  return cuda_on_cpu::shuffled(mask, value, width, [&](int lane, int) { return lane ^ by; });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return cuda_on_cpu::shuffled(mask, value, width,
                               [&](int lane, int) { return lane + static_cast<int>(by); });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return cuda_on_cpu::shuffled(mask, value, width,
                               [&](int lane, int) { return lane - static_cast<int>(by); });
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  const cuda_on_cpu::Lanes& lanes = cuda_on_cpu::exchange(mask, value != 0);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && lanes.value[lane] != 0) votes |= 1u << lane;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int value) {
  return __ballot_sync(mask, value) != 0;
}
inline int __all_sync(unsigned mask, int value) {
  return __ballot_sync(mask, value) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const cuda_on_cpu::Lanes& lanes = cuda_on_cpu::exchange(mask, cuda_on_cpu::bits_of(value));
  unsigned equal = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && lanes.value[lane] == cuda_on_cpu::bits_of(value)) equal |= 1u << lane;
  }
  return equal;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return cuda_on_cpu::joined(mask, value, [](T a, T b) { return a + b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return cuda_on_cpu::joined(mask, value, [](unsigned a, unsigned b) { return a | b; });
}

// Atomics.
template <class T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_add(value);
}
template <class T>
T atomicSub(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_sub(value);
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*at).fetch_or(value);
}
namespace cuda_on_cpu {
template <class T, class Change>
T changed(T* at, Change change) {
  std::atomic_ref<T> place(*at);
  T before = place.load();
  while (!place.compare_exchange_weak(before, change(before))) {
  }
  return before;
}
}  // namespace cuda_on_cpu
template <class T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  return cuda_on_cpu::changed(at, [&](T before) { return std::min(before, value); });
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  return cuda_on_cpu::changed(at, [&](T before) { return std::max(before, value); });
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  return cuda_on_cpu::changed(at, [&](unsigned before) { return before >= last ? 0u : before + 1; });
}

// Memory.
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, std::type_identity_t<T> value) {
  *at = value;
}
template <class T>
void __stcg(T* at, std::type_identity_t<T> value) {
  *at = value;
}

// Arithmetic.
using std::isfinite;
using std::isinf;
using std::isnan;
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmin(a, b);
  return static_cast<std::common_type_t<A, B>>(b) < static_cast<std::common_type_t<A, B>>(a) ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmax(a, b);
  return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? b : a;
}
inline int __popc(unsigned bits) {
  return std::popcount(bits);
}
inline int __popcll(unsigned long long bits) {
  return std::popcount(bits);
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline int __ffsll(long long bits) {
  return __builtin_ffsll(bits);
}
inline int __clz(int bits) {
  return std::countl_zero(static_cast<unsigned>(bits));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (by & 31));
}
inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline unsigned __float_as_uint(float value) {
  return std::bit_cast<unsigned>(value);
}
inline float __int_as_float(int bits) {
  return std::bit_cast<float>(bits);
}
inline int __float_as_int(float value) {
  return std::bit_cast<int>(value);
}
inline double __longlong_as_double(long long bits) {
  return std::bit_cast<double>(bits);
}
inline long long __double_as_longlong(double value) {
  return std::bit_cast<long long>(value);
}
inline float __saturatef(float value) {
  return value > 0 ? std::fmin(value, 1.0f) : 0.0f;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
[[noreturn]] inline void __trap() {
  cuda_on_cpu::fail("__trap()");
}
