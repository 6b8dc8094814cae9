#pragma once
#include <cstddef>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <span>
#include <string>
#include <vector>

namespace logitless_test {

// Bytes between two guards of a known pattern. The pattern is a NaN in every floating point format, so a
// value read from a guard poisons what is computed from it. AddressSanitizer also treats the guards as not
// readable.
class GuardedMemory {
 public:
  // offset: bytes past a 64-byte boundary at which the memory begins.
  explicit GuardedMemory(size_t size = 0, size_t offset = 0);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  std::byte* data() { return begin_; }
  const std::byte* data() const { return begin_; }
  size_t size() const { return size_; }
  size_t skew() const { return skew_; }
  void fill(std::byte value);
  // Opens the guards and returns the memory with them, to copy it elsewhere and back. They may be read and
  // written until they are closed.
  std::span<std::byte> open_guards();
  void close_guards() { forbid_guards(true); }
  // Returns which guard was written to; empty for none.
  std::string violation();

 private:
  static constexpr size_t kGuard = 128;
  void forbid_guards(bool forbid);

  size_t size_, skew_;
  std::vector<std::byte> memory_;
  std::byte* begin_;
};

// The place of a matrix in memory.
struct Layout {
  int64_t padding = 0;  // elements after each row
  int64_t skew = 0;     // elements past a 64-byte boundary
};

// A matrix [rows, columns] (a vector has one column) of some dtype in guarded memory. The padding between its
// rows is also guarded.
class Tensor {
 public:
  Tensor(logitless_dtype dtype, int64_t rows, int64_t columns, Layout layout = {});

  void fill(const std::vector<double>& values);
  std::vector<double> values() const;
  void remember();  // keeps its present bytes, for unchanged()

  // Null where there is no element.
  void* data() { return memory_.size() == 0 ? nullptr : memory_.data(); }
  const void* data() const { return memory_.size() == 0 ? nullptr : memory_.data(); }
  int64_t stride() const { return stride_; }
  logitless_dtype dtype() const { return dtype_; }
  GuardedMemory* memory() { return &memory_; }

  // Describes what was written outside the elements; empty for nothing.
  std::string violation();
  bool unchanged() const;

 private:
  int64_t index(int64_t row, int64_t column) const { return row * stride_ + column; }

  logitless_dtype dtype_;
  int64_t rows_, columns_, stride_;
  GuardedMemory memory_;
  std::vector<std::byte> remembered_;
};

}  // namespace logitless_test
