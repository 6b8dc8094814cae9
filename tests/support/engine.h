#pragma once
#include <cstdint>
#include <logitless/logitless.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "case.h"

namespace logitless_test {

// One way of computing on this machine: a backend and its engine, by name.
struct Engine {
  std::string backend;
  std::string engine;
  // Whether it computes in double, so that only the outputs are rounded.
  bool is_reference() const { return backend == "reference"; }
  // Whether buffers are in the memory of CUDA device 0.
  bool is_device() const { return backend == "cuda"; }
  // Whether that is an emulated device, which is slow.
  bool is_emulated() const;
  // Whether it is a CUDA engine for 16-bit operands alone, whose exponentials are in base 2.
  bool is_fused() const { return engine == "sm90" || engine == "mma"; }
  // Whether it can run problems in float64.
  bool has_float64() const { return is_reference() || (is_device() && engine == "portable"); }
  bool can_run(const logitless::Problem& problem) const {
    if (is_device() && problem.gradient != LOGITLESS_EXACT && rounds_short_operands(problem)) return false;
    if (is_fused() && !has_short_operands(problem)) return false;
    return has_float64() || problem.dtype.hidden != LOGITLESS_F64;
  }
  // Whether it can run the problem with sparsified gradients.
  bool can_sparsify(logitless::Problem problem) const {
    problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
    if (is_device() && problem.dtype.hidden == LOGITLESS_F64) return false;
    return can_run(problem) && (problem.label_smoothing == 0 || problem.softcap == 0);
  }
  // The most precise format of operands that it can run, apart from float64.
  logitless_dtype plain_dtype() const { return is_fused() ? LOGITLESS_BF16 : LOGITLESS_F32; }
  // The 16-bit formats that a fused engine keeps exp logits in, or only plain_dtype().
  std::vector<logitless_dtype> kept_dtypes() const {
    if (is_fused()) return {LOGITLESS_BF16, LOGITLESS_F16};
    return {plain_dtype()};
  }
  // Whether a run with gradients keeps exp logits of a problem without a softcap.
  bool keeps_exp_logits(const logitless::Problem& problem) const {
    return is_device() && (is_fused() || product_dtype(problem, problem.dtype.hidden) != LOGITLESS_F16);
  }
  // Whether the products have operands in the same 16-bit format.
  static bool has_short_operands(const logitless::Problem& problem) {
    const logitless_dtype hidden = product_dtype(problem, problem.dtype.hidden);
    return hidden == product_dtype(problem, problem.dtype.weight) &&
           (hidden == LOGITLESS_BF16 || hidden == LOGITLESS_F16);
  }
  // Whether an operand in one 16-bit format is rounded to the other.
  static bool rounds_short_operands(const logitless::Problem& problem) {
    const auto rounds = [&](int32_t dtype) {
      return dtype != LOGITLESS_F32 && dtype != product_dtype(problem, dtype);
    };
    return rounds(problem.dtype.hidden) || rounds(problem.dtype.weight);
  }
  // Whether the gradient of the logits is rounded to the operands' format before the products of the backward
  // pass. It is where both operands have the same 16-bit format and products of that format multiply them.
  bool shortens_gradients(const logitless::Problem& problem) const {
    if (is_device()) return has_short_operands(problem);
    return engine == "avx512_bf16" && has_short_operands(problem) &&
           product_dtype(problem, problem.dtype.hidden) == LOGITLESS_BF16;
  }
  std::string name() const { return engine.empty() ? backend : backend + "_" + engine; }
};

inline void PrintTo(const Engine& engine, std::ostream* out) {
  *out << engine.name();
}

// All usable engines: those of the CPU, those on CUDA device 0, and last the reference.
std::vector<Engine> engines();
std::vector<Engine> host_engines();
std::vector<Engine> device_engines();
// Returns why there is no engine on a device; empty when there is one.
std::string why_no_device();
// The first engine, which a user gets.
Engine best_engine();

// Returns why an engine cannot sparsify gradients; empty when it can.
std::string why_not_sparsified(const Engine& engine);

// ThreadSanitizer makes everything ten times slower, and an emulated device is slow. Suites then take fewer
// problems.
bool is_slowed_down();
inline uint64_t seeds(uint64_t count) {
  return is_slowed_down() ? (count + 7) / 8 : count;
}

// Makes a context; threads 0 is the default. ThreadSanitizer builds get spawned threads, because it does not
// understand OpenMP.
logitless::Context make_context(const Engine& engine, int threads = 0);

// Makes a context whose threads come from the host. Every loop starts `threads` of them, which take tasks
// from a counter, so their order is up to the scheduler.
logitless::Context make_hosted_context(const Engine& engine, int threads);
logitless::Context make_hosted_context(const Engine& engine, int threads, logitless_parallel_for parallel_for,
                                       void* pool);

}  // namespace logitless_test
