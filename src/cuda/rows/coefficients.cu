#include "cuda/check.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/sm90/anchor.h"
#include "cuda/sm90/ptx/math.cuh"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float at_or(const float* data, int64_t index, float otherwise) {
  return data != nullptr ? data[index] : otherwise;
}

__global__ void coefficients_kernel(RowInputs in, Arena arena, Coefficients k) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= existing(k.row_count, k.rows)) return;
  if (arena.target[k.first + r] == kIgnoredRow) {
    arena.lse[r] = arena.lse_low[r] = arena.a[r] = arena.g[r] = 0;
    if (arena.b != nullptr) arena.b[r] = 0;
    if (arena.c != nullptr) arena.c[r] = 0;
    return;
  }
  const int64_t row = arena.row_map[k.first + r];
  const int64_t target = target_of(in, row);
  RowUpstream<double> upstream;
  upstream.loss = double{at_or(k.grad_loss, in.is_none ? row : 0, 1)} / arena.scalars->divisor;
  upstream.nll = at_or(k.grad_nll, row, 0);
  upstream.lse = at_or(k.grad_lse, row, 0);
  upstream.entropy = at_or(k.grad_entropy, row, 0);
  if (k.known_lse != nullptr) {
    arena.lse[r] = k.known_lse[row];
    arena.lse_low[r] = at_or(k.known_lse_low, row, 0);
  }
  const RowCoefficients<double> c =
      row_coefficients(loss_params(in, *arena.scalars), weights_of(in, row, target), upstream,
                       double{arena.lse[r]} + double{arena.lse_low[r]}, double{at_or(k.entropy, row, 0)});
  arena.a[r] = static_cast<float>(c.a * k.scale);
  arena.g[r] = static_cast<float>(c.g * k.scale);
  if (arena.b != nullptr) arena.b[r] = static_cast<float>(c.b * k.scale);
  if (arena.c != nullptr) arena.c[r] = static_cast<float>(c.c * k.scale);
  if (k.scale_dz) {
    const float largest =
        fmaxf(fmaxf(fabsf(arena.a[r]), fabsf(arena.g[r])), static_cast<float>(fabs(c.b * k.scale)));
    if (largest < CUDART_INF_F) atomicMax(&arena.scalars->dz_max, __float_as_uint(largest));
  }
}

// A mean's 1 / N in every dz would be rounded the same way everywhere, an error that no sum averages out, and
// fp16 would flush it: so stored dz are p - [j = y] where all coefficients are alike, and products take the
// factor.
__global__ void dz_scale_kernel(Scalars* scalars) {
  const float largest = __uint_as_float(scalars->dz_max);
  if (!(largest > 1e-30f && largest < 1e30f)) return;
  scalars->dz_scale = 1 / largest;
  scalars->dz_unscale = largest;
}

__global__ void correct_targets_kernel(RowInputs in, Arena arena, CorrectTargets k) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= existing(k.row_count, k.rows)) return;
  float a = arena.a[r];
  const float g = arena.g[r];
  // Then only the target has a gradient, and its entry is large instead.
  if (a == 0 && arena.target[k.first + r] < k.columns) a = 1e-20f * g;
  const float unit = k.base_2 ? ldexpf(1, sm90::kKeptExponent) : 1.0f;
  const float sum = arena.row_factor[r] * unit;
  arena.row_factor[r] = a / sum;
  const int32_t column = arena.target[k.first + r];
  if (column < 0 || column >= k.columns) return;
  const float z = arena.target_logit[r], anchor = arena.anchor[r];
  // As the kernel computed it: with no other column, it is the sum to the last bit.
  float exp_z = z == anchor ? 1.0f : expf(z - anchor);
  if (k.base_2) {
    const sm90::SplitAnchor split = sm90::split_anchor(anchor);
    exp_z = unit * sm90::ptx::exp2_approx(fmaf(z - split.far, sm90::kLog2E, split.shift));
  }
  double entry = a == 0 ? 0 : double{exp_z} - double{g} / double{a} * double{sum};
  if (k.softcap != 0) entry *= 1 - double{z / k.softcap} * double{z / k.softcap};
  const int64_t index = r * k.stride + column;
  if (k.wide) {
    static_cast<float*>(k.exps)[index] = static_cast<float>(entry);
    return;
  }
  const __nv_bfloat16 stored = __float2bfloat16_rn(static_cast<float>(entry));
  static_cast<__nv_bfloat16*>(k.exps)[index] = stored;
  // The target's entry is most of what many rows' gradients are made of. The row's factor makes it right, and
  // so moves the other entries by no more than each of them has been rounded.
  const double share = entry / double{__bfloat162float(stored)};
  if (fabs(share - 1) <= 0x1p-8)
    arena.row_factor[r] = static_cast<float>(double{arena.row_factor[r]} * share);
}

}  // namespace

void launch_coefficients(const RowInputs& in, const Arena& arena, const Coefficients& c,
                         cudaStream_t stream) {
  coefficients_kernel<<<blocks_for(c.rows, kThreads), kThreads, 0, stream>>>(in, arena, c);
  check_launch("coefficients");
  if (!c.scale_dz) return;
  dz_scale_kernel<<<1, 1, 0, stream>>>(arena.scalars);
  check_launch("dz_scale");
}

void launch_correct_targets(const RowInputs& in, const Arena& arena, const CorrectTargets& c,
                            cudaStream_t stream) {
  correct_targets_kernel<<<blocks_for(c.rows, kThreads), kThreads, 0, stream>>>(in, arena, c);
  check_launch("correct_targets");
}

}  // namespace headroom::cuda
