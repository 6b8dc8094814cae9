#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace headroom {

inline constexpr size_t kWorkspaceAlignment = 64;

constexpr size_t align_up(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// A bump allocator. With a null base it only counts, so one function lays a workspace out both for the
// planner (bytes) and for the run (pointers).
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}

  // Uninitialised, aligned to kWorkspaceAlignment; an empty span when only counting.
  template <class T>
  std::span<T> take(int64_t count) {
    const size_t offset = used_;
    used_ += align_up(static_cast<size_t>(count) * sizeof(T));
    if (base_ == nullptr) return {};
    return {reinterpret_cast<T*>(base_ + offset), static_cast<size_t>(count)};
  }
  size_t used() const { return used_; }
  const void* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  size_t used_ = 0;
};

}  // namespace headroom
