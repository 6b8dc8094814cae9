// Entry points of the C ABI. Each catches everything and turns it into a status and the thread's message.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "api/c_structs.h"
#include "api/run.h"
#include "core/host_loss.h"
#include "core/status.h"
#include "core/targets.h"
#include "core/validate.h"
#include "distributed/nccl.h"
#include "logitless/candidates.h"
#include "logitless/distributed.h"
#include "logitless/divergence.h"
#include "logitless/logitless.h"
#include "logitless/sampling.h"

using namespace logitless;

struct logitless_context {
  Context context;
};

struct logitless_plan {
  PlannedProblem planned;
};

namespace {

// The calling thread's last failure.
struct LastError {
  Status status = Status::kOk;
  std::string message;
  ErrorInfo info;
};
LastError& last_error() {
  static thread_local LastError error;
  return error;
}

logitless_status fail(Status status, const char* message, const ErrorInfo* info = nullptr) noexcept {
  LastError& last = last_error();
  last.status = status;
  try {
    last.info = info != nullptr ? *info : ErrorInfo{};
    last.message = message;
  } catch (...) {
    last.message.clear();
  }
  return static_cast<logitless_status>(status);
}

template <class F>
logitless_status guarded(F&& body) noexcept {
  try {
    body();
    return LOGITLESS_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what(), error.info());
  } catch (const std::bad_alloc&) {
    return fail(Status::kOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return fail(Status::kInternal, error.what());
  } catch (...) {
    return fail(Status::kInternal, "an unknown exception");
  }
}

// Reads an enum as an int: a caller in C may pass any int, which as a C++ enum would be undefined behaviour.
template <class E>
int value_of(const E& given) {
  int value = 0;
  static_assert(sizeof value == sizeof given);
  std::memcpy(&value, &given, sizeof value);
  return value;
}

// Returns a problem for the functions on row statistics, to which only sizes, dtypes and options matter.
Problem stats_problem(const logitless_plan* plan) {
  Problem p = required(plan, "plan")->planned.problem;
  p.pass = Pass::kForward;
  return p;
}

Buffers stats_buffers(const Problem& problem, const logitless_tensor* tensors, size_t count) {
  const Buffers b = to_buffers(tensors, count);
  if (problem.tokens == 0) return b;
  required(b.max, "max");
  const WantedSums sums = wanted_sums(problem);
#define LOGITLESS_REQUIRE(name, ...) \
  if (sums.name) required(b.name, #name);
  LOGITLESS_ROW_SUMS(LOGITLESS_REQUIRE)
#undef LOGITLESS_REQUIRE
  if (problem.has.argmax) required(b.argmax, "argmax");
  return b;
}

// Checks the arguments of logitless_scale_gradients and leaves out empty arrays.
std::vector<GradientArray> gradient_arrays(int32_t count, void* const* data, const int32_t* dtypes,
                                           const int64_t* sizes) {
  if (count < 0) throw_invalid("count", "at least 0", std::to_string(count));
  std::vector<GradientArray> arrays;
  if (count == 0) return arrays;
  required(data, "data");
  required(dtypes, "dtypes");
  required(sizes, "sizes");
  for (int32_t k = 0; k < count; ++k) {
    const std::string place = "[" + std::to_string(k) + "]";
    const int32_t dtype = dtypes[k];
    if (dtype < LOGITLESS_F32 || dtype > LOGITLESS_F64) {
      throw_invalid("dtypes" + place, "a floating point dtype", std::to_string(dtype));
    }
    if ((dtype == LOGITLESS_F64) != (dtypes[0] == LOGITLESS_F64)) {
      throw_invalid("dtypes" + place, "float64 for all arrays or for none", std::to_string(dtype));
    }
    if (sizes[k] < 0) throw_invalid("sizes" + place, "at least 0", std::to_string(sizes[k]));
    if (sizes[k] == 0) continue;
    if (data[k] == nullptr) throw_invalid("data" + place, "a pointer", "null");
    arrays.push_back({data[k], static_cast<DType>(dtype), sizes[k]});
  }
  return arrays;
}

}  // namespace

extern "C" {

#define LOGITLESS_TEXT_OF(number) #number
#define LOGITLESS_DOTTED(major, minor, patch) \
  LOGITLESS_TEXT_OF(major) "." LOGITLESS_TEXT_OF(minor) "." LOGITLESS_TEXT_OF(patch)

const char* logitless_version(void) {
  return LOGITLESS_DOTTED(LOGITLESS_VERSION_MAJOR, LOGITLESS_VERSION_MINOR, LOGITLESS_VERSION_PATCH);
}

const char* logitless_status_name(logitless_status status) {
  return status_name(static_cast<Status>(value_of(status)));
}

const char* logitless_plan_kind_name(logitless_plan_kind kind) {
  return plan_kind_name(static_cast<PlanKind>(value_of(kind)));
}

int32_t logitless_abi_version(void) {
  return LOGITLESS_ABI_VERSION;
}

const char* logitless_last_error(void) {
  return last_error().message.c_str();
}

void logitless_last_error_info(logitless_error_info* info) {
  if (info == nullptr) return;
  const LastError& last = last_error();
  *info = {.status = static_cast<int32_t>(last.status),
           .argument = last.info.argument.c_str(),
           .expected = last.info.expected.c_str(),
           .got = last.info.got.c_str(),
           .required_bytes = last.info.required_bytes,
           .row = last.info.row};
}

const char* logitless_schema(void) {
  static const std::string text = schema_text();
  return text.c_str();
}

int32_t logitless_backend_count(void) {
  return static_cast<int32_t>(all_backends().size());
}

const char* logitless_backend_name(int32_t index) {
  if (index < 0 || index >= logitless_backend_count()) return nullptr;
  return all_backends()[static_cast<size_t>(index)]->name;
}

logitless_status logitless_backend_info(int32_t index, char* description, size_t description_size,
                                        char* why_unavailable, size_t why_unavailable_size) {
  return guarded([&] {
    if (logitless_backend_name(index) == nullptr) {
      throw_invalid("index", "0 to " + std::to_string(logitless_backend_count() - 1), std::to_string(index));
    }
    const Backend& backend = *all_backends()[static_cast<size_t>(index)];
    BackendOptions options;
    options.parallel_for = openmp_parallel_for(0);
    write_text(backend.describe(options).c_str(), description, description_size);
    write_text(backend.why_unavailable(options).c_str(), why_unavailable, why_unavailable_size);
  });
}

logitless_status logitless_device_count(int32_t* count, char* why_none, size_t why_none_size) {
  return guarded([&] {
    std::string why;
    *required(count, "count") = static_cast<int32_t>(all_devices(&why).size());
    write_text(why.c_str(), why_none, why_none_size);
  });
}

logitless_status logitless_device_get_info(int32_t ordinal, logitless_device_info* info) {
  return guarded([&] {
    std::string why;
    const std::vector<DeviceInfo> devices = all_devices(&why);
    if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) {
      throw_invalid("ordinal", "below " + std::to_string(devices.size()) + ", the number of CUDA devices",
                    std::to_string(ordinal));
    }
    write_device_info(devices[static_cast<size_t>(ordinal)], info);
  });
}

logitless_status logitless_tune(const logitless_tune_options* options, const char** record) {
  return guarded([&] {
    required(record, "record");
    static thread_local std::string text;
    text = tune(to_tune_options(*required(options, "options")));
    *record = text.c_str();
  });
}

logitless_status logitless_context_create(const logitless_context_options* options,
                                          logitless_context** context) {
  return guarded([&] {
    required(context, "context");
    logitless_context_options defaults;
    logitless_context_options_init(&defaults);
    const logitless_context_options& given = options == nullptr ? defaults : *options;
    auto made = std::make_unique<logitless_context>(logitless_context{to_context(given)});
    if (!made->context.backend.empty()) backend_by_name(made->context.backend, made->context.options);
    const BackendOptions& asked = made->context.options;
    if (!asked.engine.empty() || !asked.device_model.empty()) {
      backend_by_name(asked.on_host() ? "cpu" : "cuda", asked);
    }
    *context = made.release();
  });
}

void logitless_context_destroy(logitless_context* context) {
  delete context;
}

logitless_status logitless_plan_create(const logitless_context* context, const logitless_option* options,
                                       size_t option_count, const logitless_tensor_desc* tensors,
                                       size_t tensor_count, logitless_plan** plan) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    required(plan, "plan");
    const Problem problem = to_problem(options, option_count, tensors, tensor_count);
    auto made = std::make_unique<logitless_plan>(logitless_plan{make_plan(c, problem)});
    *plan = made.release();
  });
}

