#pragma once
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "tensor.h"

namespace logitless_test {

// A run on CUDA device 0: on a copy of host memory, in a workspace, on a cudaStream_t.
struct OnDevice {
  std::function<void*(const void*)> of;  // maps a host pointer to its copy; null to null
  std::span<std::byte> workspace;
  void* stream = nullptr;
};

// Runs on copies of host memory, guards included.
// Each copy is at the same distance from a 256-byte boundary as its original, so that a misaligned tensor
// stays misaligned. The workspace is guarded and full of NaN, and its guards must stay whole. The stream is
// the run's own.
// Afterwards the host's memory is as the run left the device's. Throws in a build without CUDA.
void run_on_device(const std::vector<GuardedMemory*>& memory, size_t workspace_bytes,
                   const std::function<void(const OnDevice&)>& run);

// Copies from the device or to it in the order of the stream, and waits.
void copy_by_device(void* to, const void* from, size_t bytes, void* stream);

}  // namespace logitless_test
