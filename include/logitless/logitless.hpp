// Logitless for C++20: RAII, spans and exceptions over the C ABI of logitless.h, which has the formulas,
// shapes and defaults. Header-only.
//
//   logitless::Context context;                                   // backend, instruction set, threads
//   auto problem = logitless::make_problem(logitless::Pass::forward_backward, hidden, classifier);
//   problem.want_d_hidden = problem.want_d_classifier = 1;
//   logitless::Plan plan(context, problem);                       // throws when the budget is too small
//   logitless::Workspace workspace(plan.info().workspace_bytes);
//   auto buffers = logitless::make_buffers(hidden, classifier, targets);
//   buffers.loss = &loss; ...
//   plan.run(buffers, workspace.bytes());
//
// Errors: logitless::Error, whose what() names the argument, what was expected and what was got.
#pragma once

#if __cplusplus <= 201703L
#error "logitless.hpp: expected C++20 (-std=c++20), got an older standard; logitless.h is C"
#endif

#include <logitless/logitless.h>

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

// Of this version alone: a program may be linked with the library's own types of these names, and with code
// that was compiled against another version.
inline namespace v0_1 {

class Error : public std::runtime_error {
 public:
  Error(logitless_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  logitless_status status() const noexcept { return status_; }

 private:
  logitless_status status_;
};

inline void check(logitless_status status) {
  if (status != LOGITLESS_OK) throw Error(status, logitless_last_error());
}

// The two 16-bit formats as distinct types; only their bits matter here.
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
  thinned = LOGITLESS_THINNED,
  always_thinned = LOGITLESS_ALWAYS_THINNED
};

// A matrix whose rows are contiguous; stride 0 means tightly packed.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // elements from row to row
};

struct ContextOptions : logitless_context_options {
  ContextOptions() noexcept { logitless_context_options_init_sized(this, sizeof(logitless_context_options)); }
};

struct Problem : logitless_problem {
  Problem() noexcept { logitless_problem_init_sized(this, sizeof(logitless_problem)); }
};

struct Buffers : logitless_buffers {
  Buffers() noexcept { logitless_buffers_init_sized(this, sizeof(logitless_buffers)); }
};

struct PlanInfo : logitless_plan_info {
  PlanInfo() noexcept { logitless_plan_info_init_sized(this, sizeof(logitless_plan_info)); }
};

// Sizes and dtypes from the operands; gradients get the dtype of what they are the gradient of.
template <class H, class C>
Problem make_problem(Pass pass, Matrix<H> hidden, Matrix<C> classifier) {
  if (hidden.columns != classifier.columns) {
    throw Error(LOGITLESS_INVALID_ARGUMENT, "classifier: expected " + std::to_string(hidden.columns) +
                                                " columns as hidden has, got " +
                                                std::to_string(classifier.columns));
  }
  Problem problem;
  problem.pass = static_cast<int32_t>(pass);
  problem.tokens = hidden.rows;
  problem.vocab = classifier.rows;
  problem.hidden = hidden.columns;
  problem.hidden_dtype = problem.d_hidden_dtype = dtype_of<H>();
  problem.classifier_dtype = problem.d_classifier_dtype = dtype_of<C>();
  problem.bias_dtype = problem.d_bias_dtype = dtype_of<C>();
  return problem;
}

// How the problem's gradients are made; threshold and seed are those of thinned ones.
inline void set_gradient(Problem& problem, Gradient gradient, double threshold = LOGITLESS_DEFAULT_THRESHOLD,
                         int64_t seed = 0) {
  problem.gradient = static_cast<int32_t>(gradient);
  problem.threshold = threshold;
  problem.seed = seed;
}

