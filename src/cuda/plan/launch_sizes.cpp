#include "cuda/plan/launch_sizes.h"

#include <algorithm>

#include "cuda/run/arena.h"

namespace logitless::cuda {

LogitsArgs LaunchSizes::of(const EpilogueArgs& epilogue, int64_t chunk) const {
  LogitsArgs args;
  args.of_epilogue = epilogue;
  args.dtype = operand_dtype(p_);
  args.rows = chunk;
  args.columns = p_.vocab;
  args.depth = padded_hidden(p_);
  args.transform = logit_transform<float>(p_);
  args.batch_invariant = p_.batch_invariant;
  return args;
}

int64_t LaunchSizes::slots(int64_t chunk) const {
  const auto [at, is_new] = slots_.try_emplace(chunk, 1);
  if (is_new && p_.needs_forward()) {
    at->second = engine_.slots(of(p_.top_k > 0 ? EpilogueArgs(TopArgs{}) : StatsArgs{}, chunk), device_);
  }
  if (is_new && p_.is_thinned()) {
    at->second = std::max<int64_t>(at->second, engine_.slots(of(ThinArgs{}, chunk), device_));
  }
  return at->second;
}

std::string LaunchSizes::config(int64_t chunk) const {
  const auto main_epilogue = [&]() -> EpilogueArgs {
    if (p_.is_thinned()) return ThinArgs{};
    if (p_.top_k > 0) return TopArgs{};
    return p_.needs_forward() ? EpilogueArgs(StatsArgs{}) : GradientArgs{};
  };
  return engine_.config(of(main_epilogue(), chunk));
}

}  // namespace logitless::cuda
