#include "cuda/rows/finish_row.cuh"

namespace logitless::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// Finds the factor of stored dz. A mean's 1 / N in every dz would be rounded the same way everywhere. No sum
// averages out such an error, and fp16 would flush the values to 0. So if all coefficients are equal, the
// stored dz are p - [j = y], and products apply the factor.
__device__ void set_dz_scale(Scalars* scalars) {
  const float largest = __uint_as_float(__ldcg(&scalars->dz_max));
  if (!(largest > 1e-30f && largest < 1e30f)) return;
  scalars->dz_scale = 1 / largest;
  scalars->dz_unscale = largest;
}

// Called by one block, when the losses of all rows are there.
template <class Real>
__device__ void reduce_loss(const RowTargets& in, const ArenaOf<Real>& arena, const Buffers& out) {
  const Scalars& s = *arena.scalars;
  const int64_t rows = s.row_count;
  double sum = 0;
#pragma unroll 8
  for (int64_t r = threadIdx.x; r < rows; r += kThreads) sum += __ldcg(arena.row_loss + r);
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x != 0) return;
  if (!in.is_none) store_if<Real>(out.loss, 0, s.invalid_count > 0 ? CUDART_NAN : sum / s.divisor);
  if (out.correct_count != nullptr) *out.correct_count = static_cast<int64_t>(__ldcg(&s.correct_count));
}

template <class T>
__device__ void scale_row(const CachedExpLogits& k, int64_t r, float factor, int lane) {
  constexpr int kLanes = 16 / sizeof(T);
  struct alignas(16) Piece {
    T x[kLanes];
  };
  T* row = k.hidden.row<T>(r);
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0 || k.depth % kLanes != 0) {
    for (int64_t i = lane; i < k.depth; i += 32) row[i] = from_float<T>(to_float(row[i]) * factor);
    return;
  }
#pragma unroll 4
  for (int64_t i = int64_t{lane} * kLanes; i < k.depth; i += 32 * kLanes) {
    Piece piece = *reinterpret_cast<const Piece*>(row + i);
#pragma unroll
    for (int j = 0; j < kLanes; ++j) piece.x[j] = from_float<T>(to_float(piece.x[j]) * factor);
    *reinterpret_cast<Piece*>(row + i) = piece;
  }
}

// One warp for each row. T: the type of operands if exp logits are kept, and double for float64.
template <class T, class Real = RealOf<T>>
__global__ void __launch_bounds__(kThreads)
    finish_chunk_kernel(RowInputsOf<Real> in, ArenaOf<Real> arena, Buffers out, FinishChunkOf<Real> f) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r < existing(f.row_count, f.rows)) {
    if (f.stats.wanted) {
      finish_row(in, arena, out, f.stats, r, f.first + r, lane);
      store_target_log_probs(in, arena, out, r, f.first + r, lane);
    }
    float factor = 0;
    if (lane == 0 && f.coefficients.wanted) load_coefficients(in, arena, f.coefficients, r, f.first + r);
    if constexpr (!std::is_same_v<T, double>) {
      if (lane == 0 && f.kept.exp_logits.data != nullptr)
        factor = correct_target<T>(in, arena, f.kept, r, f.first + r);
      if (f.kept.hidden.data != nullptr) scale_row<T>(f.kept, r, __shfl_sync(~0u, factor, 0), lane);
    }
  }
  if (!f.stats.writes_loss && !f.coefficients.scale_dz) return;
  if (!is_last_block(&arena.scalars->passed)) return;
  if (f.coefficients.scale_dz && threadIdx.x == 0) set_dz_scale(arena.scalars);
  if (f.stats.writes_loss) reduce_loss(in, arena, out);
}

}  // namespace

template <class Real>
void launch_finish_chunk(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, const Buffers& out,
                         const FinishChunkOf<Real>& f, const Queue& queue) {
  auto kernel = finish_chunk_kernel<Real>;
  if constexpr (std::is_same_v<Real, float>) {
    if (f.kept.exp_logits.dtype != DType::kF32) kernel = finish_chunk_kernel<__nv_bfloat16>;
  }
  queue.launch("finish_chunk", kernel, blocks_for(f.rows, kWarps), kThreads, 0, in, arena, out, f);
}
template void launch_finish_chunk(const RowInputs&, const Arena&, const Buffers&, const FinishChunk&,
                                  const Queue&);
template void launch_finish_chunk(const RowInputsOf<double>&, const ArenaOf<double>&, const Buffers&,
                                  const FinishChunkOf<double>&, const Queue&);

}  // namespace logitless::cuda
