// bf16 kernels for processors with AVX-512 and its bf16 dot product.
#define HWY_DISABLED_TARGETS (~(HWY_AVX3 | HWY_NEON | HWY_EMU128 | HWY_SCALAR))
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd/bf16_kernels.cpp"
#include <hwy/foreach_target.h>

#include "cpu/simd/kernels.h"

// clang 16 crashes when it optimizes these kernels; without them bf16 runs on the fp32 kernels.
#if defined(__clang__) && __clang_major__ < 17
#define LOGITLESS_COMPILES_BF16_PAIRS 0
#else
#define LOGITLESS_COMPILES_BF16_PAIRS 1
#endif

#if HWY_TARGET == HWY_AVX3 && LOGITLESS_COMPILES_BF16_PAIRS
#define LOGITLESS_UNITS bf16_pairs
#define LOGITLESS_BF16_PAIRS 1
#define LOGITLESS_BEFORE_KERNELS HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
#define LOGITLESS_AFTER_KERNELS HWY_POP_ATTRIBUTES
#include "cpu/simd/kernels-inl.h"
#endif

#if HWY_ONCE
namespace logitless::cpu {

const Kernels* bf16_pair_kernels() {
#if (HWY_TARGETS & HWY_AVX3) && LOGITLESS_COMPILES_BF16_PAIRS
  static constexpr Kernels kKernels = bf16_pairs::N_AVX3::make_kernels(kAvx512Bf16);
  return &kKernels;
#else
  return nullptr;
#endif
}

}  // namespace logitless::cpu
#endif
