#pragma once

#include <functional>
#include <string>

#include "options.h"
#include "train/results.h"
#include "train/settings.h"

namespace headroom::train {

// Reads the text, learns the vocabulary, trains some steps with the materialized head and then the whole run
// with the fused one, and writes tokenizer.json and model.safetensors into the output folder. `say` gets
// lines for people as things happen.
Results run_demonstration(const Settings& settings, const cli::GlobalOptions& global,
                          const std::function<void(const std::string&)>& say);

}  // namespace headroom::train