void logitless_plan_destroy(logitless_plan* plan) {
  delete plan;
}

logitless_status logitless_plan_get_info(const logitless_plan* plan, logitless_plan_info* info) {
  return guarded([&] {
    const PlannedProblem& planned = required(plan, "plan")->planned;
    write_plan_info(planned.plan, planned.problem, planned.backend->name, info);
  });
}

logitless_status logitless_plan_list(const logitless_context* context, const logitless_option* options,
                                     size_t option_count, const logitless_tensor_desc* tensors,
                                     size_t tensor_count, logitless_plan_info* infos, int32_t capacity,
                                     int32_t* count) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    required(count, "count");
    const Problem p = to_problem(options, option_count, tensors, tensor_count);
    const Backend* backend = nullptr;
    const std::vector<Plan> plans = list_plans(c, p, &backend);
    const auto total = static_cast<int32_t>(plans.size());
    if (capacity > 0) required(infos, "infos");
    for (int32_t i = 0; i < std::min(total, capacity); ++i) {
      write_plan_info(plans[static_cast<size_t>(i)], p, backend->name, &infos[i]);
    }
    *count = total;
  });
}

logitless_status logitless_run(const logitless_plan* plan, const logitless_tensor* tensors,
                               size_t tensor_count, void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&] {
    const PlannedProblem& planned = required(plan, "plan")->planned;
    run(planned, to_buffers(tensors, tensor_count), workspace, workspace_bytes, stream);
  });
}

