#include "core/dtype.h"

namespace logitless {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF64:
      return "float64";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
  }
  return "unknown dtype";
}

double load_as_double(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kBF16:
      return bf16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kF16:
      return f16_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kF64:
      return static_cast<const double*>(data)[index];
    case DType::kI32:
      return static_cast<const int32_t*>(data)[index];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(data)[index]);
  }
  return 0;
}

void store_from_double(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(data)[index] = float_to_bf16(static_cast<float>(value));
      break;
    case DType::kF16:
      static_cast<uint16_t*>(data)[index] = float_to_f16(static_cast<float>(value));
      break;
    case DType::kF64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::kI32:
      static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value);
      break;
    case DType::kI64:
      static_cast<int64_t*>(data)[index] = static_cast<int64_t>(value);
      break;
  }
}

int64_t load_as_int64(const void* data, DType dtype, int64_t index) {
  return dtype == DType::kI32 ? int64_t{static_cast<const int32_t*>(data)[index]}
                              : static_cast<const int64_t*>(data)[index];
}

}  // namespace logitless
