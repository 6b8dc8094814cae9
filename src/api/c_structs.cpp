#include "api/c_structs.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "core/number_text.h"
#include "core/status.h"
#include "core/validate.h"

namespace logitless {
namespace {

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

int64_t at_least_0(int64_t value, const char* argument) {
  if (value < 0) throw_invalid(argument, "at least 0", std::to_string(value));
  return value;
}

DType to_dtype(int32_t value, const char* argument) {
  return to_enum(value, DType::kI64, argument);
}

const char* option_name(int32_t id) {
  static constexpr const char* kNames[] = {
#define LOGITLESS_OPTION(name, NAME) #name,
#include "logitless/options.def"
  };
  return kNames[id];
}

const char* tensor_name(int32_t id) {
  static constexpr const char* kNames[] = {
#define LOGITLESS_TENSOR(name, ...) #name,
#include "logitless/tensors.def"
  };
  return kNames[id];
}

// A caller's array, looked up by id; each id may occur once.
class Given {
 public:
  Given(const char* array, size_t count, const void* data) : array_(array) {
    if (count > 0) required(data, array);
  }
  int32_t id(int32_t value, int32_t count, const char* (*name)(int32_t)) {
    if (value < 0 || value >= count) {
      throw_invalid(std::string(array_) + ".id", "0 to " + std::to_string(count - 1), std::to_string(value));
    }
    const uint64_t bit = uint64_t{1} << value;
    if ((seen_ & bit) != 0) throw_invalid(array_, "each once", std::string(name(value)) + " twice");
    seen_ |= bit;
    return value;
  }

