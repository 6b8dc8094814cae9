// Logitless for C++20: RAII, spans and exceptions over the C ABI. logitless.h has the formulas and shapes.
// Header-only.
//
//   logitless::Context context;                                   // backend, engine, threads
//   auto problem = logitless::make_problem(logitless::Pass::forward_backward, hidden, weight);
//   problem.has.d_hidden = problem.has.d_weight = 1;
//   auto buffers = logitless::make_buffers(hidden, weight, targets);
//   buffers.loss = &loss; ...                                     // tensors.def
//   logitless::Plan plan(context, problem, buffers);              // throws when the budget is too small
//   logitless::Workspace workspace(plan.info().workspace_bytes);
//   plan.run(buffers, workspace.bytes());
//
// Functions throw logitless::Error. Its what() names the argument, what was expected and what was got; its
// fields hold the same as data.
#pragma once

#if __cplusplus <= 201703L
#error "logitless.hpp: expected C++20 (-std=c++20), got an older standard; logitless.h is C"
#endif

#include <logitless/logitless.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace logitless {

// This version's own namespace, as a program may also be linked with the library's own types of these names,
// and with code that was compiled against another version.
inline namespace v0_1 {

// A failure of the library.
class Error : public std::runtime_error {
 public:
  Error(logitless_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Error(const logitless_error_info& info, const std::string& message)
      : std::runtime_error(message),
        argument(info.argument),
        expected(info.expected),
        got(info.got),
        required_bytes(info.required_bytes),
        row(info.row),
        status_(static_cast<logitless_status>(info.status)) {}
  logitless_status status() const noexcept { return status_; }

  std::string argument, expected, got;  // empty if only the message is known
  // A budget, workspace, saved_bytes or screen_weight_bytes that works, if one was refused.
  uint64_t required_bytes = 0;
  int64_t row = -1;  // the place of a target that is out of range

 private:
  logitless_status status_;
};

// Throws Error with the last failure unless the status is LOGITLESS_OK.
inline void check(logitless_status status) {
  if (status == LOGITLESS_OK) return;
  logitless_error_info info;
  logitless_last_error_info(&info);
  throw Error(info, logitless_last_error());
}

// The two 16-bit formats as distinct types. Only their bits matter here.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class T>
constexpr logitless_dtype dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>)
    return LOGITLESS_F32;
  else if constexpr (std::is_same_v<U, double>)
    return LOGITLESS_F64;
  else if constexpr (std::is_same_v<U, bf16>)
    return LOGITLESS_BF16;
  else if constexpr (std::is_same_v<U, f16>)
    return LOGITLESS_F16;
  else if constexpr (std::is_same_v<U, int32_t>)
    return LOGITLESS_I32;
  else {
    static_assert(std::is_same_v<U, int64_t>, "no dtype of Logitless for this type");
    return LOGITLESS_I64;
  }
}

enum class Pass : int32_t {
  forward = LOGITLESS_FORWARD,
  backward = LOGITLESS_BACKWARD,
  forward_backward = LOGITLESS_FORWARD_BACKWARD
};

enum class Reduction : int32_t {
  none = LOGITLESS_REDUCTION_NONE,
  sum = LOGITLESS_REDUCTION_SUM,
  mean = LOGITLESS_REDUCTION_MEAN
};

enum class Gradient : int32_t {
  exact = LOGITLESS_EXACT,
  sparsified = LOGITLESS_SPARSIFIED,
  always_sparsified = LOGITLESS_ALWAYS_SPARSIFIED
};

enum class Screen : int32_t { none = LOGITLESS_SCREEN_NONE, fp8 = LOGITLESS_SCREEN_FP8 };

// A matrix whose rows are contiguous. Stride 0 means tightly packed.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // elements from row to row
};

struct ContextOptions : logitless_context_options {
  ContextOptions() noexcept { logitless_context_options_init(this); }
};

struct PlanInfo : logitless_plan_info {
  PlanInfo() noexcept : logitless_plan_info{} {}
};

// The options by their names, with their defaults, and the tensors that a plan is made for. Choices are the
// numbers of their enumerations.
struct Problem {
#define LOGITLESS_OPTION_INTEGER(name, NAME, type, default_value, ...) type name = default_value;
#define LOGITLESS_OPTION_REAL(name, NAME, default_value, ...) double name = default_value;
#define LOGITLESS_OPTION_FLAG(name, ...) bool name = false;
#define LOGITLESS_OPTION_CHOICE(name, NAME, type, default_value, ...) int32_t name = default_value;
#include <logitless/options.def>
  struct Has {
#define LOGITLESS_TENSOR(name, ...) bool name = false;
#include <logitless/tensors.def>
  } has;
  struct Dtypes {
    int32_t hidden = LOGITLESS_F32, weight = LOGITLESS_F32, bias = LOGITLESS_F32, targets = LOGITLESS_I64,
            d_hidden = LOGITLESS_F32, d_weight = LOGITLESS_F32, d_bias = LOGITLESS_F32;
  } dtype;
  struct Accumulate {
    bool d_hidden = false, d_weight = false, d_bias = false;
  } accumulate;

