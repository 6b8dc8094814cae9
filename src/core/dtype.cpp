#include "core/dtype.h"

#include <iterator>

namespace logitless {
namespace {

template <class T>
const T& element(const void* data, int64_t index) {
  return static_cast<const T*>(data)[index];
}
template <class T>
T& element(void* data, int64_t index) {
  return static_cast<T*>(data)[index];
}

}  // namespace

const char* dtype_name(DType dtype) {
  static constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "float64",
                                           "int32",   "int64",    "fp8"};
  const auto number = static_cast<size_t>(dtype);
  return number < std::size(kNames) ? kNames[number] : "unknown dtype";
}

double load_as_double(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return element<float>(data, index);
  if (dtype == DType::kBF16) return bf16_to_float(element<uint16_t>(data, index));
  if (dtype == DType::kF16) return f16_to_float(element<uint16_t>(data, index));
  if (dtype == DType::kF64) return element<double>(data, index);
  return static_cast<double>(load_as_int64(data, dtype, index));
}

void store_from_double(void* data, DType dtype, int64_t index, double value) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::kF32) element<float>(data, index) = single;
  if (dtype == DType::kBF16) element<uint16_t>(data, index) = float_to_bf16(single);
  if (dtype == DType::kF16) element<uint16_t>(data, index) = float_to_f16(single);
  if (dtype == DType::kF64) element<double>(data, index) = value;
}

int64_t load_as_int64(const void* data, DType dtype, int64_t index) {
  return dtype == DType::kI32 ? element<int32_t>(data, index) : element<int64_t>(data, index);
}

}  // namespace logitless
