#include "c_structs.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/status.h"
#include "core/validate.h"
#include "openmp_parallel_for.h"

namespace logitless {
namespace {

// A caller's struct ends where one of its fields does: no struct's size is anything else, and half a pointer
// would be a wild one.
template <class T>
void check_size(const T& given, const char* name) {
  const size_t size = given.struct_size;
  if (size >= sizeof(size_t) && size <= sizeof(T) && size % alignof(T) == 0) return;
  throw_invalid(std::string(name) + ".struct_size",
                "at most " + std::to_string(sizeof(T)) + ", a multiple of " + std::to_string(alignof(T)) +
                    " (set by " + name + "_init)",
                std::to_string(size));
}

template <class T>
T complete_struct(const T* given, void (*init)(T*), const char* name) {
  if (given == nullptr) throw_invalid(name, "a pointer", "null");
  check_size(*given, name);
  T out;
  init(&out);
  std::memcpy(&out, given, given->struct_size);
  out.struct_size = sizeof(T);
  return out;
}

// What is to be written to a caller's struct, as much of it as the caller knows.
template <class T>
T empty_for(const T* wanted, void (*init)(T*), const char* name) {
  if (wanted == nullptr) throw_invalid("info", "a pointer", "null");
  check_size(*wanted, name);
  T out;
  init(&out);
  out.struct_size = wanted->struct_size;
  return out;
}

template <class E>
E to_enum(int32_t value, E last, const char* argument) {
  if (value < 0 || value > static_cast<int32_t>(last)) {
    throw_invalid(argument, "0 to " + std::to_string(static_cast<int>(last)), std::to_string(value));
  }
  return static_cast<E>(value);
}

bool to_flag(int32_t value, const char* argument) {
  if (value != 0 && value != 1) throw_invalid(argument, "0 or 1", std::to_string(value));
  return value == 1;
}

DType to_dtype(int32_t value, const char* argument) {
  return to_enum(value, DType::kI64, argument);
}

// A host's pool called through the C function pointers; an OpenMP one otherwise.
ParallelFor to_parallel_for(const logitless_context_options& options) {
  if (options.parallel_for == nullptr) return openmp_parallel_for(options.threads);
  if (options.threads < 1) {
    throw_invalid("threads", "the number of workers of the given parallel_for",
                  std::to_string(options.threads));
  }
  return {options.threads, [pool = options.pool, call = options.parallel_for](int64_t tasks, LoopBody body) {
            const auto task = [](int64_t index, int32_t worker, void* data) {
              (*static_cast<const LoopBody*>(data))(index, worker);
            };
            call(tasks, task, &body, pool);
          }};
}

}  // namespace

logitless_context_options complete(const logitless_context_options* given) {
  return complete_struct(given, logitless_context_options_init, "logitless_context_options");
}

logitless_problem complete(const logitless_problem* given) {
  return complete_struct(given, logitless_problem_init, "logitless_problem");
}

logitless_communicator complete(const logitless_communicator* given) {
  return complete_struct(given, logitless_communicator_init, "logitless_communicator");
}

logitless_buffers complete(const logitless_buffers* given) {
  return complete_struct(given, logitless_buffers_init, "logitless_buffers");
}

logitless_divergence complete(const logitless_divergence* given) {
  return complete_struct(given, logitless_divergence_init, "logitless_divergence");
}

Context to_context(const logitless_context_options& options) {
  constexpr int32_t kMostThreads = 4096;
  if (options.threads < 0 || options.threads > kMostThreads) {
    throw_invalid("threads", "0 to " + std::to_string(kMostThreads), std::to_string(options.threads));
  }
  if (options.device < LOGITLESS_HOST_MEMORY) {
    throw_invalid("device", "the ordinal of a CUDA device, or -1 for host memory",
                  std::to_string(options.device));
  }
  if (options.device_model != nullptr && options.device != LOGITLESS_HOST_MEMORY) {
    throw_invalid("device", "-1 with device_model", std::to_string(options.device));
  }
  Context context;
  context.options.device = options.device;
  context.options.device_model = options.device_model != nullptr ? options.device_model : "";
  context.backend = options.backend != nullptr ? options.backend : "";
  context.options.isa = options.isa != nullptr ? options.isa : "";
  context.options.parallel_for = to_parallel_for(options);
  return context;
}

Problem to_problem(const logitless_problem& c) {
  Problem p;
  p.pass = to_enum(c.pass, Pass::kForwardBackward, "pass");
  p.reduction = to_enum(c.reduction, Reduction::kMean, "reduction");
  p.tokens = c.tokens;
  p.vocab = c.vocab;
  p.hidden = c.hidden;
  p.vocab_start = c.vocab_start;
  p.vocab_total = c.vocab_total;
  p.hidden_dtype = to_dtype(c.hidden_dtype, "hidden_dtype");
  p.classifier_dtype = to_dtype(c.classifier_dtype, "classifier_dtype");
  p.bias_dtype = to_dtype(c.bias_dtype, "bias_dtype");
  p.target_dtype = to_dtype(c.target_dtype, "target_dtype");
  p.d_hidden_dtype = to_dtype(c.d_hidden_dtype, "d_hidden_dtype");
  p.d_classifier_dtype = to_dtype(c.d_classifier_dtype, "d_classifier_dtype");
  p.d_bias_dtype = to_dtype(c.d_bias_dtype, "d_bias_dtype");
  p.unaligned_rows = to_flag(c.unaligned_rows, "unaligned_rows");
  p.has_bias = to_flag(c.has_bias, "has_bias");
  p.has_class_weight = to_flag(c.has_class_weight, "has_class_weight");
  p.has_token_weight = to_flag(c.has_token_weight, "has_token_weight");
  p.scale = c.scale;
  p.softcap = c.softcap;
  p.label_smoothing = c.label_smoothing;
  p.z_loss = c.z_loss;
  p.num_items = c.num_items;
  p.ignore_index = c.ignore_index;
  p.shift = c.shift;
  p.sequence_length = c.sequence_length;
#define LOGITLESS_FLAG(name) p.name = to_flag(c.name, #name);
  LOGITLESS_ROW_WANTS(LOGITLESS_FLAG)
#undef LOGITLESS_FLAG
  p.want_d_hidden = to_flag(c.want_d_hidden, "want_d_hidden");
  p.want_d_classifier = to_flag(c.want_d_classifier, "want_d_classifier");
  p.want_d_bias = to_flag(c.want_d_bias, "want_d_bias");
#define LOGITLESS_FLAG(name) p.has_grad_##name = to_flag(c.has_grad_##name, "has_grad_" #name);
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_FLAG)
#undef LOGITLESS_FLAG
  p.accumulate_d_hidden = to_flag(c.accumulate_d_hidden, "accumulate_d_hidden");
  p.accumulate_d_classifier = to_flag(c.accumulate_d_classifier, "accumulate_d_classifier");
  p.accumulate_d_bias = to_flag(c.accumulate_d_bias, "accumulate_d_bias");
  p.gradient = to_enum(c.gradient, GradientMethod::kAlwaysThinned, "gradient");
  p.keeps_draws = to_flag(c.keeps_draws, "keeps_draws");
  p.threshold = c.threshold;
  p.seed = c.seed;
  p.compute_dtype = to_dtype(c.compute_dtype, "compute_dtype");
  p.allow_tf32 = to_flag(c.allow_tf32, "allow_tf32");
  p.has_temperature = to_flag(c.has_temperature, "has_temperature");
  p.temperature = c.temperature;
  p.top_k = c.top_k;
  p.targets_per_row = c.targets_per_row;
  p.batch_invariant = to_flag(c.batch_invariant, "batch_invariant");
  p.group_size = c.group_size;
  p.group_d_hidden = to_enum(c.group_d_hidden, GroupDHidden::kSumOfOwn, "group_d_hidden");
  p.group_vocab = c.group_vocab;
  return p;
}

