#include "device_memory.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

namespace logitless_test {
namespace {

constexpr size_t kDeviceBoundary = 256;
constexpr size_t kGuard = 256;
constexpr std::byte kDevicePattern{0xff};

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

size_t round_up(size_t bytes) {
  return (bytes + kDeviceBoundary - 1) / kDeviceBoundary * kDeviceBoundary;
}

// Memory that one run after another uses: allocating is slower than the runs are.
std::byte* block_of(size_t bytes) {
  static thread_local struct Block {
    ~Block() { cudaFree(data); }
    void* data = nullptr;
    size_t size = 0;
  } block;
  if (bytes > block.size) {
    check(cudaFree(block.data), "cudaFree");
    block.data = nullptr;
    block.size = 0;
    check(cudaMalloc(&block.data, bytes), "cudaMalloc");
    block.size = bytes;
  }
  return static_cast<std::byte*>(block.data);
}

// A stream whose end waits for the run, because the block is used again.
struct Stream {
  Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Stream() {
    cudaStreamSynchronize(handle);
    cudaStreamDestroy(handle);
  }
  cudaStream_t handle = nullptr;
};

}  // namespace

void run_on_device(const std::vector<GuardedMemory*>& memory, size_t workspace_bytes,
                   const std::function<void(const OnDevice&)>& run) {
  check(cudaSetDevice(0), "cudaSetDevice");
  struct Copy {
    GuardedMemory* memory;
    std::span<std::byte> host;
    size_t offset;  // bytes into the block
  };
  std::vector<Copy> copies;
  size_t used = 0;
  for (GuardedMemory* each : memory) {
    const std::span<std::byte> host = each->open_guards();
    each->close_guards();
    const auto before = static_cast<size_t>(each->data() - host.data());
    // The first element lies `skew` bytes past a boundary.
    const size_t begin = round_up(used + before) + each->skew();
    copies.push_back({each, host, begin - before});
    used = begin - before + host.size();
  }
  const size_t workspace_offset = round_up(used + kGuard);
  std::byte* block = block_of(workspace_offset + workspace_bytes + kGuard);
  std::byte* workspace = block + workspace_offset;
  const Stream stream;
  for (const Copy& copy : copies) {
    copy.memory->open_guards();
    copy_by_device(block + copy.offset, copy.host.data(), copy.host.size(), stream.handle);
    copy.memory->close_guards();
  }
  check(cudaMemsetAsync(workspace - kGuard, static_cast<int>(kDevicePattern), workspace_bytes + 2 * kGuard,
                        stream.handle),
        "filling the workspace");

  const auto of = [&](const void* host) -> void* {
    const auto* address = static_cast<const std::byte*>(host);
    if (address == nullptr) return nullptr;
    for (const Copy& copy : copies) {
      const std::byte* begin = copy.host.data();
      if (begin <= address && address < begin + copy.host.size())
        return block + copy.offset + (address - begin);
    }
    throw std::logic_error("a pointer to memory that has no copy on the device");
  };
  run({.of = of, .workspace = {workspace, workspace_bytes}, .stream = stream.handle});

  check(cudaStreamSynchronize(stream.handle), "the run");
  for (const Copy& copy : copies) {
    copy.memory->open_guards();
    copy_by_device(copy.host.data(), block + copy.offset, copy.host.size(), stream.handle);
    copy.memory->close_guards();
  }
  std::vector<std::byte> guard(kGuard);
  for (const std::byte* at : {workspace - kGuard, workspace + workspace_bytes}) {
    copy_by_device(guard.data(), at, kGuard, stream.handle);
    EXPECT_TRUE(std::ranges::all_of(guard, [](std::byte b) { return b == kDevicePattern; }))
        << "written " << (at < workspace ? "before" : "past") << " the workspace";
  }
}

void copy_by_device(void* to, const void* from, size_t bytes, void* stream) {
  auto* queue = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue), "copy of a device");
  check(cudaStreamSynchronize(queue), "copy of a device");
}

}  // namespace logitless_test
