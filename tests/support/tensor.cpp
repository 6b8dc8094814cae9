#include "tensor.h"

#include <algorithm>
#include <cstring>

#include "formats.h"

#if defined(__SANITIZE_ADDRESS__)
#define LOGITLESS_TEST_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LOGITLESS_TEST_ADDRESS_SANITIZER
#endif
#endif
#ifdef LOGITLESS_TEST_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace logitless_test {
namespace {

constexpr std::byte kPattern{0xff};
constexpr size_t kBoundary = 64;

bool is_pattern(const std::byte* begin, const std::byte* end) {
  return std::all_of(begin, end, [](std::byte b) { return b == kPattern; });
}

}  // namespace

GuardedMemory::GuardedMemory(size_t size, size_t offset)
    : size_(size), skew_(offset % kBoundary), memory_(size + 2 * kGuard + 2 * kBoundary, kPattern) {
  const auto address = reinterpret_cast<uintptr_t>(memory_.data() + kGuard);
  begin_ = memory_.data() + kGuard + (kBoundary - address % kBoundary) % kBoundary + skew_;
  forbid_guards(true);
}

GuardedMemory::~GuardedMemory() {
  forbid_guards(false);
}

void GuardedMemory::fill(std::byte value) {
  std::fill_n(begin_, size_, value);
}

std::span<std::byte> GuardedMemory::open_guards() {
  forbid_guards(false);
  return memory_;
}

void GuardedMemory::forbid_guards(bool forbid) {
#ifdef LOGITLESS_TEST_ADDRESS_SANITIZER
  std::byte* end = memory_.data() + memory_.size();
  for (auto [from, to] : {std::pair{memory_.data(), begin_}, std::pair{begin_ + size_, end}}) {
    const auto bytes = static_cast<size_t>(to - from);
    if (forbid)
      __asan_poison_memory_region(from, bytes);
    else
      __asan_unpoison_memory_region(from, bytes);
  }
#else
  (void)forbid;
#endif
}

std::string GuardedMemory::violation() {
  forbid_guards(false);
  const std::byte* end = memory_.data() + memory_.size();
  const bool before = is_pattern(memory_.data(), begin_);
  const bool after = is_pattern(begin_ + size_, end);
  forbid_guards(true);
  if (!before) return "written before the buffer";
  return after ? "" : "written past the buffer";
}

Tensor::Tensor(logitless_dtype dtype, int64_t rows, int64_t columns, Layout layout)
    : dtype_(dtype),
      rows_(rows),
      columns_(columns),
      stride_(columns + layout.padding),
      // The last row has no padding after it: nothing promises that there is any.
      memory_(rows == 0 ? 0 : static_cast<size_t>((rows - 1) * stride_ + columns) * size_of(dtype),
              static_cast<size_t>(layout.skew) * size_of(dtype)) {
  // Integers begin as a number that no result is: the pattern is -1, which is an argmax.
  const bool integer = dtype == LOGITLESS_I32 || dtype == LOGITLESS_I64;
  memory_.fill(integer ? std::byte{0x5a} : kPattern);
}

void Tensor::fill(const std::vector<double>& values) {
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      store(data(), dtype_, index(row, column), values[static_cast<size_t>(row * columns_ + column)]);
    }
  }
}

std::vector<double> Tensor::values() const {
  std::vector<double> out(static_cast<size_t>(rows_ * columns_));
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      out[static_cast<size_t>(row * columns_ + column)] = load(data(), dtype_, index(row, column));
    }
  }
  return out;
}

void Tensor::remember() {
  remembered_.assign(memory_.data(), memory_.data() + memory_.size());
}

bool Tensor::unchanged() const {
  return std::equal(remembered_.begin(), remembered_.end(), memory_.data());
}

std::string Tensor::violation() {
  std::string outside = memory_.violation();
  if (!outside.empty()) return outside;
  const size_t element = size_of(dtype_);
  for (int64_t row = 0; row + 1 < rows_; ++row) {
    const std::byte* padding = memory_.data() + static_cast<size_t>(index(row, columns_)) * element;
    const std::byte* next = memory_.data() + static_cast<size_t>(index(row + 1, 0)) * element;
    if (!is_pattern(padding, next)) return "written in the padding after row " + std::to_string(row);
  }
  return "";
}

}  // namespace logitless_test
