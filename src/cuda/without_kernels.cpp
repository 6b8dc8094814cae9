// Replaces everything that needs CUDA's compiler and runtime. There is no device, plans are made for models
// of devices, and nothing runs.
#include "core/status.h"
#include "cuda/run/bound_plan.h"
#include "cuda/runtime/device.h"
#include "cuda/tune/self_check.h"
#include "cuda/tune/tune.h"

namespace logitless::cuda {
namespace {

constexpr const char* kWhyNot = LOGITLESS_WHY_NO_CUDA;  // defined in cmake/cuda.cmake

[[noreturn]] void refuse() {
  throw Error(Status::kUnsupported, kWhyNot);
}

}  // namespace

class Replay {};

CudaPlan::CudaPlan(const Problem& problem, const PlanDetail& detail, const Device& device)
    : problem_(problem), detail_(detail), device_(device.ordinal) {}
CudaPlan::~CudaPlan() = default;
void CudaPlan::run(const Buffers& /*buffers*/, Workspace /*workspace*/, void* /*stream*/,
                   const Communicator* /*group*/) const {
  refuse();
}

void scale(std::span<const GradientArray> /*arrays*/, const void* /*factor*/,
           const BackendOptions& /*options*/, void* /*stream*/) {
  refuse();
}

void divergence(const Divergence& /*divergence*/, const BackendOptions& /*options*/, void* /*stream*/) {
  refuse();
}

uint64_t candidates_bytes(const Candidates& /*candidates*/, const BackendOptions& /*options*/) {
  refuse();
}
void candidates(const Candidates& /*candidates*/, const BackendOptions& /*options*/, Workspace /*workspace*/,
                void* /*stream*/) {
  refuse();
}

void noise(const NoiseLists& /*lists*/, const BackendOptions& /*options*/, void* /*stream*/) {
  refuse();
}

int device_count(std::string* why_not) {
  if (why_not != nullptr) *why_not = kWhyNot;
  return 0;
}
void query_versions(int* driver, int* runtime) {
  *driver = *runtime = 0;
}
int64_t cublaslt_version(std::string* why_not) {
  *why_not = kWhyNot;
  return 0;
}
const Device& query_device(int /*ordinal*/) {
  static const Device none = [] {
    Device device;
    device.why_not = kWhyNot;
    return device;
  }();
  return none;
}

Device checked_device(int ordinal, const std::string& /*requested*/) {
  return query_device(ordinal);
}
std::string tune(const TuneOptions& /*options*/) {
  refuse();
}

}  // namespace logitless::cuda
