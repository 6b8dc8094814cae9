#include "cuda/runtime/cublaslt.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

namespace logitless::cuda {
namespace {

void* open_library() {
  if (const char* path = std::getenv("LOGITLESS_CUBLASLT")) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

template <class F>
bool find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

bool find_all(void* library, CublasLt* f) {
  return find(library, "cublasLtCreate", &f->create) &&
         find(library, "cublasLtMatmulDescCreate", &f->desc_create) &&
         find(library, "cublasLtMatmulDescSetAttribute", &f->desc_set) &&
         find(library, "cublasLtMatmulDescDestroy", &f->desc_destroy) &&
         find(library, "cublasLtMatrixLayoutCreate", &f->layout_create) &&
         find(library, "cublasLtMatrixLayoutDestroy", &f->layout_destroy) &&
         find(library, "cublasLtMatmulPreferenceCreate", &f->preference_create) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", &f->preference_set) &&
         find(library, "cublasLtMatmulPreferenceDestroy", &f->preference_destroy) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", &f->heuristic) &&
         find(library, "cublasLtMatmulAlgoCheck", &f->check) && find(library, "cublasLtMatmul", &f->matmul) &&
         find(library, "cublasLtGetVersion", &f->version);
}

}  // namespace

const CublasLt* cublaslt(std::string* why_not) {
  static std::mutex mutex;
  static CublasLt functions;
  static bool is_open = false;
  const std::lock_guard lock(mutex);
  if (!is_open) {  // retried after a failure: PyTorch may have loaded it since
    void* library = open_library();
    const char* reason = library == nullptr ? dlerror() : nullptr;
    if (library != nullptr && !find_all(library, &functions)) reason = "it lacks a function that is needed";
    is_open = library != nullptr && reason == nullptr;
    if (!is_open && why_not != nullptr) {
      *why_not =
          std::string(
              "cuBLASLt cannot be opened (import torch first, or name its file in LOGITLESS_CUBLASLT): ") +
          (reason != nullptr ? reason : "not found");
    }
  }
  return is_open ? &functions : nullptr;
}

}  // namespace logitless::cuda
