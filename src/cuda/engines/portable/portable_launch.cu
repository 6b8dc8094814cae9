#include "cuda/engines/portable/portable_launch.h"

#include <algorithm>

#include "cuda/check.h"
#include "cuda/engines/portable/row_kernels.cuh"
#include "cuda/engines/portable/thin_kernel.cuh"
#include "cuda/engines/portable/top_kernel.cuh"
#include "cuda/gemm.h"

namespace headroom::cuda::portable {
namespace {

const void* element(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * static_cast<int64_t>(size_of(dtype));
}

// The part of the arguments that one block of logits sees.
Tile tile_of(const LogitsArgs& args, const LogitsScratch& scratch, int64_t row, int64_t column) {
  Tile t;
  t.z = scratch.logits;
  t.stride = scratch.columns;
  t.row = row;
  t.column = column;
  t.rows = std::min(scratch.rows, args.rows - row);
  t.columns = std::min(scratch.columns, args.columns - column);
  t.strip = args.batch_invariant ? kStripColumns : t.columns;
  t.first_slot = args.batch_invariant ? (args.column_offset + column) / kStripColumns : 0;
  return t;
}

// Exps whose sums are to be those of kStats.
bool sums_in_strips(const LogitsArgs& args) {
  return args.batch_invariant && args.epilogue == Epilogue::kExps;
}

void launch_epilogue(const LogitsArgs& args, const Tile& tile, const Queue& queue) {
  const auto blocks = static_cast<unsigned>(tile.rows);
  const bool makes_stats = args.epilogue == Epilogue::kStats || args.epilogue == Epilogue::kTop;
  if (makes_stats || sums_in_strips(args)) {
    const auto strips = static_cast<unsigned>((tile.columns + tile.strip - 1) / tile.strip);
    queue.launch(stats_kernel, dim3(blocks, strips), kRowThreads, 0, args, tile);
  }
  if (makes_stats) {
    if (args.epilogue == Epilogue::kTop) queue.launch(top_kernel, blocks, kRowThreads, 0, args, tile);
  } else if (args.epilogue == Epilogue::kThin) {
    queue.launch(thin_kernel, blocks, kRowThreads, 0, args, tile);
  } else {
    // Exps of 16-bit operands are bf16, whose exponents reach as far as fp32's.
    const bool exps = args.epilogue == Epilogue::kExps;
    const DType dtype = exps && args.dtype == DType::kF16 ? DType::kBF16 : args.dtype;
    for_dtype(dtype, [&](auto type) {
      using T = decltype(type);
      if (sums_in_strips(args)) {
        queue.launch(keep_exps_kernel<T>, blocks, kRowThreads, 0, args, tile);
      } else if (exps) {
        queue.launch(exps_kernel<T>, blocks, kRowThreads, 0, args, tile);
      } else {
        queue.launch(gradient_kernel<T>, blocks, kRowThreads, 0, args, tile);
      }
    });
  }
  check_launch("portable row kernel");
}

}  // namespace

void launch_logits(const LogitsArgs& args, const LogitsScratch& scratch, const Queue& queue) {
  if (args.epilogue == Epilogue::kExps && (scratch.columns < args.columns || args.column_offset != 0)) {
    throw Error(Status::kInternal, "portable exps need scratch for whole rows");
  }
  const bool whole = scratch.columns >= args.columns;
  if (args.batch_invariant &&
      (args.column_offset % kStripColumns != 0 || (!whole && scratch.columns % kStripColumns != 0))) {
    throw Error(Status::kInternal, "portable sums that are batch-invariant need windows of whole strips");
  }
  Gemm g;
  g.operand_dtype = args.dtype;
  g.allow_tf32 = args.allow_tf32;
  g.a_stride = args.hidden_stride;
  g.b_stride = args.classifier_stride;
  g.transpose_b = true;
  g.c = scratch.logits;
  g.c_stride = scratch.columns;
  g.k = args.depth;
  g.one_algorithm = args.batch_invariant;
  for (int64_t row = 0; row < args.rows; row += scratch.rows) {
    for (int64_t column = 0; column < args.columns; column += scratch.columns) {
      const Tile tile = tile_of(args, scratch, row, column);
      g.m = tile.rows;
      g.n = tile.columns;
      g.a = element(args.hidden, args.dtype, row * args.hidden_stride);
      g.b = element(args.classifier, args.dtype, column * args.classifier_stride);
      gemm(g, scratch.gemm, scratch.gemm_bytes, queue);
      launch_epilogue(args, tile, queue);
    }
  }
}

}  // namespace headroom::cuda::portable
