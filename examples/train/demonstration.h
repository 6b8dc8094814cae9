#pragma once

#include <logitless/logitless.hpp>

#include <functional>
#include <string>

#include "train/device.h"
#include "train/results.h"
#include "train/settings.h"

namespace logitless::train {

// Reads the text, learns the vocabulary, trains some steps with the materialized head and then the whole run
// with the fused one, all on `device`, whose memory is `context`'s, and writes tokenizer.json and
// model.safetensors into the output folder. `say` gets lines for people as things happen. Throws Error,
// LOGITLESS_BUDGET_TOO_SMALL, before anything is read or written where the budget is too small for any plan.
Results run_demonstration(const Settings& settings, Device& device, Context context,
                          const std::function<void(const std::string&)>& say);

}  // namespace logitless::train
