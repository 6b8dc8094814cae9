#include "train/cuda/cublaslt.h"

#include <dlfcn.h>

#include <cstdlib>
#include <type_traits>

namespace logitless::train::cuda {
namespace {

void* open_library(std::string& why_not) {
  const char* path = std::getenv("LOGITLESS_CUBLASLT");
  const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
  void* library = path != nullptr ? ::dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  for (const char* name : names) {
    if (library == nullptr && path == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) why_not = ::dlerror();
  return library;
}

CublasLt find_all() {
  CublasLt f{};
  void* library = open_library(f.why_not);
  const auto find = [&](const char* name, auto& function) {
    if (library == nullptr) return;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr) f.why_not = std::string("it lacks ") + name;
  };
  find("cublasLtCreate", f.create);
  find("cublasLtDestroy", f.destroy);
  find("cublasLtMatmulDescCreate", f.desc_create);
  find("cublasLtMatmulDescSetAttribute", f.desc_set);
  find("cublasLtMatmulDescDestroy", f.desc_destroy);
  find("cublasLtMatrixLayoutCreate", f.layout_create);
  find("cublasLtMatrixLayoutDestroy", f.layout_destroy);
  find("cublasLtMatmulPreferenceCreate", f.preference_create);
  find("cublasLtMatmulPreferenceSetAttribute", f.preference_set);
  find("cublasLtMatmulPreferenceDestroy", f.preference_destroy);
  find("cublasLtMatmulAlgoGetHeuristic", f.heuristic);
  find("cublasLtMatmul", f.matmul);
  find("cublasLtGetVersion", f.version);
  return f;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt functions = find_all();
  return functions;
}

}  // namespace logitless::train::cuda
