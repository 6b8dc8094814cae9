#pragma once

// What products.cpp needs of cuBLASLt, opened at run time so that this program starts on machines without it.
// The declarations follow NVIDIA's documentation of cublasLt.h, whose numbers are part of a stable ABI.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace logitless::train::cuda {

namespace lt {
constexpr int kComputeF32 = 68;                            // cublasComputeType_t
constexpr int kRealF32 = 0;                                // cudaDataType_t
constexpr int kTransA = 3, kTransB = 4;                    // cublasLtMatmulDescAttributes_t
constexpr int32_t kOpN = 0, kOpT = 1;                      // cublasOperation_t
constexpr int kWorkspaceBytes = 1, kReductionSchemes = 3;  // cublasLtMatmulPreferenceAttributes_t
constexpr int kAlignments[] = {5, 6, 7, 8};                // the same: least bytes of a, b, c and d
constexpr uint32_t kReduceInWorkspace = 2;                 // cublasLtReductionScheme_t

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};
struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
}  // namespace lt

struct CublasLt {
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*desc_create)(void** desc, int compute, int scale_type);
  int (*desc_set)(void* desc, int attribute, const void* value, size_t size);
  int (*desc_destroy)(void* desc);
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t size);
  int (*preference_destroy)(void* preference);
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                   int requested, lt::Heuristic* results, int* returned);
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,
                void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                const lt::Algorithm* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream);
  size_t (*version)();
  std::string why_not;  // empty: all of them are there
};

// The file that LOGITLESS_CUBLASLT names, else what the dynamic linker finds.
const CublasLt& cublaslt();

}  // namespace logitless::train::cuda