Buffers to_buffers(const logitless_buffers& c) {
  Buffers b;
  b.hidden = c.hidden;
  b.hidden_stride = c.hidden_stride;
  b.classifier = c.classifier;
  b.classifier_stride = c.classifier_stride;
  b.bias = c.bias;
  b.targets = c.targets;
  b.class_weight = c.class_weight;
  b.token_weight = c.token_weight;
  b.grad_loss = c.grad_loss;
#define LOGITLESS_POINTER(name) b.grad_##name = c.grad_##name;
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_POINTER)
#undef LOGITLESS_POINTER
#define LOGITLESS_POINTER(name, ...) b.name = c.name;
  b.max = c.max;
  LOGITLESS_ROW_SUMS(LOGITLESS_POINTER)
  b.loss = c.loss;
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_POINTER)
#undef LOGITLESS_POINTER
  b.argmax = c.argmax;
  b.correct_count = c.correct_count;
  b.valid_count = c.valid_count;
  b.invalid_targets = c.invalid_targets;
  b.num_items = c.num_items;
  b.draws = c.draws;
  b.seed = c.seed;
  b.kept_count = c.kept_count;
  b.draw_variance = c.draw_variance;
  b.lse_low = c.lse_low;
  b.temperature = c.temperature;
  b.top_ids = c.top_ids;
  b.top_log_probs = c.top_log_probs;
  b.target_weight = c.target_weight;
  b.target_log_probs = c.target_log_probs;
  b.d_hidden = c.d_hidden;
  b.d_hidden_stride = c.d_hidden_stride;
  b.d_classifier = c.d_classifier;
  b.d_classifier_stride = c.d_classifier_stride;
  b.d_bias = c.d_bias;
  return b;
}

