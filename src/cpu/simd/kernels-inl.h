// All kernels of one target, with fp32 units or, with LOGITLESS_BF16_PAIRS, bf16 pairs. Included once per
// target and unit.
// LOGITLESS_UNITS is the namespace of the unit. LOGITLESS_BEFORE_KERNELS and LOGITLESS_AFTER_KERNELS set and
// restore the instruction set.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/divergence.h"
#include "core/row_coefficients.h"
#include "cpu/simd/kernels.h"

#undef LOGITLESS_PORTABLE
#define LOGITLESS_PORTABLE (HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128)

#ifndef LOGITLESS_UNROLL
#define LOGITLESS_UNROLL _Pragma("GCC unroll 16")
#endif

LOGITLESS_BEFORE_KERNELS
namespace logitless::cpu::LOGITLESS_UNITS::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VU = hn::Vec<DU>;

// Each uses what is before it.
// clang-format off
#include "cpu/simd/elements-inl.h"
#include "cpu/simd/exp-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/softmax-inl.h"
#include "cpu/simd/gradient-inl.h"
#include "cpu/simd/sparsification-inl.h"
#include "cpu/simd/log-inl.h"
#include "cpu/simd/divergence-inl.h"
// clang-format on

}  // namespace

// The compiler evaluates it: its code would be of this instruction set, and tables are read on any processor.
consteval Kernels make_kernels(const KernelFacts& facts) {
  const bool agree = facts.mr == kMr && facts.nr == static_cast<int>(2 * hn::MaxLanes(DF())) &&
                     facts.pair == static_cast<int>(kPair);
  if (!agree) throw "KernelFacts say otherwise";  // the compiler rejects it
  Kernels k{facts};
  k.gemm_rows = gemm_rows;
  k.gemm_columns = gemm_columns;
  k.convert_row = convert_row;
  k.pack_transposed = pack_transposed;
  k.pack_interleaved = pack_interleaved;
  k.softmax_strip = softmax_strip;
  k.gradient_strip = gradient_strip;
  k.finish_strip = finish_strip;
  k.add_column_sums = add_column_sums;
  k.store_row = store_row;
  k.exp_row = exp_row;
  k.draw_row = draw_row;
  k.draw_each_row = draw_each_row;
  k.select_row = select_row;
  k.sample_row = sample_row;
  k.add_rows = add_rows;
  k.dot_rows = dot_rows;
  k.divergence = {divergence_sums, divergence_terms, divergence_gradient};
  return k;
}

}  // namespace logitless::cpu::LOGITLESS_UNITS::HWY_NAMESPACE
LOGITLESS_AFTER_KERNELS
