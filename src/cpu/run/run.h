#pragma once
#include "core/parallel.h"
#include "core/plan.h"
#include "core/problem.h"
#include "cpu/plan/schedule.h"
#include "cpu/plan/shape.h"
#include "cpu/simd/kernels.h"

namespace logitless::cpu {

// A problem with its kernels and its schedule.
class CpuPlan final : public BackendPlan {
 public:
  CpuPlan(const Problem& problem, const Kernels& kernels, const Shape& shape, const Schedule& schedule,
          const ParallelFor& pool)
      : problem_(problem), kernels_(kernels), shape_(shape), schedule_(schedule), pool_(pool) {}

  void run(const Buffers& buffers, Workspace workspace, void* stream,
           const Communicator* group) const override;

 private:
  const Problem problem_;
  [[maybe_unused]] const Kernels& kernels_;  // not in a build without kernels
  const Shape shape_;
  const Schedule schedule_;
  const ParallelFor pool_;
};

}  // namespace logitless::cpu
