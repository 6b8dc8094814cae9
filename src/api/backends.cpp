#include "api/run.h"

#include "core/status.h"
#ifdef LOGITLESS_WITH_CPU
#include "cpu/backend.h"
#endif
#include "cuda/backend.h"
#include "reference/backend.h"

namespace logitless {

std::span<const Backend* const> all_backends() {
  static const Backend* const kBackends[] = {&cuda_backend(),
#ifdef LOGITLESS_WITH_CPU
                                             &cpu::backend(),
#endif
                                             &reference::backend()};
  return kBackends;
}

std::vector<DeviceInfo> all_devices(std::string* why_none) {
  return cuda_backend().devices(why_none);
}

std::string tune(const TuneOptions& options) {
  return cuda_backend().tune(options);
}

const Backend& backend_by_name(const std::string& name, const BackendOptions& options) {
  std::string known;
  for (const Backend* backend : all_backends()) {
    if (name == backend->name) {
      const std::string why = backend->why_unavailable(options);
      if (why.empty()) return *backend;
      throw Error(Status::kBackendUnavailable, "backend: " + name + " is not usable here: " + why);
    }
    known += (known.empty() ? "" : ", ") + std::string(backend->name);
  }
  throw Error(Status::kBackendUnavailable,
              ErrorInfo{.argument = "backend", .expected = "one of " + known, .got = name});
}

const Backend& choose_backend(const std::string& name, const Problem& problem,
                              const BackendOptions& options) {
  if (!name.empty()) {
    const Backend& backend = backend_by_name(name, options);
    const std::string why = backend.why_unsupported(problem, options);
    if (why.empty()) return backend;
    throw Error(Status::kUnsupported, "backend " + name + " cannot run this problem: " + why);
  }
  std::string reasons;
  for (const Backend* backend : all_backends()) {
    if (backend->device_memory == options.on_host()) continue;  // not for buffers in this memory
    std::string why = backend->why_unavailable(options);
    if (why.empty()) why = backend->why_unsupported(problem, options);
    if (why.empty()) return *backend;
    reasons += (reasons.empty() ? "" : "; ") + std::string(backend->name) + ": " + why;
  }
  throw Error(Status::kUnsupported, "no backend can run this problem: " + reasons);
}

}  // namespace logitless
