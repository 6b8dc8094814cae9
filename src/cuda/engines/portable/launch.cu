#include "core/status.h"
#include "cuda/engines/portable/launch.h"

#include <algorithm>

#include "cuda/engines/portable/row_kernels.cuh"
#include "cuda/engines/portable/thin_kernel.cuh"
#include "cuda/engines/portable/top_kernel.cuh"
#include "cuda/rows/rows.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda::portable {
namespace {

// The part of the arguments that one block of logits sees.
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
  t.first_slot = product.batch_invariant ? (product.column_offset + column) / kStripColumns : 0;
  return t;
}

template <class Real>
void launch_stats(const LogitsProductOf<Real>& product, const RowSumsOf<Real>& args, const Tile<Real>& tile,
                  const Queue& queue) {
  const auto strips = static_cast<unsigned>((tile.columns + tile.strip - 1) / tile.strip);
  queue.launch("portable row kernel", stats_kernel<Real>, dim3(static_cast<unsigned>(tile.rows), strips),
               kRowThreads, 0, {product, args}, tile);
}

// A block of threads a row.
template <class Kernel, class Args, class Real>
void launch_rows(Kernel kernel, const LogitsProductOf<Real>& product, const Args& args,
                 const Tile<Real>& tile, const Queue& queue) {
  queue.launch("portable row kernel", kernel, static_cast<unsigned>(tile.rows), kRowThreads, 0,
               RowParams<Args, Real>{product, args}, tile);
}

template <class Real>
void launch_epilogue(const LogitsProductOf<Real>& product, const StatsArgsOf<Real>& args,
                     const Tile<Real>& tile, const Queue& queue) {
  launch_stats<Real>(product, args, tile, queue);
}

// Exps of 16-bit operands are bf16, whose exponents reach as far as fp32's. With batch_invariant sums are to
// be those of kStats.
void launch_epilogue(const LogitsProduct& product, const ExpsArgs& args, const Tile<float>& tile,
                     const Queue& queue) {
  if (product.batch_invariant) launch_stats<float>(product, args, tile, queue);
  for_dtype(product.dtype == DType::kF16 ? DType::kBF16 : product.dtype, [&](auto type) {
    using T = decltype(type);
    launch_rows(product.batch_invariant ? keep_exps_kernel<T> : exps_kernel<T>, product, args, tile, queue);
  });
}

template <class Real>
void launch_epilogue(const LogitsProductOf<Real>& product, const GradientArgsOf<Real>& args,
                     const Tile<Real>& tile, const Queue& queue) {
  for_dtype<Real>(product.dtype, [&](auto type) {
    launch_rows(gradient_kernel<decltype(type)>, product, args, tile, queue);
  });
}

void launch_epilogue(const LogitsProduct& product, const ThinArgs& args, const Tile<float>& tile,
                     const Queue& queue) {
  launch_rows(thin_kernel, product, args, tile, queue);
}

template <class Real>
void launch_epilogue(const LogitsProductOf<Real>& product, const TopArgsOf<Real>& args,
                     const Tile<Real>& tile, const Queue& queue) {
  launch_stats<Real>(product, args, tile, queue);
  launch_rows(top_kernel<Real>, product, args.top, tile, queue);
}

[[noreturn]] void launch_epilogue(const LogitsProductOf<double>&, const RowSums&, const Tile<double>&,
                                  const Queue&) {
  throw Error(Status::kInternal, "exps and draws of float64");
}

}  // namespace

template <class Real>
void launch_logits(const LogitsArgsOf<Real>& args, const LogitsScratch& scratch, const Queue& queue) {
  if (args.epilogue() == Epilogue::kExps && (scratch.columns < args.columns || args.column_offset != 0)) {
    throw Error(Status::kInternal, "portable exps need scratch for whole rows");
  }
  const bool whole = scratch.columns >= args.columns;
  if (args.batch_invariant &&
      (args.column_offset % kStripColumns != 0 || (!whole && scratch.columns % kStripColumns != 0))) {
    throw Error(Status::kInternal, "portable sums that are batch-invariant need windows of whole strips");
  }
  const ConstMatrix hidden{args.hidden, args.dtype, args.hidden_stride};
  const ConstMatrix classifier{args.classifier, args.dtype, args.classifier_stride};
  Gemm g;
  g.allow_tf32 = args.allow_tf32;
  g.transpose_b = true;
  g.c = {scratch.logits, std::is_same_v<Real, double> ? DType::kF64 : DType::kF32, scratch.columns};
  g.k = args.depth;
  for (int64_t row = 0; row < args.rows; row += scratch.rows) {
    for (int64_t column = 0; column < args.columns; column += scratch.columns) {
      const Tile<Real> tile = tile_of<Real>(args, scratch, row, column);
      g.m = tile.rows;
      g.n = tile.columns;
      g.a = hidden.from(row);
      g.b = classifier.from(column);
      if (multiplies_by_dot_products(args)) {
        launch_dot_products(g, queue);
      } else {
        gemm(g, scratch.gemm, scratch.gemm_bytes, queue);
      }
      std::visit(
          [&](const auto& of_epilogue) {
            launch_epilogue(static_cast<const LogitsProductOf<Real>&>(args), of_epilogue, tile, queue);
          },
          args.of_epilogue);
    }
  }
}
template void launch_logits(const LogitsArgs&, const LogitsScratch&, const Queue&);
template void launch_logits(const LogitsArgsOf<double>&, const LogitsScratch&, const Queue&);

}  // namespace logitless::cuda::portable
