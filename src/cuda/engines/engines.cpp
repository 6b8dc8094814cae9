#include <algorithm>

#include "cuda/engines/engine.h"
#include "cuda/engines/mma/launch.h"
#include "cuda/engines/portable/launch.h"
#include "cuda/engines/sm90/launch.h"
#include "cuda/run/arena.h"
#include "cuda/run/top/sizes.h"

namespace logitless::cuda {

const std::vector<const Engine*>& engines() {
  static const std::vector<const Engine*> all{&sm90::engine(), &mma::engine(), &portable::engine()};
  return all;
}

const Engine* engine_named(const std::string& name) {
  const auto at = std::find_if(engines().begin(), engines().end(),
                               [&](const Engine* engine) { return engine->name() == name; });
  return at == engines().end() ? nullptr : *at;
}

Work work_of(const Problem& problem) {
  if (problem.is_sparsified()) return Work::kSparsified;
  const bool is_exact = problem.needs_backward() || problem.has.saved || problem.batch_invariant;
  return is_exact ? Work::kExact : Work::kLoss;
}

Choice choose_engine(const Problem& problem, const Device& device, const std::string& requested) {
  const DType operands = operand_dtype(problem);
  const auto refusal = [&](const Engine& engine) {
    std::string against = engine.why_not(device, operands);
    if (against.empty() && device.untrusted_engine == engine.name()) against = device.why_untrusted;
    return against.empty() ? why_not_listed(problem, engine.traits()) : against;
  };
  if (const Engine* engine = engine_named(requested); engine != nullptr && refusal(*engine).empty()) {
    return {engine, "requested"};
  }
  const std::string& fastest = device.measured.engines[static_cast<size_t>(work_of(problem))];
  if (const Engine* engine = engine_named(fastest); engine != nullptr && refusal(*engine).empty()) {
    return {engine, "the fastest of those measured, device record " + device.measured.source};
  }
  std::string reason;  // why the preferred engine was not taken
  std::string opt_in;  // engines that would do, but only when requested
  for (const Engine* engine : engines()) {
    const std::string against = refusal(*engine);
    if (!against.empty()) {
      if (reason.empty()) reason = against;
    } else if (!engine->opt_in_reason(device).empty()) {
      opt_in += "; " + engine->opt_in_hint(device);
    } else {
      return {engine, (reason.empty() ? engine->reason() : reason + opt_in)};
    }
  }
  return {engines().back(), reason};
}

#ifdef LOGITLESS_WHY_NO_CUDA  // plans of such a build never run
void sm90::launch_logits(const LogitsArgs&, const Queue&) {
  throw Error(Status::kUnsupported, LOGITLESS_WHY_NO_CUDA);
}
void mma::launch_logits(const LogitsArgs&, const Queue&) {
  throw Error(Status::kUnsupported, LOGITLESS_WHY_NO_CUDA);
}
template <class Real>
void portable::launch_logits(const LogitsArgsOf<Real>&, const LogitsScratch&, const Queue&) {
  throw Error(Status::kUnsupported, LOGITLESS_WHY_NO_CUDA);
}
template void portable::launch_logits(const LogitsArgs&, const LogitsScratch&, const Queue&);
template void portable::launch_logits(const LogitsArgsOf<double>&, const LogitsScratch&, const Queue&);
#endif

}  // namespace logitless::cuda
