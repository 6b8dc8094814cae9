#include "cpu/run/divergence.h"

#include "core/divergence.h"
#include "cpu/simd/isa.h"

namespace logitless::cpu {

void divergence(const Divergence& d, const BackendOptions& options, void* /*stream*/) {
  const Kernels& kernels = select_kernels(Problem{}, options.isa);
  const auto stage =
      d.stage == DivergenceStage::kValues ? kernels.divergence_values : kernels.divergence_gradient;
  options.parallel_for(d.rows, [&](int64_t row, int) { stage(d, row); });
}

}  // namespace logitless::cpu
