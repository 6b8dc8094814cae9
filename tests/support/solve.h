#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <logitless/distributed.hpp>
#include <string_view>
#include <vector>

#include "case.h"

namespace logitless_test {

// Outputs of runs, by the names of tensors; empty where not wanted. Scalars are vectors of one, draws are
// 32-bit integers.
struct Outputs {
#define LOGITLESS_TENSOR(name, ...) std::vector<double> name;
#include <logitless/tensors.def>
  size_t workspace_bytes = 0;
};

// A tensor as the list of tensors has it.
enum class TensorRole { INPUT, UPSTREAM, STATISTIC, OUTPUT, GRADIENT };
enum class TensorDtype { FLOAT, INDEX, STATS, I64, I32, U8, BYTES };
struct ListedTensor {
  const char* name;
  std::vector<double> Outputs::*values;
  TensorDtype dtype;
  TensorRole role;
  std::string_view shape;

  // Whether it is one of the statistics by which shards are merged.
  bool is_merged() const { return role == TensorRole::STATISTIC && shape == "[N]"; }
  // Whether it is an output of a forward pass for each row.
  bool is_of_rows() const { return is_merged() || (role == TensorRole::OUTPUT && shape.ends_with("[N]")); }
};
inline constexpr ListedTensor kTensors[] = {
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, shape, ...) \
  {#name, &Outputs::name, TensorDtype::dtype, TensorRole::role, shape},
#include <logitless/tensors.def>
};

// The tensors of a run in guarded memory. Outputs begin as NaN.
class RunTensors {
 public:
  RunTensors(const logitless::Problem& problem, const Case& c);

  void add_inputs();
  // Adds the outputs of the problem's pass. Only a run on a device writes invalid_targets.
  void add_outputs(int64_t saved_bytes, bool on_device, bool only_losses);
  // Adds inputs that a forward pass made.
  void add_known(const Outputs& known, int64_t saved_bytes);
  // Adds the rounded weight: the case's, or memory for it.
  void add_screen_weight(int64_t bytes);
  // Adds the tensors of functions on row statistics: the statistics of shards, which they read and write, and
  // all that follows from them.
  void add_statistics(const Outputs& from);
  void add_losses();

  const logitless::Buffers& buffers() const { return b_; }
  std::vector<GuardedMemory*> memory();
  // Returns the values of outputs and statistics. Anything written outside of them, or into an input, fails
  // the test.
  Outputs read();

 private:
  struct Named {
    Named(const char* its_name, logitless_dtype dtype, int64_t rows, int64_t columns, Layout layout,
          std::vector<double> Outputs::*where)
        : name(its_name), tensor(dtype, rows, columns, layout), values(where) {}
    const char* name;
    Tensor tensor;
    std::vector<double> Outputs::*values;  // null for an input
  };
  const Tensor& input(const char* name, logitless_dtype dtype, int64_t rows, int64_t columns,
                      const std::vector<double>& values, Layout layout);
  void* vector_input(const char* name, logitless_dtype dtype, const std::vector<double>& values);
  Tensor& output(const char* name, logitless_dtype dtype, int64_t rows, int64_t columns,
                 std::vector<double> Outputs::*values, Layout layout);
  // Adds every listed tensor that a run may have and that is wanted.
  template <class Wanted>
  void add_listed(const Wanted& is_wanted);
  void add_gradients();
  int64_t elements(std::string_view shape) const;

  const logitless::Problem& p_;
  const Case& c_;
  logitless_dtype stats_;
  std::deque<Named> tensors_;  // a deque, so that they never move
  logitless::Buffers b_;
};

// The problem of one pass of a case: the passes differ in which options they allow.
logitless::Problem pass_problem(const Case& c, logitless::Pass pass);

// Plans and runs one pass with every output that it can have.
// The problem is pass_problem(), or one that was changed after: its shard of the vocabulary, its budget. All
// memory is guarded. The workspace has exactly the planned size and is full of NaN, and outputs begin as NaN.
// Anything written outside an output, or into an input, fails the test. On a device all of this holds for its
// copies of the memory.
// known: lse (and entropy, and draws) for a backward pass.
// group: the communicator of a problem with group_size.
// only_losses: a forward pass writes only loss, lse and lse_residual.
Outputs run_pass(const logitless::Context& context, const logitless::Problem& problem, const Case& c,
                 const Outputs* known = nullptr, const logitless::Communicator* group = nullptr,
                 bool only_losses = false);

// Runs the passes of the case's mode, a backward pass with the forward pass' results, and returns the outputs
// of all.
Outputs solve_passes(const Case& c, const std::function<Outputs(logitless::Pass, const Outputs* known)>& run);
Outputs solve(const logitless::Context& context, const Case& c, size_t max_workspace_bytes = 0);

// Bitwise the same, NaNs included.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);
// Names the first output that differs; empty when none does.
const char* first_difference(const Outputs& a, const Outputs& b);

}  // namespace logitless_test
