#pragma once
// Between the plain structs of the C ABI and the library's own types.
#include <cstddef>

#include "core/backend.h"
#include "core/divergence.h"
#include "logitless/distributed.h"
#include "logitless/divergence.h"
#include "logitless/logitless.h"
#include "run.h"

namespace logitless {

// Copies the part of a caller's struct that both sides know over the defaults.
logitless_context_options complete(const logitless_context_options* given);
logitless_problem complete(const logitless_problem* given);
logitless_buffers complete(const logitless_buffers* given);
logitless_communicator complete(const logitless_communicator* given);
logitless_divergence complete(const logitless_divergence* given);

Context to_context(const logitless_context_options& options);
Problem to_problem(const logitless_problem& problem);
Buffers to_buffers(const logitless_buffers& buffers);
Communicator to_communicator(const logitless_communicator& communicator);
Divergence to_divergence(const logitless_divergence& divergence);  // checked

// Writes as much of the info as the caller's struct_size has room for.
void write_plan_info(const Plan& plan, const Problem& problem, const char* backend,
                     logitless_plan_info* info);
void write_device_info(const DeviceInfo& device, logitless_device_info* info);

// Cuts text to the size of the buffer, always terminated; does nothing for a null or empty buffer.
void write_text(const char* text, char* buffer, size_t size);

}  // namespace logitless
