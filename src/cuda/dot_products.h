#pragma once
#include "cuda/gemm.h"
#include "cuda/queue.h"

namespace headroom::cuda {

// Queues C = A B^T in fp32, where an element's bits are those of its row of A and its row of B alone: its sum
// has the order of k. For few columns, and where cuBLASLt has nothing of that kind; without tensor cores it
// is some ten times slower. Of g: m, n, k, operands, strides, and C in fp32.
void launch_dot_products(const Gemm& g, const Queue& queue);

}  // namespace headroom::cuda
