#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "tensor.h"

namespace logitless_test {

// What a run on CUDA device 0 works on: copies of host memory, guards included, each at the same distance
// from a 256-byte boundary as its original, so that a misaligned tensor stays misaligned; and a guarded
// workspace that is full of NaN. It has a stream of its own. Without CUDA in the build nothing of it can be
// made.
//
//   mirror.add(each tensor's memory); mirror.upload(workspace_bytes);
//   run on mirror.of(pointer), mirror.workspace(), mirror.stream();
//   mirror.download();  // waits; then the host's memory is as the run left the device's
class DeviceMirror {
 public:
  DeviceMirror();
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  void add(GuardedMemory* memory);
  void upload(size_t workspace_bytes);
  void* of(const void* host) const;  // null for null
  std::span<std::byte> workspace() const;
  void* stream() const;  // a cudaStream_t
  void download();
  // Empty, or which guard of the workspace was written to; after download().
  std::string workspace_violation() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Copies between the two in the order of the stream, which they wait for.
void copy_from_device(void* host, const void* device, size_t bytes, void* stream);
void copy_to_device(void* device, const void* host, size_t bytes, void* stream);

}  // namespace logitless_test
