#pragma once
// Conversions between the plain structs of the C ABI and the library's own types.
#include <cstddef>

#include "api/run.h"
#include "core/backend.h"
#include "core/candidates.h"
#include "core/divergence.h"
#include "core/divergence_plan.h"
#include "core/sampling.h"
#include "logitless/candidates.h"
#include "logitless/distributed.h"
#include "logitless/divergence.h"
#include "logitless/logitless.h"
#include "logitless/sampling.h"

namespace logitless {

Context to_context(const logitless_context_options& options);
Problem to_problem(const logitless_option* options, size_t option_count, const logitless_tensor_desc* tensors,
                   size_t tensor_count);
Buffers to_buffers(const logitless_tensor* tensors, size_t count);
Communicator to_communicator(const logitless_communicator* communicator);
Candidates to_candidates(const logitless_candidates* candidates, bool sizes_only);  // validated
Divergence to_divergence(const logitless_divergence* divergence);                   // validated
DivergenceProblem to_divergence_problem(const logitless_divergence_problem* problem, bool on_host);
NoiseLists to_noise_lists(const logitless_sample_noise* lists);  // validated
logitless_divergence_tiles to_c(const DivergenceTiles& tiles);

void write_plan_info(const Plan& plan, const Problem& problem, const char* backend,
                     logitless_plan_info* info);
// Throws if an option is out of range.
TuneOptions to_tune_options(const logitless_tune_options& given);
void write_device_info(const DeviceInfo& device, logitless_device_info* info);

// Returns options and tensors as JSON.
std::string schema_text();

// Copies text to the buffer, cut to its size and always terminated. A null or empty buffer is left alone.
void write_text(const char* text, char* buffer, size_t size);

}  // namespace logitless