logitless_status logitless_run_group(const logitless_plan* plan, const logitless_tensor* tensors,
                                     size_t tensor_count, void* workspace, size_t workspace_bytes,
                                     void* stream, const logitless_communicator* communicator) {
  return guarded([&] {
    const PlannedProblem& planned = required(plan, "plan")->planned;
    const Communicator group = to_communicator(communicator);
    run(planned, to_buffers(tensors, tensor_count), workspace, workspace_bytes, stream, &group);
  });
}

logitless_status logitless_communicator_from_nccl(void* nccl_comm, logitless_communicator* communicator) {
  return guarded([&] {
    required(communicator, "communicator");
    const Communicator made = distributed::nccl_communicator(required(nccl_comm, "nccl_comm"));
    *communicator = {.rank = made.rank,
                     .size = made.size,
                     .host = made.host,
                     .all_gather = made.all_gather,
                     .all_reduce = made.all_reduce,
                     .reduce_scatter = made.reduce_scatter};
  });
}

logitless_status logitless_scale_gradients(const logitless_context* context, int32_t count, void* const* data,
                                           const int32_t* dtypes, const int64_t* sizes, const void* factor,
                                           void* stream) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    const std::vector<GradientArray> arrays = gradient_arrays(count, data, dtypes, sizes);
    if (arrays.empty()) return;
    required(factor, "factor");
    refuse_without_device(c.options);
    const Backend& backend = backend_of_rows(c, DType::kF32);
    backend.scale(arrays, factor, c.options, stream);
  });
}

