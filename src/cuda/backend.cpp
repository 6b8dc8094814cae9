#include "cuda/backend.h"
#include "core/status.h"

#include <algorithm>
#include <limits>

#include "cuda/engines/engine.h"
#include "cuda/plan/device_models.h"
#include "cuda/plan/plans.h"
#include "cuda/run/arena.h"
#include "cuda/run/bound_plan.h"
#include "cuda/run/sparsified/sizes.h"
#include "cuda/runtime/device.h"
#include "cuda/tune/self_check.h"
#include "cuda/tune/tune.h"

namespace logitless {
namespace {

using cuda::Device;
using cuda::query_device;

const Device& device_of(const BackendOptions& options) {
  if (!options.device_model.empty()) {
    const Device* model = cuda::device_model(options.device_model);
    static const Device none;
    return model != nullptr ? *model : none;
  }
  return query_device(std::max(options.device, 0));
}

// The device with the engines that may be used there, for plans.
Device checked_device_of(const BackendOptions& options) {
  if (!options.device_model.empty()) return device_of(options);
  return cuda::checked_device(std::max(options.device, 0), options.engine);
}

std::string engine_names(const char* between) {
  std::string names;
  for (const cuda::Engine* engine : cuda::engines())
    names += (names.empty() ? "" : between) + std::string(engine->name());
  return names;
}

// Describes which engine serves which operands.
std::string engines_of(const Device& device) {
  const auto name_for = [&](DType operands) {
    const auto takes = [&](const cuda::Engine* engine) {
      return engine->opt_in_reason(device).empty() && engine->why_not(device, operands).empty() &&
             engine->name() != device.untrusted_engine;
    };
    return std::string((*std::find_if(cuda::engines().begin(), cuda::engines().end(), takes))->name());
  };
  const std::string halves = name_for(DType::kBF16), others = name_for(DType::kF32);
  std::string text = halves == others ? others : halves + " for 16-bit operands, " + others + " for others";
  for (const cuda::Engine* engine : cuda::engines()) {
    if (engine->opt_in_reason(device).empty() || !engine->why_not_on(device).empty()) continue;
    text += "; " + engine->opt_in_hint(device);
  }
  const cuda::Measured& measured = device.measured;
  std::string fastest;
  for (size_t i = 0; i < measured.engines.size(); ++i) {
    if (measured.engines[i].empty()) continue;
    fastest += (fastest.empty() ? "" : ", ") + measured.engines[i] + " for " + cuda::kWorkNames[i];
  }
  if (!fastest.empty()) text += "; measured as fastest: " + fastest;
  if (!device.why_untrusted.empty()) text += "; " + device.why_untrusted;
  return text;
}

std::string why_unavailable(const BackendOptions& options) {
  const Device& device = device_of(options);
  if (!device.why_not.empty()) return device.why_not;
  if (!options.device_model.empty() && device.name.empty()) {
    throw Error(Status::kBackendUnavailable, ErrorInfo{.argument = "device_model",
                                                       .expected = "one of " + cuda::known_models(),
                                                       .got = options.device_model});
  }
  const cuda::Engine* requested = cuda::engine_named(options.engine);
  if (!options.engine.empty() && requested == nullptr) {
    return "its engines are " + engine_names(" and ") + ", not " + options.engine;
  }
  if (std::string why = requested == nullptr ? "" : requested->why_not_on(device); !why.empty()) return why;
  if (!options.device_model.empty()) return "";
  if (!device.measured.why_unreadable.empty()) return device.measured.why_unreadable;
  std::string why_not;
  cuda::cublaslt_version(&why_not);
  if (!why_not.empty() || requested == nullptr) return why_not;
  const Device checked = checked_device_of(options);
  return requested->name() == checked.untrusted_engine ? checked.why_untrusted : "";
}

std::string describe(const BackendOptions& options) {
  const Device device = checked_device_of(options);
  if (device.name.empty()) return "no device";
  return device.name + ", compute capability " + device.capability_text() + ", " +
         std::to_string(device.processors) + " multiprocessors, " +
         std::to_string(device.memory_bytes >> 30) + " GiB; uses " + engines_of(device);
}

std::string why_unsupported(const Problem& problem, const BackendOptions& options) {
  if (options.on_host()) return "the buffers are in host memory";
  const bool is_float64 = problem.dtype.hidden == DType::kF64;
  if (problem.is_sparsified()) {
    if (is_float64) {
      return "gradient must be exact with float64 operands; the reference backend sparsifies them, on the "
             "host";
    }
    for (const DType dtype : {problem.dtype.hidden, problem.dtype.weight}) {
      if (!problem.rounds(dtype) || dtype == DType::kF32) continue;
      return std::string("sparsified gradients round float32 operands only: compute_dtype is ") +
             dtype_name(problem.compute_dtype) + ", an operand " + dtype_name(dtype);
    }
    std::string why = cuda::why_not_sparsified(problem, device_of(options).capability);
    if (!why.empty()) return why;
  }
  if (problem.num_samples > 0 && is_float64) {
    return "num_samples must be 0 with float64 operands; the reference backend samples from them, on the "
           "host";
  }
  if (problem.in_group() && is_float64) return "operands must not be float64 in a group of ranks";
  if (problem.in_group() && problem.vocab_total > std::numeric_limits<int32_t>::max()) {
    return "vocab_total must be below 2^31 in a group of ranks";
  }
  if (problem.tokens >= cuda::kMostColumns) return "tokens must be below 2^30";
  if (problem.vocab >= cuda::kMostColumns) return "vocab must be below 2^30";
  const cuda::Engine* requested = cuda::engine_named(options.engine);
  return requested == nullptr ? "" : requested->why_not_of(cuda::operand_dtype(problem));
}

std::vector<Plan> plans(const Problem& problem, const BackendOptions& options, uint64_t max_workspace_bytes) {
  return cuda::make_plans(problem, checked_device_of(options), options.engine, max_workspace_bytes);
}

std::vector<DeviceInfo> devices(std::string* why_none) {
  std::vector<DeviceInfo> out(static_cast<size_t>(cuda::device_count(why_none)));
  for (size_t i = 0; i < out.size(); ++i) {
    BackendOptions options;
    options.device = static_cast<int>(i);
    const Device& device = query_device(options.device);
    DeviceInfo& info = out[i];
    info.name = device.name;
    info.compute_capability = device.capability;
    info.processors = device.processors;
    info.memory_bytes = device.memory_bytes;
    cuda::query_versions(&info.driver_version, &info.runtime_version);
    std::string why_no_cublaslt;
    info.cublaslt_version = cuda::cublaslt_version(&why_no_cublaslt);
    info.why_unavailable = why_unavailable(options);
    info.record = device.measured.source;
  }
  return out;
}

}  // namespace

const Backend& cuda_backend() {
  static const Backend backend{.name = "cuda",
                               .device_memory = true,
                               .why_unavailable = why_unavailable,
                               .describe = describe,
                               .why_unsupported = why_unsupported,
                               .plans = plans,
                               .scale = cuda::scale,
                               .divergence = cuda::divergence,
                               .candidates_bytes = cuda::candidates_bytes,
                               .candidates = cuda::candidates,
                               .noise = cuda::noise,
                               .devices = devices,
                               .tune = cuda::tune};
  return backend;
}

}  // namespace logitless
