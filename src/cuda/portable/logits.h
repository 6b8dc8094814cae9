#pragma once
#include <cstddef>

#include "cuda/logits.h"
#include "cuda/queue.h"

namespace headroom::cuda::portable {

// Where fp32 logits are kept between the plain product and the row kernels.
struct Scratch {
  float* logits = nullptr;  // [rows, columns]
  int64_t rows = 0, columns = 0;
  void* gemm = nullptr;
  size_t gemm_bytes = 0;
};

// LogitsArgs on any device of compute capability 8.0 and more: fp32 logits of a block of rows and columns at
// a time, never rounded. Operands are bf16, fp16 or fp32. One slot a row. kExps: all columns of
// the shard at once, and scratch has as many.
void launch_logits(const LogitsArgs& args, const Scratch& scratch, const Queue& queue);

}  // namespace headroom::cuda::portable