  std::array<logitless_option, LOGITLESS_OPTION_COUNT> options() const {
    const auto integer = [](logitless_option_id id, auto value) {
      const auto limit = static_cast<uint64_t>(INT64_MAX);  // for unsigned options
      const bool is_more = value > 0 && static_cast<uint64_t>(value) > limit;
      return logitless_option{id, is_more ? INT64_MAX : static_cast<int64_t>(value), 0};
    };
    return {
#define LOGITLESS_OPTION(name, NAME) integer(LOGITLESS_OPTION_##NAME, name),
#define LOGITLESS_OPTION_REAL(name, NAME, ...) logitless_option{LOGITLESS_OPTION_##NAME, 0, name},
#include <logitless/options.def>
    };
  }
  std::vector<logitless_tensor_desc> tensors() const {
    std::vector<logitless_tensor_desc> out = {{LOGITLESS_TENSOR_HIDDEN, dtype.hidden, 0},
                                              {LOGITLESS_TENSOR_WEIGHT, dtype.weight, 0},
                                              {LOGITLESS_TENSOR_TARGETS, dtype.targets, 0}};
    const auto add = [&](logitless_tensor_id id, bool is_there) {
      const bool adds = (id == LOGITLESS_TENSOR_D_HIDDEN && accumulate.d_hidden) ||
                        (id == LOGITLESS_TENSOR_D_WEIGHT && accumulate.d_weight) ||
                        (id == LOGITLESS_TENSOR_D_BIAS && accumulate.d_bias);
      const int32_t type = id == LOGITLESS_TENSOR_BIAS       ? dtype.bias
                           : id == LOGITLESS_TENSOR_D_HIDDEN ? dtype.d_hidden
                           : id == LOGITLESS_TENSOR_D_WEIGHT ? dtype.d_weight
                           : id == LOGITLESS_TENSOR_D_BIAS   ? dtype.d_bias
                                                             : 0;
      const bool is_first = id == LOGITLESS_TENSOR_HIDDEN || id == LOGITLESS_TENSOR_WEIGHT ||
                            id == LOGITLESS_TENSOR_TARGETS;  // they are listed above
      if (!is_first && (is_there || adds)) out.push_back({id, type, adds ? 1 : 0});
    };
#define LOGITLESS_TENSOR(name, NAME, ...) add(LOGITLESS_TENSOR_##NAME, has.name);
#include <logitless/tensors.def>
    return out;
  }
};

// The tensors of a run; null: none.
struct Buffers {
#define LOGITLESS_TENSOR(name, NAME, element, ...) element* name = nullptr;
#define LOGITLESS_MATRIX(name, NAME, element, ...) \
  element* name = nullptr;                         \
  int64_t name##_stride = 0;
#include <logitless/tensors.def>
  // make_buffers() sets these, and runs compare them with the plan. -1: unknown, for targets that you set
  // yourself.
  int32_t targets_dtype = -1;
  int64_t targets_count = -1;

  std::array<logitless_tensor, LOGITLESS_TENSOR_COUNT> tensors() const {
    const auto tensor = [](logitless_tensor_id id, const void* data, int64_t stride) {
      return logitless_tensor{id, const_cast<void*>(data), stride};
    };
    return {
#define LOGITLESS_TENSOR(name, NAME, ...) tensor(LOGITLESS_TENSOR_##NAME, name, 0),
#define LOGITLESS_MATRIX(name, NAME, ...) tensor(LOGITLESS_TENSOR_##NAME, name, name##_stride),
#include <logitless/tensors.def>
    };
  }
};

// Throws unless both operands have rows of one length.
inline void check_columns(int64_t of_hidden, int64_t of_weight) {
  if (of_hidden == of_weight) return;
  throw Error(LOGITLESS_INVALID_ARGUMENT, "weight: expected " + std::to_string(of_hidden) +
                                              " columns as hidden has, got " + std::to_string(of_weight));
}

