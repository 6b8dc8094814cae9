#include "cuda/engines/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"
#include "cuda/engines/sm90/config.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda::sm90 {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Queried from the runtime, so that the library does not link the driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                         &result),
        "cudaGetDriverEntryPointByVersion");
  if (result != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Error(Status::kInternal, "CUDA: the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<Encode>(function);
}

CUtensorMapDataType type_of(DType dtype) {
  if (dtype == DType::kE4M3) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

}  // namespace

CUtensorMap make_tensor_map(const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                            int box_rows) {
  static const Encode encode = find_encode();
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * size_of(dtype)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(block_depth(dtype)), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = encode(&map, type_of(dtype), 2, const_cast<void*>(data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::kInternal, "CUDA: cuTensorMapEncodeTiled: error " + std::to_string(result) +
                                       " for [" + std::to_string(rows) + ", " + std::to_string(columns) +
                                       "] with stride " + std::to_string(stride));
  }
  return map;
}

}  // namespace logitless::cuda::sm90
