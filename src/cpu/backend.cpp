#include "cpu/backend.h"

#include <fstream>
#include <limits>

#include "core/divergence.h"
#include "core/status.h"

namespace logitless::cpu {
namespace {

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    const size_t colon = line.find(':');
    if (line.starts_with("model name") && colon + 2 < line.size()) return line.substr(colon + 2);
  }
  return "processor";
}

std::string why_unavailable(const BackendOptions& options) {
  return why_engine_unavailable(options.engine);
}

std::string describe(const BackendOptions& options) {
  Problem bf16;
  bf16.dtype.hidden = DType::kBF16;
  bf16.dtype.weight = DType::kBF16;
  const std::string pairs = select_kernels(bf16, options.engine).name;
  const std::string other = select_kernels(Problem{}, options.engine).name;
  return processor_name() + ", " + std::to_string(options.parallel_for.threads) + " threads; runs " +
         usable_engines() + "; uses " + other + (pairs == other ? "" : ", " + pairs + " for bfloat16");
}

std::string why_unsupported(const Problem& problem, const BackendOptions& options) {
  if (!options.on_host()) return "the buffers are in the memory of a CUDA device";
  if (problem.dtype.hidden == DType::kF64) return "float64 is computed by the reference backend";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (problem.is_sparsified() && (problem.vocab > kMost || problem.tokens > kMost)) {
    return "sparsified gradients take at most 2^31 - 1 tokens and weight rows";
  }
  if (problem.is_sparsified() && problem.in_group() && problem.vocab_total > kMost) {
    return "sparsified gradients take a vocab_total of at most 2^31 - 1 in a group of ranks";
  }
  return "";
}

// Runs the fp32 kernel: divergences take float32 products.
void divergence(const Divergence& d, const BackendOptions& options, void* /*stream*/) {
  const DivergenceRow& stages = select_kernels(Problem{}, options.engine).divergence;
  if (stages.sums == nullptr) throw Error(Status::kUnsupported, "this build has no kernels");
  options.parallel_for(d.rows, [&](int64_t row, int) { stages.run(d, row); });
}

}  // namespace

const Backend& backend() {
  static const Backend kBackend{.name = "cpu",
                                .device_memory = false,
                                .why_unavailable = why_unavailable,
                                .describe = describe,
                                .why_unsupported = why_unsupported,
                                .plans = plans,
                                .scale = scale_on_host,
                                .divergence = divergence,
                                .candidates_bytes = candidates_bytes,
                                .candidates = candidates,
                                .noise = noise_on_host,
                                .devices = nullptr};
  return kBackend;
}

}  // namespace logitless::cpu
