#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "commands/bench.h"

// The function is also compiled for wider vector units; the program chooses one when it starts.
#if defined(__x86_64__) && defined(__linux__)
#define LOGITLESS_BENCH_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LOGITLESS_BENCH_CLONES
#endif

namespace logitless::cli {
namespace {

// Functions of dnnl.h, as in oneDNN 1 to 3.
struct OneDnn {
  int (*sgemm)(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*, int64_t,
               float, float*, int64_t) = nullptr;
  const int* (*version)() = nullptr;   // the beginning of dnnl_version_t: major, minor, patch
  void (*set_threads)(int) = nullptr;  // sets OpenMP's threads, if oneDNN is built with OpenMP
  std::string why_not;                 // empty if the first two functions are there
};

const OneDnn& one_dnn() {
  static const OneDnn kLibrary = [] {
    OneDnn library;
    void* handle = nullptr;
    for (const char* name : {"libdnnl.so.3", "libdnnl.so.2", "libdnnl.so.1"}) {
      handle = handle != nullptr ? handle : ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle == nullptr)
        library.why_not += (library.why_not.empty() ? "" : "; ") + std::string(::dlerror());
    }
    if (handle == nullptr) return library;
    library.why_not.clear();
    library.sgemm = reinterpret_cast<decltype(library.sgemm)>(::dlsym(handle, "dnnl_sgemm"));
    library.version = reinterpret_cast<decltype(library.version)>(::dlsym(handle, "dnnl_version"));
    library.set_threads =
        reinterpret_cast<decltype(library.set_threads)>(::dlsym(handle, "omp_set_num_threads"));
    if (library.sgemm == nullptr || library.version == nullptr) library.why_not = "it lacks dnnl_sgemm";
    return library;
  }();
  return kLibrary;
}

// Computes c [m, n] = a [m, k] b [k, n] in row-major order; 'T' takes an operand's transpose.
void gemm(char a_op, char b_op, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
          int64_t ldb, float* c) {
  const int status = one_dnn().sgemm(a_op, b_op, m, n, k, 1.0F, a, lda, b, ldb, 0.0F, c, n);
  if (status != 0) throw std::runtime_error("dnnl_sgemm failed with status " + std::to_string(status));
}

LOGITLESS_BENCH_CLONES float row_exponentials(float* z, int64_t count, float max) {
  float sum = 0.0F;
  for (int64_t j = 0; j < count; ++j) {
    z[j] = std::exp(z[j] - max);
    sum += z[j];
  }
  return sum;
}

}  // namespace

std::string why_not_materialized() {
  const std::string& why_not = one_dnn().why_not;
  if (why_not.empty()) return "";
  return "oneDNN, which multiplies the matrices, cannot be opened; install it (Debian: libdnnl-dev): " +
         why_not;
}

std::string materialized_by() {
  const int* version = one_dnn().version();
  return "oneDNN " + std::to_string(version[0]) + "." + std::to_string(version[1]) + "." +
         std::to_string(version[2]);
}

double materialized_loss(const BenchShape& shape, const float* hidden, const float* weight,
                         const int32_t* targets, float* d_hidden, float* d_weight, int threads) {
  const auto& [tokens, vocab, dim] = shape;
  if (threads > 0 && one_dnn().set_threads != nullptr) one_dnn().set_threads(threads);
  std::vector<float> logits(static_cast<size_t>(tokens * vocab));
  gemm('N', 'T', tokens, vocab, dim, hidden, dim, weight, dim, logits.data());
  std::vector<double> losses(static_cast<size_t>(tokens));
  // If gradients follow, logits become dz = (softmax - onehot) / N.
  const auto rows = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float* z = logits.data() + row * vocab;
      const float max = *std::max_element(z, z + vocab), target_logit = z[targets[row]];
      const double sum = row_exponentials(z, vocab, max);
      losses[static_cast<size_t>(row)] = std::log(sum) + static_cast<double>(max - target_logit);
      if (d_hidden == nullptr) continue;
      const auto scale = static_cast<float>(1 / (sum * static_cast<double>(tokens)));
      for (int64_t j = 0; j < vocab; ++j) z[j] *= scale;
      z[targets[row]] -= 1 / static_cast<float>(tokens);
    }
  };
  const int64_t workers = threads > 0 ? threads : std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::jthread> pool;
  for (int64_t i = 0; i < workers; ++i)
    pool.emplace_back(rows, tokens * i / workers, tokens * (i + 1) / workers);
  pool.clear();  // waits for the threads
  if (d_hidden != nullptr) {
    gemm('N', 'N', tokens, dim, vocab, logits.data(), vocab, weight, dim, d_hidden);
    gemm('T', 'N', vocab, dim, tokens, logits.data(), vocab, hidden, dim, d_weight);
  }
  double total = 0;
  for (const double loss : losses) total += loss;
  return total / static_cast<double>(tokens);
}

}  // namespace logitless::cli
