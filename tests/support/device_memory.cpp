#include "device_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

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

// The memory of one run after another: allocating is slower than the runs are.
class Block {
 public:
  ~Block() { cudaFree(data_); }
  std::byte* at_least(size_t bytes) {
    if (bytes > size_) {
      check(cudaFree(data_), "cudaFree");
      data_ = nullptr;
      size_ = 0;
      check(cudaMalloc(&data_, bytes), "cudaMalloc");
      size_ = bytes;
    }
    return static_cast<std::byte*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace

struct DeviceMirror::Parts {
  struct Copy {
    GuardedMemory* memory;
    std::span<std::byte> host;
    size_t offset;  // in the block
  };
  cudaStream_t stream = nullptr;
  std::vector<Copy> copies;
  size_t used = 0;
  std::byte* block = nullptr;
  size_t workspace_offset = 0;
  size_t workspace_bytes = 0;
  std::vector<std::byte> guards;

  size_t guards_end() const { return workspace_offset + workspace_bytes + kGuard; }
};

DeviceMirror::DeviceMirror() : parts_(std::make_unique<Parts>()) {
  check(cudaSetDevice(0), "cudaSetDevice");
  check(cudaStreamCreateWithFlags(&parts_->stream, cudaStreamNonBlocking), "cudaStreamCreate");
}

DeviceMirror::~DeviceMirror() {
  cudaStreamSynchronize(parts_->stream);  // the block is used again
  cudaStreamDestroy(parts_->stream);
}

void DeviceMirror::add(GuardedMemory* memory) {
  const std::span<std::byte> host = memory->open_guards();
  memory->close_guards();
  const auto before = static_cast<size_t>(memory->data() - host.data());
  // The first element lies `skew` bytes past a boundary.
  const size_t begin = round_up(parts_->used + before) + memory->skew();
  parts_->copies.push_back({memory, host, begin - before});
  parts_->used = begin - before + host.size();
}

void DeviceMirror::upload(size_t workspace_bytes) {
  Parts& p = *parts_;
  p.workspace_offset = round_up(p.used + kGuard);
  p.workspace_bytes = workspace_bytes;
  static thread_local Block block;
  p.block = block.at_least(p.guards_end());
  for (const Parts::Copy& copy : p.copies) {
    copy.memory->open_guards();
    check(cudaMemcpyAsync(p.block + copy.offset, copy.host.data(), copy.host.size(), cudaMemcpyHostToDevice,
                          p.stream),
          "copy to the device");
    check(cudaStreamSynchronize(p.stream), "copy to the device");
    copy.memory->close_guards();
  }
  check(cudaMemsetAsync(p.block + p.workspace_offset - kGuard, static_cast<int>(kDevicePattern),
                        workspace_bytes + 2 * kGuard, p.stream),
        "filling the workspace");
}

void* DeviceMirror::of(const void* host) const {
  const auto* address = static_cast<const std::byte*>(host);
  if (address == nullptr) return nullptr;
  for (const Parts::Copy& copy : parts_->copies) {
    const std::byte* begin = copy.host.data();
    if (begin <= address && address < begin + copy.host.size()) {
      return parts_->block + copy.offset + (address - begin);
    }
  }
  throw std::logic_error("a pointer to memory that has no copy on the device");
}

std::span<std::byte> DeviceMirror::workspace() const {
  return {parts_->block + parts_->workspace_offset, parts_->workspace_bytes};
}

void* DeviceMirror::stream() const {
  return parts_->stream;
}

void DeviceMirror::download() {
  Parts& p = *parts_;
  check(cudaStreamSynchronize(p.stream), "the run");
  for (const Parts::Copy& copy : p.copies) {
    copy.memory->open_guards();
    check(cudaMemcpy(copy.host.data(), p.block + copy.offset, copy.host.size(), cudaMemcpyDeviceToHost),
          "copy from the device");
    copy.memory->close_guards();
  }
  p.guards.resize(2 * kGuard);
  const std::byte* workspace = p.block + p.workspace_offset;
  check(cudaMemcpy(p.guards.data(), workspace - kGuard, kGuard, cudaMemcpyDeviceToHost), "copy of a guard");
  check(cudaMemcpy(p.guards.data() + kGuard, workspace + p.workspace_bytes, kGuard, cudaMemcpyDeviceToHost),
        "copy of a guard");
}

void copy_from_device(void* host, const void* device, size_t bytes, void* stream) {
  auto* queue = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, queue), "copy from the device");
  check(cudaStreamSynchronize(queue), "copy from the device");
}

void copy_to_device(void* device, const void* host, size_t bytes, void* stream) {
  auto* queue = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, queue), "copy to the device");
  check(cudaStreamSynchronize(queue), "copy to the device");
}

std::string DeviceMirror::workspace_violation() const {
  const auto whole = [](auto begin) {
    return std::all_of(begin, begin + kGuard, [](std::byte b) { return b == kDevicePattern; });
  };
  if (!whole(parts_->guards.begin())) return "written before the buffer";
  return whole(parts_->guards.begin() + kGuard) ? "" : "written past the buffer";
}

}  // namespace logitless_test