template <class H, class C, class Y>
Buffers make_buffers(Matrix<H> hidden, Matrix<C> classifier, std::span<const Y> targets) {
  static_assert(std::is_same_v<Y, int32_t> || std::is_same_v<Y, int64_t>, "targets are int32 or int64");
  if (static_cast<int64_t>(targets.size()) != hidden.rows) {
    throw Error(LOGITLESS_INVALID_ARGUMENT, "targets: expected " + std::to_string(hidden.rows) +
                                                " entries, one a row of hidden, got " +
                                                std::to_string(targets.size()));
  }
  Buffers buffers;
  buffers.hidden = hidden.data;
  buffers.hidden_stride = hidden.stride;
  buffers.classifier = classifier.data;
  buffers.classifier_stride = classifier.stride;
  buffers.targets = targets.data();
  return buffers;
}

class Context {
 public:
  Context() : Context(ContextOptions{}) {}
  explicit Context(const ContextOptions& options) {
    logitless_context* made = nullptr;
    check(logitless_context_create(&options, &made));
    handle_.reset(made);
  }
  const logitless_context* handle() const noexcept { return handle_.get(); }

  // All plans considered for the problem and its budget.
  std::vector<PlanInfo> plans(const Problem& problem) const {
    int32_t count = 0;
    check(logitless_plan_list(handle(), &problem, nullptr, 0, &count));
    std::vector<logitless_plan_info> raw(static_cast<size_t>(count));
    if (count > 0) {
      logitless_plan_info_init_sized(raw.data(), sizeof(logitless_plan_info));
      check(logitless_plan_list(handle(), &problem, raw.data(), count, &count));
    }
    std::vector<PlanInfo> out(raw.size());
    for (size_t i = 0; i < raw.size(); ++i) static_cast<logitless_plan_info&>(out[i]) = raw[i];
    return out;
  }

 private:
  struct Destroy {
    void operator()(logitless_context* context) const noexcept { logitless_context_destroy(context); }
  };
  std::unique_ptr<logitless_context, Destroy> handle_;
};

// Memory for a run: 64-byte aligned, uninitialised, to be used again for any plan that needs no more.
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

class Plan {
 public:
  Plan(const Context& context, const Problem& problem) {
    logitless_plan* made = nullptr;
    check(logitless_plan_create(context.handle(), &problem, &made));
    handle_.reset(made);
  }
  const logitless_plan* handle() const noexcept { return handle_.get(); }
  PlanInfo info() const {
    PlanInfo out;
    check(logitless_plan_get_info(handle_.get(), &out));
    return out;
  }
  // The workspace holds at least info().workspace_bytes; nothing is allocated.
  void run(const Buffers& buffers, std::span<std::byte> workspace, void* stream = nullptr) const {
    check(logitless_run(handle_.get(), &buffers, workspace.data(), workspace.size(), stream));
  }

 private:
  struct Destroy {
    void operator()(logitless_plan* plan) const noexcept { logitless_plan_destroy(plan); }
  };
  std::unique_ptr<logitless_plan, Destroy> handle_;
};

// Plans, allocates the workspace and runs once. A plan does not need its context any more.
inline PlanInfo run_once(const Context& context, const Problem& problem, const Buffers& buffers) {
  const Plan plan(context, problem);
  const PlanInfo info = plan.info();
  const Workspace workspace(static_cast<size_t>(info.workspace_bytes));
  plan.run(buffers, workspace.bytes());
  return info;
}

// A vocabulary cut into shards: see logitless.h.
inline void merge_row_stats(const Problem& problem, const Buffers& from, const Buffers& into) {
  check(logitless_row_stats_merge(&problem, &from, &into));
}
inline void rebase_row_stats(const Problem& problem, const Buffers& stats, const void* new_max) {
  check(logitless_row_stats_rebase(&problem, &stats, new_max));
}
inline void loss_from_row_stats(const Problem& problem, const Buffers& buffers) {
  check(logitless_loss_from_row_stats(&problem, &buffers));
}

// The backends of this build, in order of preference.
struct BackendInfo {
  std::string name;
  std::string description;
  std::string why_unavailable;  // empty: usable
};
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

// The CUDA devices, by ordinal.
struct DeviceInfo : logitless_device_info {
  DeviceInfo() noexcept { logitless_device_info_init_sized(this, sizeof(logitless_device_info)); }
};
// Where there are none, why_none (not null) becomes one line that says why.
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

}  // namespace v0_1
}  // namespace logitless