logitless_status logitless_candidates_workspace_bytes(const logitless_context* context,
                                                      const logitless_candidates* candidates,
                                                      size_t* workspace_bytes) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    required(workspace_bytes, "workspace_bytes");
    *workspace_bytes = static_cast<size_t>(candidates_bytes(c, to_candidates(candidates, true)));
  });
}

logitless_status logitless_candidates_run(const logitless_context* context,
                                          const logitless_candidates* candidates, void* workspace,
                                          size_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    run_candidates(c, to_candidates(candidates, false), workspace, workspace_bytes, stream);
  });
}

logitless_status logitless_divergence_run(const logitless_context* context,
                                          const logitless_divergence* divergence, void* stream) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    const Divergence d = to_divergence(divergence);
    check_stream(c.options, stream);
    refuse_without_device(c.options);
    const Backend& backend = backend_of_rows(c, d.dtype);
    if (d.rows > 0) backend.divergence(d, c.options, stream);
  });
}

logitless_status logitless_sample_noise_run(const logitless_context* context,
                                            const logitless_sample_noise* lists, void* stream) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    const NoiseLists given = to_noise_lists(lists);
    if (given.rows == 0 || given.columns == 0) return;
    refuse_without_device(c.options);
    backend_of_rows(c, DType::kF32).noise(given, c.options, stream);
  });
}

logitless_status logitless_divergence_plan(const logitless_context* context,
                                           const logitless_divergence_problem* problem,
                                           logitless_divergence_tiles* values,
                                           logitless_divergence_tiles* gradients) {
  return guarded([&] {
    const Context& c = required(context, "context")->context;
    required(values, "values");
    required(gradients, "gradients");
    const DivergencePlan plan = plan_divergence(to_divergence_problem(problem, c.options.on_host()));
    *values = to_c(plan.values);
    *gradients = to_c(plan.gradients);
  });
}

logitless_status logitless_row_stats_merge(const logitless_plan* plan, const logitless_tensor* from,
                                           size_t from_count, const logitless_tensor* into,
                                           size_t into_count) {
  return guarded([&] {
    const Problem p = stats_problem(plan);
    const Buffers a = stats_buffers(p, into, into_count);
    const Buffers b = stats_buffers(p, from, from_count);
    for (int64_t row = 0; row < p.tokens; ++row) {
      write_row_stats(p, a, row, merge(read_row_stats(p, a, row), read_row_stats(p, b, row)));
    }
  });
}

logitless_status logitless_row_stats_rebase(const logitless_plan* plan, const logitless_tensor* stats,
                                            size_t stats_count, const void* new_max) {
  return guarded([&] {
    const Problem p = stats_problem(plan);
    const Buffers b = stats_buffers(p, stats, stats_count);
    if (p.tokens > 0) required(new_max, "new_max");
    for (int64_t row = 0; row < p.tokens; ++row) {
      const double logit_offset = load_as_double(new_max, p.stats_dtype(), row);
      write_row_stats(p, b, row, rebase(read_row_stats(p, b, row), logit_offset));
    }
  });
}

logitless_status logitless_loss_from_row_stats(const logitless_plan* plan, const logitless_tensor* tensors,
                                               size_t tensor_count) {
  return guarded([&] {
    const Problem p = stats_problem(plan);
    const Buffers b = stats_buffers(p, tensors, tensor_count);
    if (p.tokens > 0) required(b.targets, "targets");
    if (p.has.class_weight) required(b.class_weight, "class_weight");
    if (p.tokens > 0 && p.has.token_weight) required(b.token_weight, "token_weight");
    if (p.targets_per_row > 0) {
      throw_invalid("targets_per_row", "0 for statistics that were merged",
                    std::to_string(p.targets_per_row));
    }
    check_allowed(p, b);
    check_targets(p, b.targets);
    std::vector<int64_t> rows(static_cast<size_t>(p.tokens));
    losses_from_row_stats(p, b, rows.data());
  });
}

}  // extern "C"
