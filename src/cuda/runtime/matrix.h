#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/host_device.h"

namespace logitless::cuda {

// A row-major matrix on the device. Void is void, or const void for read-only data.
template <class Void>
struct MatrixOf {
  template <class T>
  using Like = std::conditional_t<std::is_const_v<Void>, const T, T>;

  Void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;  // elements from row to row

  auto operator<=>(const MatrixOf&) const = default;
  // Any matrix converts to a read-only one.
  template <class Const>
    requires std::is_const_v<Const>
  operator MatrixOf<Const>() const {
    return {data, dtype, stride};
  }

  // Returns the part that begins at the given element.
  MatrixOf from(int64_t row, int64_t column = 0) const {
    const int64_t element = row * stride + column;
    return {static_cast<Like<std::byte>*>(data) + element * static_cast<int64_t>(size_of(dtype)), dtype,
            stride};
  }

  // Returns a row as elements of type T, for kernels, which know the type.
  template <class T>
  LOGITLESS_HD Like<T>* row(int64_t i) const {
    return static_cast<Like<T>*>(data) + i * stride;
  }
};
using Matrix = MatrixOf<void>;
using ConstMatrix = MatrixOf<const void>;

}  // namespace logitless::cuda
