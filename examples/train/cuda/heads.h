#pragma once

// The heads of train/head.h on a device: hidden states, classifier, targets and gradients are there.

#include <logitless/logitless.hpp>

#include <cstdint>
#include <memory>

#include "train/cuda/session.h"
#include "train/head.h"

namespace logitless::train::cuda {

// The session must outlive the heads.
std::unique_ptr<Head> make_materialized_head(Session& session);
std::unique_ptr<Head> make_fused_head(Session& session, Context context, int64_t max_workspace_bytes,
                                      const HeadGradient& gradient);

}  // namespace logitless::train::cuda
