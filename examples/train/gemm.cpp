#include "train/gemm.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace logitless::train {
namespace {

// As dnnl.h of oneDNN 1 to 3 has them.
struct Version {
  int major, minor, patch;  // the beginning of dnnl_version_t
};
using Sgemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*,
                      int64_t, float, float*, int64_t);

struct OneDnn {
  Sgemm sgemm = nullptr;
  const Version* (*version)() = nullptr;
  std::string why_not;  // empty where both are there
};

OneDnn open_library() {
  OneDnn library;
  void* handle = nullptr;
  for (const char* name : {"libdnnl.so.3", "libdnnl.so.2", "libdnnl.so.1"}) {
    handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    library.why_not += (library.why_not.empty() ? "" : "; ") + std::string(::dlerror());
  }
  if (handle == nullptr) return library;
  library.why_not.clear();
  library.sgemm = reinterpret_cast<Sgemm>(::dlsym(handle, "dnnl_sgemm"));
  library.version = reinterpret_cast<decltype(library.version)>(::dlsym(handle, "dnnl_version"));
  if (library.sgemm == nullptr || library.version == nullptr) library.why_not = "it lacks dnnl_sgemm";
  return library;
}

const OneDnn& one_dnn() {
  static const OneDnn library = open_library();
  return library;
}

}  // namespace

std::string why_no_gemm() {
  const std::string& why_not = one_dnn().why_not;
  if (why_not.empty()) return "";
  return "oneDNN, which multiplies the matrices, cannot be opened; install it (Debian: libdnnl-dev): " +
         why_not;
}

void gemm(Op a_op, Op b_op, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc) {
  if (!one_dnn().why_not.empty()) throw std::runtime_error(why_no_gemm());
  const int status = one_dnn().sgemm(a_op == Op::kTranspose ? 'T' : 'N', b_op == Op::kTranspose ? 'T' : 'N',
                                     m, n, k, 1.0F, a, lda, b, ldb, beta, c, ldc);
  if (status != 0) {
    throw std::runtime_error("dnnl_sgemm failed with status " + std::to_string(status) + " for m " +
                             std::to_string(m) + ", n " + std::to_string(n) + ", k " + std::to_string(k));
  }
}

std::string gemm_library() {
  const Version& version = *one_dnn().version();
  return "oneDNN " + std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
         std::to_string(version.patch);
}

}  // namespace logitless::train