void write_text(const char* text, char* buffer, size_t size) {
  if (buffer == nullptr || size == 0) return;
  const size_t length = std::min(std::strlen(text), size - 1);
  std::memcpy(buffer, text, length);
  buffer[length] = '\0';
}

Communicator to_communicator(const logitless_communicator& c) {
  if (c.size < 1) throw_invalid("communicator.size", "at least 1", std::to_string(c.size));
  if (c.rank < 0 || c.rank >= c.size) {
    throw_invalid("communicator.rank", "0 to " + std::to_string(c.size - 1), std::to_string(c.rank));
  }
  if (c.size > 1 && c.all_gather == nullptr) throw_invalid("communicator.all_gather", "a function", "null");
  return {.rank = c.rank,
          .size = c.size,
          .host = c.host,
          .all_gather = c.all_gather,
          .all_reduce = c.all_reduce,
          .reduce_scatter = c.reduce_scatter};
}

Divergence to_divergence(const logitless_divergence& given) {
  Divergence d;
  d.stage = to_enum(given.stage, DivergenceStage::kGradient, "stage");
  d.dtype = to_dtype(given.dtype, "dtype");
  d.gradient_dtype = to_dtype(given.gradient_dtype, "gradient_dtype");
  d.rows = given.rows;
  d.columns = given.columns;
  d.beta = given.beta;
  d.student = {given.student, given.student_stride, given.student_bias};
  d.teacher = {given.teacher, given.teacher_stride, given.teacher_bias};
  d.student_lse = given.student_lse;
  d.teacher_lse = given.teacher_lse;
  d.student_kl = given.student_kl;
  d.divergence = given.divergence;
  d.entropy = given.entropy;
  d.grad = given.grad;
  d.d_logits = given.d_logits;
  d.d_logits_stride = given.d_logits_stride;
  return validated(d, {given.temperature, given.student_scale, given.student_softcap, given.teacher_scale,
                       given.teacher_softcap});
}

void write_plan_info(const Plan& plan, const Problem& problem, const char* backend,
                     logitless_plan_info* info) {
  logitless_plan_info out = empty_for(info, logitless_plan_info_init, "logitless_plan_info");
  out.kind = static_cast<int32_t>(plan.kind);
  out.threads = plan.threads;
  out.workspace_bytes = plan.workspace_bytes;
  out.cost_f = plan.cost_f;
  out.predicted_seconds = plan.predicted_seconds;
  out.token_chunk = plan.token_chunk;
  write_text(backend, out.backend, sizeof out.backend);
  write_text(plan.config.c_str(), out.config, sizeof out.config);
  out.draws_bytes = plan.draws_bytes;
  out.kept_columns = plan.kept_columns;
  out.vocab_window = plan.vocab_window;
  write_text(plan.implementation.c_str(), out.implementation, sizeof out.implementation);
  write_text(plan.reason.c_str(), out.reason, sizeof out.reason);
  write_text(plan.choice.c_str(), out.choice, sizeof out.choice);
  out.gathers = plan.gathers;
  out.gathered_bytes = plan.gathered_bytes;
  if (problem.group_d_hidden != GroupDHidden::kPart) {
    out.reduced_bytes =
        static_cast<uint64_t>(problem.tokens * problem.hidden) * size_of(problem.d_hidden_dtype);
  }
  std::memcpy(info, &out, out.struct_size);
}

void write_device_info(const DeviceInfo& device, logitless_device_info* info) {
  logitless_device_info out = empty_for(info, logitless_device_info_init, "logitless_device_info");
  out.compute_capability = device.compute_capability;
  out.multiprocessors = device.processors;
  out.memory_bytes = device.memory_bytes;
  out.driver_version = device.driver_version;
  out.runtime_version = device.runtime_version;
  out.cublaslt_version = device.cublaslt_version;
  write_text(device.name.c_str(), out.name, sizeof out.name);
  write_text(device.why_unavailable.c_str(), out.why_unavailable, sizeof out.why_unavailable);
  std::memcpy(info, &out, out.struct_size);
}

}  // namespace logitless
