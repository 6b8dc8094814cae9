#pragma once
// The part of cuBLASLt that plain matrix products need. It is opened at run time, so that the library loads
// on machines without it. Declarations follow NVIDIA's documentation of cublasLt.h; its numbers are part of a
// stable ABI.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace logitless::cuda {

namespace lt {
enum : int { kComputeF32 = 68, kComputeF64 = 70, kComputeF32FastTF32 = 77 };  // cublasComputeType_t
enum : int { kOpN = 0, kOpT = 1 };                                            // cublasOperation_t
enum : int { kPointerMode = 2, kTransA = 3, kTransB = 4 };  // cublasLtMatmulDescAttributes_t
enum : int { kWorkspaceBytes = 1, kReductionSchemes = 3, kAlignA = 5, kAlignB = 6, kAlignC = 7, kAlignD = 8 };
enum : int { kModeHost = 0, kModeDevice = 1 };  // cublasLtPointerMode_t
// Split-K partial sums go through the workspace, in the type of the sums and in a fixed order. They are never
// made in place or in the output's dtype.
enum : uint32_t { kReduceInWorkspace = 2 };  // cublasLtReductionScheme_t

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
  using Handle = void*;
  int (*create)(Handle*);
  int (*desc_create)(void** desc, int compute, int scale_type);
  int (*desc_set)(void* desc, int attribute, const void* value, size_t size);
  int (*desc_destroy)(void* desc);
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t size);
  int (*preference_destroy)(void* preference);
  int (*heuristic)(Handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int requested,
                   lt::Heuristic* results, int* returned);
  int (*check)(Handle, void* desc, void* a, void* b, void* c, void* d, const lt::Algorithm* algorithm,
               lt::Heuristic* result);
  int (*matmul)(Handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,
                void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                const lt::Algorithm* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream);
  size_t (*version)();
};

// Returns null with the reason in why_not if cuBLASLt cannot be opened. LOGITLESS_CUBLASLT names its file. If
// that is not set, it is a library that the process has already loaded (PyTorch brings it), or one in the
// dynamic linker's paths.
const CublasLt* cublaslt(std::string* why_not);

}  // namespace logitless::cuda
