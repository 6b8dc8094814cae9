// fp32 kernels for every target that Highway compiles here. A machine with none of these runs "portable".
#ifdef LOGITLESS_NO_AVX512  // fewer targets compile faster, for tests
#define HWY_DISABLED_TARGETS (~(HWY_AVX2 | HWY_NEON | HWY_EMU128 | HWY_SCALAR))
#else
#define HWY_DISABLED_TARGETS (~(HWY_AVX3 | HWY_AVX2 | HWY_NEON | HWY_EMU128 | HWY_SCALAR))
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/fp32_kernels.cpp"
#include <hwy/foreach_target.h>

#undef LOGITLESS_UNITS
#undef LOGITLESS_BF16_PAIRS
#undef LOGITLESS_BEFORE_KERNELS
#undef LOGITLESS_AFTER_KERNELS
#define LOGITLESS_UNITS fp32_units
#define LOGITLESS_BF16_PAIRS 0
#define LOGITLESS_BEFORE_KERNELS HWY_BEFORE_NAMESPACE();
#define LOGITLESS_AFTER_KERNELS HWY_AFTER_NAMESPACE();
#include "cpu/simd/kernels-inl.h"

#if HWY_ONCE
namespace logitless::cpu {

std::span<const Kernels> fp32_kernels() {
  static constexpr Kernels kKernels[] = {
#if HWY_TARGETS & HWY_AVX3
    fp32_units::N_AVX3::make_kernels(kAvx512),
#endif
#if HWY_TARGETS & HWY_AVX2
    fp32_units::N_AVX2::make_kernels(kAvx2),
#endif
#if HWY_TARGETS & HWY_NEON
    fp32_units::N_NEON::make_kernels(kNeon),
#endif
#if HWY_TARGETS & HWY_EMU128
    fp32_units::N_EMU128::make_kernels(kPortable),
#endif
#if HWY_TARGETS & HWY_SCALAR
    fp32_units::N_SCALAR::make_kernels(kScalar),
#endif
  };
  return kKernels;
}

}  // namespace logitless::cpu
#endif
