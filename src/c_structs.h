#pragma once
// Between the plain structs of the C ABI and the library's own types.
#include <cstddef>

#include "core/backend.h"
#include "core/divergence.h"
#include "headroom/distributed.h"
#include "headroom/divergence.h"
#include "headroom/headroom.h"
#include "run.h"

namespace headroom {

// Copies the part of a caller's struct that both sides know over the defaults.
headroom_context_options complete(const headroom_context_options* given);
headroom_problem complete(const headroom_problem* given);
headroom_buffers complete(const headroom_buffers* given);
headroom_communicator complete(const headroom_communicator* given);
headroom_divergence complete(const headroom_divergence* given);

Context to_context(const headroom_context_options& options);
Problem to_problem(const headroom_problem& problem);
Buffers to_buffers(const headroom_buffers& buffers);
Communicator to_communicator(const headroom_communicator& communicator);
Divergence to_divergence(const headroom_divergence& divergence);  // checked

// Writes as much of the info as the caller's struct_size has room for.
void write_plan_info(const Plan& plan, const Problem& problem, const char* backend, headroom_plan_info* info);
void write_device_info(const DeviceInfo& device, headroom_device_info* info);

// Cuts text to the size of the buffer, always terminated; does nothing for a null or empty buffer.
void write_text(const char* text, char* buffer, size_t size);

}  // namespace headroom