// Makes a problem of the operands' sizes and dtypes. A gradient gets the dtype of its operand.
template <class H, class C>
Problem make_problem(Pass pass, Matrix<H> hidden, Matrix<C> weight) {
  check_columns(hidden.columns, weight.columns);
  Problem problem;
  problem.pass = static_cast<int32_t>(pass);
  problem.tokens = hidden.rows;
  problem.vocab = weight.rows;
  problem.hidden = hidden.columns;
  problem.dtype.hidden = problem.dtype.d_hidden = dtype_of<H>();
  problem.dtype.weight = problem.dtype.d_weight = dtype_of<C>();
  problem.dtype.bias = problem.dtype.d_bias = dtype_of<C>();
  return problem;
}

// Sets how gradients are made. threshold and seed matter only to sparsified ones.
inline void set_gradient(Problem& problem, Gradient gradient, double threshold = LOGITLESS_DEFAULT_THRESHOLD,
                         int64_t seed = 0) {
  problem.gradient = static_cast<int32_t>(gradient);
  problem.threshold = threshold;
  problem.seed = seed;
}

// Makes buffers that hold the inputs; outputs are null. targets has an entry for each row of hidden, or K
// with targets_per_row K.
template <class H, class C, class Y>
Buffers make_buffers(Matrix<H> hidden, Matrix<C> weight, std::span<const Y> targets) {
  static_assert(std::is_same_v<Y, int32_t> || std::is_same_v<Y, int64_t>, "targets are int32 or int64");
  const auto count = static_cast<int64_t>(targets.size());
  if (hidden.rows == 0 ? count != 0 : count == 0 || count % hidden.rows != 0) {
    throw Error(LOGITLESS_INVALID_ARGUMENT, "targets: expected " + std::to_string(hidden.rows) +
                                                " entries, one a row of hidden, or a multiple, got " +
                                                std::to_string(count));
  }
  Buffers buffers;
  buffers.targets_dtype = std::is_same_v<Y, int32_t> ? LOGITLESS_I32 : LOGITLESS_I64;
  buffers.targets_count = count;
  buffers.hidden = hidden.data;
  buffers.hidden_stride = hidden.stride;
  buffers.weight = weight.data;
  buffers.weight_stride = weight.stride;
  buffers.targets = targets.data();
  return buffers;
}

// Adds the tensors that the buffers hold to those that the problem has, and takes the dtype of their targets.
inline Problem with_tensors(Problem problem, const Buffers& buffers) {
  if (buffers.targets_dtype >= 0) problem.dtype.targets = buffers.targets_dtype;
#define LOGITLESS_TENSOR(name, NAME, element, type, role, shape, planned, ...) \
  problem.has.planned = problem.has.planned || buffers.name != nullptr;
#include <logitless/tensors.def>
  return problem;
}

// The backend, device and threads that plans are made for.
class Context {
 public:
  Context() : Context(ContextOptions{}) {}
  explicit Context(const ContextOptions& options) {
    logitless_context* made = nullptr;
    check(logitless_context_create(&options, &made));
    handle_.reset(made);
  }
  const logitless_context* handle() const noexcept { return handle_.get(); }

  // Lists all plans considered for the problem and its budget.
  std::vector<PlanInfo> plans(const Problem& problem) const {
    const auto options = problem.options();
    const auto tensors = problem.tensors();
    int32_t count = 0;
    const auto list = [&](logitless_plan_info* infos) {
      check(logitless_plan_list(handle(), options.data(), options.size(), tensors.data(), tensors.size(),
                                infos, count, &count));
    };
    list(nullptr);
    std::vector<PlanInfo> out(static_cast<size_t>(count));
    static_assert(sizeof(PlanInfo) == sizeof(logitless_plan_info));
    list(out.data());
    return out;
  }

 private:
  struct Destroy {
    void operator()(logitless_context* context) const noexcept { logitless_context_destroy(context); }
  };
  std::unique_ptr<logitless_context, Destroy> handle_;
};

// Host memory for a run: 64-byte aligned and uninitialised. It serves every plan that needs no more.
class Workspace {
 public:
  explicit Workspace(size_t size)
      : size_(size), data_(size == 0 ? nullptr : static_cast<std::byte*>(::operator new(size, kAlignment))) {}
  std::span<std::byte> bytes() const noexcept { return {data_.get(), size_}; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* data) const noexcept { ::operator delete(data, kAlignment); }
  };
  size_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

