#pragma once
#include <vector>

#include "core/backend.h"
#include "cpu/plan/shape.h"

namespace logitless::cpu {

// The backend with vectorised kernels for fp32, bf16 and fp16 on the host's processor.
const Backend& backend();

// A problem with its kernels and its schedule; run/run.cpp runs it.
class CpuPlan final : public BackendPlan {
 public:
  CpuPlan(const Problem& problem, const Kernels& kernels, const Shape& shape, const Schedule& schedule,
          const ParallelFor& pool)
      : problem_(problem), kernels_(kernels), shape_(shape), schedule_(schedule), pool_(pool) {}

  void run(const Buffers& buffers, Workspace workspace, void* stream,
           const Communicator* group) const override;

 private:
  const Problem problem_;
  [[maybe_unused]] const Kernels& kernels_;  // unused in a build without kernels
  const Shape shape_;
  const Schedule schedule_;
  const ParallelFor pool_;
};

// Implement Backend::candidates.
uint64_t candidates_bytes(const Candidates& candidates, const BackendOptions& options);
void candidates(const Candidates& candidates, const BackendOptions& options, Workspace workspace,
                void* stream);

std::vector<Plan> plans(const Problem& problem, const BackendOptions& options, uint64_t max_workspace_bytes);

}  // namespace logitless::cpu
