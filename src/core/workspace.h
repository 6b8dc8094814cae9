#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace logitless {

// Bytes are 64-bit numbers on every machine: plans may be for devices with more memory than this one.
inline constexpr uint64_t kWorkspaceAlignment = 64;

constexpr uint64_t align_up(uint64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// A bump allocator. With a null base it only counts, so one function lays out a workspace both for the
// planner (bytes) and for the run (pointers).
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}

  // Returns uninitialised memory, aligned to kWorkspaceAlignment; an empty span when only counting.
  template <class T>
  std::span<T> take(int64_t count) {
    const uint64_t offset = used_;
    used_ += align_up(static_cast<uint64_t>(count) * sizeof(T));
    if (base_ == nullptr) return {};
    return {reinterpret_cast<T*>(base_ + offset), static_cast<size_t>(count)};
  }
  uint64_t used() const { return used_; }
  const void* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  uint64_t used_ = 0;
};

}  // namespace logitless
