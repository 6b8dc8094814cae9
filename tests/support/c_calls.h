#pragma once
// The C functions on options and tensors, called with the structs of logitless.hpp.
#include <logitless/distributed.hpp>

inline logitless_status logitless_plan_create(const logitless_context* context,
                                              const logitless::Problem* problem, logitless_plan** plan) {
  const auto options = problem->options();
  const auto tensors = problem->tensors();
  return logitless_plan_create(context, options.data(), options.size(), tensors.data(), tensors.size(), plan);
}

inline logitless_status logitless_plan_list(const logitless_context* context,
                                            const logitless::Problem* problem, logitless_plan_info* infos,
                                            int32_t capacity, int32_t* count) {
  const auto options = problem->options();
  const auto tensors = problem->tensors();
  return logitless_plan_list(context, options.data(), options.size(), tensors.data(), tensors.size(), infos,
                             capacity, count);
}

inline logitless_status logitless_run(const logitless_plan* plan, const logitless::Buffers* buffers,
                                      void* workspace, size_t workspace_bytes, void* stream) {
  const auto tensors = buffers->tensors();
  return logitless_run(plan, tensors.data(), tensors.size(), workspace, workspace_bytes, stream);
}

inline logitless_status logitless_run_group(const logitless_plan* plan, const logitless::Buffers* buffers,
                                            void* workspace, size_t workspace_bytes, void* stream,
                                            const logitless_communicator* communicator) {
  const auto tensors = buffers->tensors();
  return logitless_run_group(plan, tensors.data(), tensors.size(), workspace, workspace_bytes, stream,
                             communicator);
}
