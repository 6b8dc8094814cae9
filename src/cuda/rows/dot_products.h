#pragma once
#include "cuda/runtime/gemm.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {

// Queues C = A B^T in fp32, where an element's bits are those of its row of A and its row of B alone, as its
// sum has the order of k. cuBLASLt offers no algorithm that takes all sizes; without tensor cores this is
// some ten times slower than the best of its. Of g: m, n, k, operands, strides, and C in fp32.
void launch_dot_products(const Gemm& g, const Queue& queue);

}  // namespace logitless::cuda