 private:
  const char* array_;
  uint64_t seen_ = 0;
};
static_assert(LOGITLESS_OPTION_COUNT <= 64 && LOGITLESS_TENSOR_COUNT <= 64);

template <class T>
T to_integer(const logitless_option& option, const char* name) {
  if (option.real != 0) {
    throw_invalid(name, "its value in `integer`", number_text(option.real) + " in `real`");
  }
  using Limits = std::numeric_limits<T>;
  const bool is_less =
      option.integer < 0 && (!Limits::is_signed || option.integer < static_cast<int64_t>(Limits::min()));
  const bool is_more =
      option.integer > 0 && static_cast<uint64_t>(option.integer) > static_cast<uint64_t>(Limits::max());
  if (is_less || is_more) {
    throw_invalid(
        name, "a number in [" + std::to_string(Limits::min()) + ", " + std::to_string(Limits::max()) + "]",
        std::to_string(option.integer));
  }
  return static_cast<T>(option.integer);
}

// Returns the number of values of a choice: "a|b|c" has 3.
constexpr int32_t count_of(std::string_view values) {
  return 1 + static_cast<int32_t>(std::count(values.begin(), values.end(), '|'));
}

// Checks the descriptor of a tensor whose dtype is fixed.
void check_fixed(int32_t dtype, std::initializer_list<int32_t> own, const char* argument) {
  if (dtype == 0 || std::find(own.begin(), own.end(), dtype) != own.end()) return;
  throw_invalid(argument, "0, as the tensor has a dtype of its own", std::to_string(dtype));
}

void check_not_added(bool accumulates, const char* name) {
  if (accumulates)
    throw_invalid(std::string(name) + ".accumulate", "0, as it is no gradient that is made", "1");
}

// Calls a host's pool through the C function pointers; without one, uses OpenMP.
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
  context.options.engine = options.engine != nullptr ? options.engine : "";
  context.options.parallel_for = to_parallel_for(options);
  return context;
}

Problem to_problem(const logitless_option* options, size_t option_count, const logitless_tensor_desc* tensors,
                   size_t tensor_count) {
  Problem p;
  Given options_given("options", option_count, options);
  for (size_t i = 0; i < option_count; ++i) {
    const logitless_option& o = options[i];
    switch (options_given.id(o.id, LOGITLESS_OPTION_COUNT, option_name)) {
#define LOGITLESS_OPTION_INTEGER(name, NAME, type, ...) \
  case LOGITLESS_OPTION_##NAME:                         \
    p.name = to_integer<type>(o, #name);                \
    break;
#define LOGITLESS_OPTION_REAL(name, NAME, ...)                                                  \
  case LOGITLESS_OPTION_##NAME:                                                                 \
    if (o.integer != 0)                                                                         \
      throw_invalid(#name, "its value in `real`", std::to_string(o.integer) + " in `integer`"); \
    p.name = o.real;                                                                            \
    break;
#define LOGITLESS_OPTION_FLAG(name, NAME, doc)              \
  case LOGITLESS_OPTION_##NAME:                             \
    p.name = to_flag(to_integer<int32_t>(o, #name), #name); \
    break;
#define LOGITLESS_OPTION_CHOICE(name, NAME, type, default_value, values, doc)           \
  case LOGITLESS_OPTION_##NAME:                                                         \
    p.name = to_enum(to_integer<int32_t>(o, #name), type(count_of(values) - 1), #name); \
    break;
#include "logitless/options.def"
    }
  }
  Given tensors_given("tensors", tensor_count, tensors);
  for (size_t i = 0; i < tensor_count; ++i) {
    const logitless_tensor_desc& t = tensors[i];
    bool accumulates = false;
    switch (tensors_given.id(t.id, LOGITLESS_TENSOR_COUNT, tensor_name)) {
#define LOGITLESS_FLOAT(name) p.dtype.name = to_dtype(t.dtype, #name ".dtype");
#define LOGITLESS_INDEX(name) LOGITLESS_FLOAT(name)
#define LOGITLESS_STATS(name) check_fixed(t.dtype, {LOGITLESS_F32, LOGITLESS_F64}, #name ".dtype");
#define LOGITLESS_I64(name) check_fixed(t.dtype, {LOGITLESS_I64}, #name ".dtype");
#define LOGITLESS_I32(name) check_fixed(t.dtype, {LOGITLESS_I32}, #name ".dtype");
#define LOGITLESS_U8(name) check_fixed(t.dtype, {}, #name ".dtype");
#define LOGITLESS_BYTES(name) check_fixed(t.dtype, {}, #name ".dtype");
#define LOGITLESS_GRADIENT(name) p.accumulate.name = accumulates;
#define LOGITLESS_INPUT(name) check_not_added(accumulates, #name);
#define LOGITLESS_UPSTREAM(name) LOGITLESS_INPUT(name)
#define LOGITLESS_STATISTIC(name) LOGITLESS_INPUT(name)
#define LOGITLESS_OUTPUT(name) LOGITLESS_INPUT(name)
#define LOGITLESS_TENSOR(name, NAME, element, dtype_class, role, shape, planned, ...) \
  case LOGITLESS_TENSOR_##NAME:                                                       \
    accumulates = to_flag(t.accumulate, #name ".accumulate");                         \
    LOGITLESS_##dtype_class(name) LOGITLESS_##role(name) p.has.name = true;           \
    p.has.planned = true;                                                             \
    break;
#include "logitless/tensors.def"
    }
  }
  return p;
}

Buffers to_buffers(const logitless_tensor* tensors, size_t count) {
  Buffers b;
  Given given("tensors", count, tensors);
  for (size_t i = 0; i < count; ++i) {
    const logitless_tensor& t = tensors[i];
    switch (given.id(t.id, LOGITLESS_TENSOR_COUNT, tensor_name)) {
#define LOGITLESS_TENSOR(name, NAME, element, ...)                                                \
  case LOGITLESS_TENSOR_##NAME:                                                                   \
    if (t.stride != 0) throw_invalid(#name ".stride", "0 (no matrix)", std::to_string(t.stride)); \
    b.name = static_cast<element*>(t.data);                                                       \
    break;
#define LOGITLESS_MATRIX(name, NAME, element, ...) \
  case LOGITLESS_TENSOR_##NAME:                    \
    b.name##_stride = t.stride;                    \
    b.name = static_cast<element*>(t.data);        \
    break;
#include "logitless/tensors.def"
    }
  }
  return b;
}

void write_text(const char* text, char* buffer, size_t size) {
  if (buffer == nullptr || size == 0) return;
  const size_t length = std::min(std::strlen(text), size - 1);
  std::memcpy(buffer, text, length);
  buffer[length] = '\0';
}

Communicator to_communicator(const logitless_communicator* given) {
  const logitless_communicator& c = *required(given, "communicator");
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

Candidates to_candidates(const logitless_candidates* pointer, bool sizes_only) {
  const logitless_candidates& given = *required(pointer, "candidates");
  Candidates c;
  c.stage = to_enum(given.stage, CandidatesStage::kGradient, "stage");
  c.hidden_dtype = to_dtype(given.hidden_dtype, "hidden_dtype");
  c.weight_dtype = to_dtype(given.weight_dtype, "weight_dtype");
  c.bias_dtype = to_dtype(given.bias_dtype, "bias_dtype");
  c.compute_dtype = to_dtype(given.compute_dtype, "compute_dtype");
  c.hidden_size = given.hidden_size;
  const DType ids = to_dtype(given.id_dtype, "id_dtype");
  if (is_float(ids)) throw_invalid("id_dtype", "int32 or int64", dtype_name(ids));
  c.lists = {.ids = given.ids,
             .wide = ids == DType::kI64,
             .offsets = given.offsets,
             .rows = given.rows,
             .elements = given.elements,
             .vocab = given.vocab,
             .ignore_id = given.ignore_id};
  c.factors = {given.scale, given.softcap};
  c.hidden = given.hidden;
  c.weight = given.weight;
  c.bias = given.bias;
  c.row_temperature = given.row_temperature;
  c.hidden_stride = given.hidden_stride;
  c.weight_stride = given.weight_stride;
  c.logits = given.logits;
  c.invalid_ids = given.invalid_ids;
  c.max_workspace_bytes = given.max_workspace_bytes;
  if (c.stage == CandidatesStage::kGradient) {
    c.grad = given.grad;
    c.d_hidden = given.d_hidden;
    c.d_hidden_stride = given.d_hidden_stride;
    c.d_hidden_dtype = to_dtype(given.d_hidden_dtype, "d_hidden_dtype");
    c.d_weight = given.d_weight;
    c.d_weight_stride = given.d_weight_stride;
    c.d_weight_dtype = to_dtype(given.d_weight_dtype, "d_weight_dtype");
    c.d_bias = given.d_bias;
    c.d_bias_dtype = to_dtype(given.d_bias_dtype, "d_bias_dtype");
    c.accumulate_d_weight = to_flag(given.accumulate_d_weight, "accumulate_d_weight");
  }
  return validated(c, given.temperature, sizes_only);
}

NoiseLists to_noise_lists(const logitless_sample_noise* pointer) {
  const logitless_sample_noise& given = *required(pointer, "lists");
  NoiseLists lists{.rows = at_least_0(given.rows, "rows"),
                   .columns = at_least_0(given.columns, "columns"),
                   .sample = at_least_0(given.sample, "sample"),
                   .has_seeds_of_rows = to_flag(given.has_seeds_of_rows, "has_seeds_of_rows")};
  if (lists.rows == 0 || lists.columns == 0) return lists;
  if (lists.columns > std::numeric_limits<int64_t>::max() / lists.rows) {
    throw_invalid("columns", "fewer than 2^63 ids in all rows", std::to_string(lists.columns));
  }
  lists.seed = required(given.seed, "seed");
  lists.row_numbers = given.row_numbers;
  lists.ids = required(given.ids, "ids");
  lists.noise = required(given.noise, "noise");
  return lists;
}

Divergence to_divergence(const logitless_divergence* pointer) {
  const logitless_divergence& given = *required(pointer, "divergence");
  Divergence d;
  d.stage = to_enum(given.stage, DivergenceStage::kTerms, "stage");
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

DivergenceProblem to_divergence_problem(const logitless_divergence_problem* pointer, bool on_host) {
  const logitless_divergence_problem& given = *required(pointer, "problem");
  return {.pass = to_enum(given.pass, Pass::kForwardBackward, "pass"),
          .on_host = on_host,
          .want_d_hidden = to_flag(given.want_d_hidden, "want_d_hidden"),
          .want_d_weight = to_flag(given.want_d_weight, "want_d_weight"),
          .want_d_bias = to_flag(given.want_d_bias, "want_d_bias"),
          .rows = given.rows,
          .vocab = given.vocab,
          .ranks = given.ranks,
          .student = {.width = given.student_width,
                      .hidden = to_dtype(given.student_hidden_dtype, "student_hidden_dtype"),
                      .weight = to_dtype(given.student_weight_dtype, "student_weight_dtype"),
                      .product = to_dtype(given.student_product_dtype, "student_product_dtype")},
          .teacher = {.width = given.teacher_width,
                      .hidden = to_dtype(given.teacher_hidden_dtype, "teacher_hidden_dtype"),
                      .weight = to_dtype(given.teacher_weight_dtype, "teacher_weight_dtype"),
                      .product = to_dtype(given.teacher_product_dtype, "teacher_product_dtype")},
          .rounded = to_dtype(given.rounded_dtype, "rounded_dtype"),
          .gathers_rows = to_flag(given.gathers_rows, "gathers_rows"),
          .copied_biases = given.copied_biases,
          .budget = given.max_workspace_bytes};
}

logitless_divergence_tiles to_c(const DivergenceTiles& tiles) {
  return {.rows = tiles.rows,
          .window = tiles.window,
          .hidden_sums = tiles.hidden_sums,
          .weight_sums = tiles.weight_sums,
          .workspace_bytes = static_cast<size_t>(tiles.bytes)};
}

void write_plan_info(const Plan& plan, const Problem& problem, const char* backend,
                     logitless_plan_info* info) {
  logitless_plan_info& out = *required(info, "info") = {};
  out.kind = static_cast<int32_t>(plan.kind);
  out.threads = plan.threads;
  out.workspace_bytes = plan.workspace_bytes;
  out.cost_matmuls = plan.cost_matmuls;
  out.predicted_seconds = plan.predicted_seconds;
  out.token_chunk = plan.token_chunk;
  write_text(backend, out.backend, sizeof out.backend);
  write_text(plan.config.c_str(), out.config, sizeof out.config);
  out.saved_bytes = plan.saved_bytes;
  out.cached_columns = plan.cached_columns;
  out.vocab_window = plan.vocab_window;
  write_text(plan.engine.c_str(), out.engine, sizeof out.engine);
  write_text(plan.reason.c_str(), out.reason, sizeof out.reason);
  write_text(plan.choice.c_str(), out.choice, sizeof out.choice);
  out.screen_weight_bytes = plan.screen_weight_bytes;
  out.gathers = plan.gathers;
  out.gathered_bytes = plan.gathered_bytes;
  if (problem.group_d_hidden != GroupDHidden::kPart) {
    out.reduced_bytes =
        static_cast<uint64_t>(problem.tokens * problem.hidden) * size_of(problem.dtype.d_hidden);
  }
}

TuneOptions to_tune_options(const logitless_tune_options& given) {
  TuneOptions options;
  options.device = given.device;
  options.library_version = logitless_version();
  if (given.head_count > 0) required(given.heads, "heads");
  for (size_t i = 0; i < given.head_count; ++i) {
    const int64_t* sizes = given.heads + 3 * i;
    constexpr int64_t kMost = int64_t{1} << 30;
    for (int k = 0; k < 3; ++k) {
      if (sizes[k] < 1 || sizes[k] >= kMost) {
        throw_invalid("heads[" + std::to_string(i) + "]", "sizes from 1 to 2^30 - 1",
                      std::to_string(sizes[k]));
      }
    }
    options.heads.push_back({sizes[0], sizes[1], sizes[2]});
  }
  if (!(given.seconds >= 0 && given.seconds <= 86400)) {
    throw_invalid("seconds", "a time from 0 (60 seconds) to a day", std::to_string(given.seconds));
  }
  options.seconds = given.seconds;
  if (given.path != nullptr) options.path = given.path;
  if (given.progress != nullptr) {
    options.progress = [call = given.progress, data = given.progress_data](double share) {
      return call(share, data) == 0;
    };
  }
  return options;
}

void write_device_info(const DeviceInfo& device, logitless_device_info* info) {
  logitless_device_info& out = *required(info, "info") = {};
  out.compute_capability = device.compute_capability;
  out.multiprocessors = device.processors;
  out.memory_bytes = device.memory_bytes;
  out.driver_version = device.driver_version;
  out.runtime_version = device.runtime_version;
  out.cublaslt_version = device.cublaslt_version;
  write_text(device.name.c_str(), out.name, sizeof out.name);
  write_text(device.why_unavailable.c_str(), out.why_unavailable, sizeof out.why_unavailable);
  write_text(device.record.c_str(), out.record, sizeof out.record);
}

}  // namespace logitless