// How one problem is run: kernels, chunks and the size of the workspace. It outlives its context. Several
// threads may run one plan at the same time, each with buffers and a workspace of its own.
class Plan {
 public:
  Plan(const Context& context, const Problem& problem) {
    logitless_plan* made = nullptr;
    const auto options = problem.options();
    const auto tensors = problem.tensors();
    check(logitless_plan_create(context.handle(), options.data(), options.size(), tensors.data(),
                                tensors.size(), &made));
    handle_.reset(made);
    targets_dtype_ = problem.dtype.targets;
    targets_count_ = problem.tokens * (problem.targets_per_row > 0 ? problem.targets_per_row : 1);
  }
  // Plans for the tensors that the buffers hold, beside those of the problem.
  Plan(const Context& context, const Problem& problem, const Buffers& buffers)
      : Plan(context, with_tensors(problem, buffers)) {}
  const logitless_plan* handle() const noexcept { return handle_.get(); }
  PlanInfo info() const {
    PlanInfo out;
    check(logitless_plan_get_info(handle_.get(), &out));
    return out;
  }
  // Runs the plan. The workspace holds at least info().workspace_bytes. Allocates nothing.
  void run(const Buffers& buffers, std::span<std::byte> workspace, void* stream = nullptr) const {
    check_targets(buffers);
    const auto tensors = buffers.tensors();
    check(logitless_run(handle_.get(), tensors.data(), tensors.size(), workspace.data(), workspace.size(),
                        stream));
  }

  // Throws for targets of another dtype or number than the plan's: the C interface sees a pointer alone, and
  // would read past them. run() and loss_from_row_stats() call it.
  void check_targets(const Buffers& buffers) const {
    const auto refuse = [](const std::string& expected, const std::string& got) {
      throw Error(LOGITLESS_INVALID_ARGUMENT,
                  "targets: expected " + expected + " as in the plan, got " + got);
    };
    const auto name = [](int32_t dtype) { return dtype == LOGITLESS_I32 ? "int32" : "int64"; };
    if (buffers.targets_dtype >= 0 && buffers.targets_dtype != targets_dtype_)
      refuse(name(targets_dtype_), name(buffers.targets_dtype));
    if (buffers.targets_count >= 0 && buffers.targets_count != targets_count_)
      refuse(std::to_string(targets_count_) + " entries", std::to_string(buffers.targets_count));
  }

 private:
  struct Destroy {
    void operator()(logitless_plan* plan) const noexcept { logitless_plan_destroy(plan); }
  };
  int32_t targets_dtype_ = LOGITLESS_I64;
  int64_t targets_count_ = 0;
  std::unique_ptr<logitless_plan, Destroy> handle_;
};

// Plans, allocates the workspace and runs once, on host memory.
inline PlanInfo run_once(const Context& context, const Problem& problem, const Buffers& buffers) {
  const Plan plan(context, problem, buffers);
  const PlanInfo info = plan.info();
  const Workspace workspace(static_cast<size_t>(info.workspace_bytes));
  plan.run(buffers, workspace.bytes());
  return info;
}

// The pieces for a vocabulary cut into shards, with a plan of any shard: see logitless.h.
inline void merge_row_stats(const Plan& plan, const Buffers& from, const Buffers& into) {
  const auto a = from.tensors(), b = into.tensors();
  check(logitless_row_stats_merge(plan.handle(), a.data(), a.size(), b.data(), b.size()));
}
inline void rebase_row_stats(const Plan& plan, const Buffers& stats, const void* new_max) {
  const auto tensors = stats.tensors();
  check(logitless_row_stats_rebase(plan.handle(), tensors.data(), tensors.size(), new_max));
}
inline void loss_from_row_stats(const Plan& plan, const Buffers& buffers) {
  plan.check_targets(buffers);
  const auto tensors = buffers.tensors();
  check(logitless_loss_from_row_stats(plan.handle(), tensors.data(), tensors.size()));
}

// A backend of this build.
struct BackendInfo {
  std::string name;
  std::string description;
  std::string why_unavailable;  // empty: usable
};
// Lists the backends of this build, in order of preference.
inline std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> out;
  for (int32_t i = 0; i < logitless_backend_count(); ++i) {
    char description[512];
    char why[512];
    check(logitless_backend_info(i, description, sizeof description, why, sizeof why));
    out.push_back({logitless_backend_name(i), description, why});
  }
  return out;
}

// A CUDA device.
struct DeviceInfo : logitless_device_info {
  DeviceInfo() noexcept : logitless_device_info{} {}
};
// Lists the CUDA devices by ordinal. Without any, *why_none (if not null) becomes one line with the reason.
inline std::vector<DeviceInfo> devices(std::string* why_none = nullptr) {
  int32_t count = 0;
  char why[512];
  check(logitless_device_count(&count, why, sizeof why));
  std::vector<DeviceInfo> out(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    check(logitless_device_get_info(i, &out[static_cast<size_t>(i)]));
  }
  if (why_none != nullptr) *why_none = why;
  return out;
}

// Measures a CUDA device as logitless_tune() does, and returns its record as JSON.
inline std::string tune(const logitless_tune_options& options) {
  const char* record = nullptr;
  check(logitless_tune(&options, &record));
  return record;
}

}  // namespace v0_1
}  // namespace logitless
