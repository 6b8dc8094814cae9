#pragma once
// Runs a CUDA kernel on the CPU: every thread of a block is a fiber of one thread of the system, and blocks
// run one after another; those of a cooperative launch run beside each other, each on a thread of its own.
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace cuda_on_cpu {

// Calls body() once for every thread of the grid, with threadIdx and its kin set. A barrier that not all
// threads come to ends the program with a message that names the kernel.
struct Grid {
  dim3 blocks, threads;
  size_t shared_bytes = 0;
  bool is_cooperative = false;
  const char* kernel = "";
};
void run(const Grid& grid, const std::function<void()>& body);

// Of the calling thread's block; threads that have ended count as waiting.
void wait_for_block();
// The same; whether value is not 0 in any thread.
int any_of_block(int value);
// Of a cooperative launch's blocks.
void wait_for_grid();
void* dynamic_shared_memory();

// What each lane of a warp has given.
struct Lanes {
  uint64_t value[32];
};
// Waits for all lanes of the mask. What is returned is there until the next but one call with this mask.
const Lanes& exchange(unsigned mask, uint64_t mine);
int lane_of_warp();

[[noreturn]] void fail(const char* what);

}  // namespace cuda_on_cpu
