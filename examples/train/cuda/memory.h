#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "train/cuda/check.h"

namespace logitless::train::cuda {

// Bytes of a device that this program holds.
struct HeldBytes {
  int64_t now = 0;
  int64_t peak = 0;
};

// `count` elements on the current device, uninitialised, aligned to 256 bytes.
template <class T>
class Memory {
 public:
  Memory() = default;
  Memory(HeldBytes& held, int64_t count) : held_(&held), count_(count) {
    void* data = nullptr;
    check(cudaMalloc(&data, static_cast<size_t>(bytes())), "allocating " + std::to_string(bytes()) +
                                                               " bytes beside " + std::to_string(held.now) +
                                                               " that are held");
    data_ = static_cast<T*>(data);
    held.now += bytes();
    held.peak = std::max(held.peak, held.now);
  }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    Memory moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~Memory() {
    if (data_ == nullptr) return;
    cudaFree(data_);  // waits for what uses it
    held_->now -= bytes();
  }

  T* data() const { return data_; }
  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }

 private:
  void swap(Memory& other) {
    std::swap(held_, other.held_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

  HeldBytes* held_ = nullptr;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace logitless::train::cuda
