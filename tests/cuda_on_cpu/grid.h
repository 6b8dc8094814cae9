#pragma once
// Runs a CUDA kernel on the CPU. Every thread of a block is a fiber of one thread of the system, and blocks
// run one after another. Blocks of a cooperative launch run beside each other, each on a thread of its own.
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>

// For variables of a thread that are used all the time: finding them takes no call.
#define LOGITLESS_INITIAL_EXEC __attribute__((tls_model("initial-exec")))

namespace cuda_on_cpu {

// run() calls body() once for every thread of the grid, with threadIdx and its kin set. A barrier that not
// all threads come to ends the program with a message that names the kernel.
struct Grid {
  dim3 blocks, threads;
  size_t shared_bytes = 0;
  bool is_cooperative = false;
  const char* kernel = "";
};
void run(const Grid& grid, const std::function<void()>& body);

// Waits for the calling thread's block; threads that have ended count as waiting.
void wait_for_block();
// Waits likewise. Returns whether value is not 0 in any thread.
int any_of_block(int value);
// Waits for all blocks of a cooperative launch.
void wait_for_grid();
// Waits until so many of the block's threads have come to the barrier.
void wait_for_named(int barrier, unsigned threads);
void* dynamic_shared_memory();
// Returns `bytes` bytes of the dynamic shared memory by their offset, which must be inside.
void* shared_at(uint32_t offset, size_t bytes);

// The values that each lane of a warp has given.
struct Lanes {
  uint64_t value[32];
  uint32_t words[32][6];
};
// Waits for all lanes of the mask. The result stays valid until the next but one call with this mask.
const Lanes& exchange(unsigned mask, uint64_t mine);
// Exchanges several words, by all lanes.
const Lanes& exchange_words(const uint32_t* mine, size_t count);
int lane_of_warp();

// A thread's copies into shared memory: 16 bytes, of which those past `bytes` are 0. As on a device, some
// copies are done at once and some only when they are waited for.
void copy_async(uint32_t to, const void* from, int bytes);
void copy_async_commit();
// Completes all groups of copies but the last `pending`.
void copy_async_wait(size_t pending);

[[noreturn]] void fail(const char* what);

}  // namespace cuda_on_cpu
