#include "core/status.h"
#include "cuda/engines/portable/launch.h"

#include <algorithm>

#include "cuda/engines/portable/draw_kernel.cuh"
#include "cuda/engines/portable/row_kernels.cuh"
#include "cuda/engines/portable/sample_kernel.cuh"
#include "cuda/engines/portable/top_kernel.cuh"
#include "cuda/plan/plan_detail.h"
#include "cuda/plan/sizes.h"
#include "cuda/rows/rows.h"
#include "cuda/runtime/gemm.h"
#include "cuda/runtime/overlap.h"

namespace logitless::cuda::portable {
namespace {

// The part of the arguments that one block of logits uses.
template <class Real>
Tile<Real> tile_of(const LogitsProductOf<Real>& product, const LogitsScratch& scratch, int64_t row,
                   int64_t column) {
  Tile<Real> t;
  t.z = static_cast<Real*>(scratch.logits);
  t.stride = scratch.columns;
  t.row = row;
  t.column = column;
  t.rows = std::min(scratch.rows, product.rows - row);
  t.columns = std::min(scratch.columns, product.columns - column);
  t.strip = product.batch_invariant ? kStripColumns : t.columns;
  t.first_partial = product.batch_invariant ? (product.column_offset + column) / kStripColumns : 0;
  return t;
}

// Returns all blocks of scratch as one, for a launch that seldom has rows: it is wide, so launches are few.
LogitsScratch as_one_block(LogitsScratch scratch, int64_t rows, int64_t columns) {
  if (rows <= scratch.rows && columns <= scratch.columns) return scratch;
  const int64_t numbers = kScratchBlocks * scratch.rows * scratch.columns;
  const int64_t parts = ceil_div(rows, scratch.rows);  // of about the same size
  scratch.rows = std::min({rows, scratch.rows, ceil_div(ceil_div(rows, parts), kRowBlock) * kRowBlock});
  scratch.columns = std::min(ceil_div(columns, kAtOnce), numbers / scratch.rows / kAtOnce) * kAtOnce;
  return scratch;
}

// Uses a warp for each row if there are many rows, else a block.
template <class Work, class Real, class Args>
void launch_lines(const LogitsProductOf<Real>& product, const Args& args, const Tile<Real>& tile,
                  const Queue& queue) {
  constexpr int64_t kManyRows = 2048;
  const auto strips = static_cast<unsigned>(ceil_div(tile.columns, tile.strip));
  const auto launch = [&](auto instance) {
    using Of = decltype(instance);
    const auto blocks = static_cast<unsigned>(ceil_div(tile.rows, int64_t{Of::kLines}));
    queue.launch("portable row kernel", lines_kernel<Work, Of, Args, Real>, dim3(blocks, strips), kRowThreads,
                 0, RowParams<Args, Real>{product, args}, tile);
  };
  const auto launch_of = [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    // The order of a sum must not depend on the number of rows.
    if (tile.rows >= kManyRows && !product.batch_invariant && !product.seldom) {
      launch(Instance<32, kPlain>{});
    } else {
      launch(Instance<kRowThreads, kPlain>{});
    }
  };
  if constexpr (std::is_same_v<Real, float>) {
    if (is_plain(product) && is_plain(args)) return launch_of(std::true_type{});
  }
  launch_of(std::false_type{});
}

template <class Real>
void launch_epilogue(const LogitsProductOf<Real>& product, const RowSumsOf<Real>& args,
                     const Tile<Real>& tile, const Queue& queue) {
  launch_lines<Sum>(product, args, tile, queue);
}

// Exp logits of 16-bit operands are bf16, whose exponents reach as far as fp32's. With batch_invariant the
// sums must be those of kStats.
void launch_epilogue(const LogitsProduct& product, const ExpLogitsArgs& args, Tile<float> tile,
                     const Queue& queue) {
  if (product.batch_invariant) launch_epilogue<float>(product, args, tile, queue);
  tile.strip = tile.columns;
  if (product.dtype == DType::kF32) {
    launch_lines<KeepExpLogits<float>>(product, args, tile, queue);
  } else {
    launch_lines<KeepExpLogits<__nv_bfloat16>>(product, args, tile, queue);
  }
}

template <class Real>
void launch_epilogue(const LogitsProductOf<Real>& product, const GradientArgsOf<Real>& args, Tile<Real> tile,
                     const Queue& queue) {
  tile.strip = tile.columns;
  for_dtype<Real>(product.dtype,
                  [&](auto type) { launch_lines<MakeGradient<decltype(type)>>(product, args, tile, queue); });
}

void launch_epilogue(const LogitsProduct& product, const DrawArgs& args, Tile<float> tile,
                     const Queue& queue) {
  tile.strip = tile.columns;
  launch_lines<DrawElements>(product, args, tile, queue);
}

template <class Real>
void launch_epilogue(const LogitsProductOf<Real>& product, const TopArgsOf<Real>& args,
                     const Tile<Real>& tile, const Queue& queue) {
  launch_epilogue<Real>(product, static_cast<const RowSumsOf<Real>&>(args), tile, queue);
  queue.launch("portable top kernel", top_kernel<Real>, static_cast<unsigned>(tile.rows), kRowThreads, 0,
               RowParams<TopLogitsOf<Real>, Real>{product, args.top}, tile);
}

void launch_epilogue(const LogitsProduct& product, const SampleArgs& args, const Tile<float>& tile,
                     const Queue& queue) {
  launch_epilogue<float>(product, static_cast<const RowSums&>(args), tile, queue);
  queue.launch("portable sample kernel", sample_kernel, static_cast<unsigned>(tile.rows), kRowThreads, 0,
               RowParams<Samples>{product, args.samples}, tile);
}

[[noreturn]] void launch_epilogue(const LogitsProductOf<double>&, const RowSums&, const Tile<double>&,
                                  const Queue&) {
  throw Error(Status::kInternal, "exp logits, draws and samples of float64");
}

}  // namespace

template <class Real>
void launch_logits(const LogitsArgsOf<Real>& args, const LogitsScratch& given, const Queue& queue) {
  const LogitsScratch scratch = args.seldom ? as_one_block(given, args.rows, args.columns) : given;
  const bool whole = scratch.columns >= args.columns;
  if (args.batch_invariant &&
      (args.column_offset % kStripColumns != 0 || (!whole && scratch.columns % kStripColumns != 0))) {
    throw Error(Status::kInternal, "portable sums that are batch-invariant need windows of whole strips");
  }
  const ConstMatrix hidden{args.hidden, args.dtype, args.hidden_stride};
  const ConstMatrix weight{args.weight, args.dtype, args.weight_stride};
  Gemm g;
  g.allow_tf32 = args.allow_tf32;
  g.transpose_b = true;
  g.c = {nullptr, std::is_same_v<Real, double> ? DType::kF64 : DType::kF32, scratch.columns};
  g.k = args.depth;
  const int64_t blocks = ceil_div(args.rows, scratch.rows) * ceil_div(args.columns, scratch.columns);
  static_assert(Overlap::kBuffers == kScratchBlocks);
  // Draws are slower with two.
  const int streams = args.epilogue() == Epilogue::kDraw ? 1 : Overlap::kMostProductStreams;
  const bool overlaps = blocks > 1 && !args.seldom;
  Overlap overlap(queue, overlaps ? streams : 0);
  const size_t gemm_bytes = overlaps ? scratch.gemm_bytes / static_cast<size_t>(streams) : scratch.gemm_bytes;
  for (int64_t row = 0; row < args.rows; row += scratch.rows) {
    for (int64_t column = 0; column < args.columns; column += scratch.columns) {
      overlap.begin_block();
      Tile<Real> tile = tile_of<Real>(args, scratch, row, column);
      if (overlaps) tile.z += overlap.block() % kScratchBlocks * scratch.rows * scratch.columns;
      g.m = tile.rows;
      g.n = tile.columns;
      g.a = hidden.from(row);
      g.b = weight.from(column);
      g.c.data = tile.z;
      if (args.seldom || multiplies_by_dot_products(args)) {
        launch_dot_products(g, {args.row_count, args.row_block_active, row}, overlap.products());
      } else {
        void* const gemm_scratch =
            static_cast<char*>(scratch.gemm) + static_cast<size_t>(overlap.product_stream()) * gemm_bytes;
        gemm(g, gemm_scratch, gemm_bytes, overlap.products());
      }
      overlap.end_products();
      std::visit(
          [&](const auto& of_epilogue) {
            launch_epilogue(static_cast<const LogitsProductOf<Real>&>(args), of_epilogue, tile,
                            overlap.rows());
          },
          args.of_epilogue);
      overlap.end_rows();
    }
  }
}
template void launch_logits(const LogitsArgs&, const LogitsScratch&, const Queue&);
template void launch_logits(const LogitsArgsOf<double>&, const LogitsScratch&, const Queue&);

}  // namespace logitless::cuda::portable
