#pragma once
#include <array>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

namespace logitless::cli {

class Runner;

// One problem of the grid: loss and gradients in its dtypes. The bias and its gradient have the weight's
// dtype.
struct CheckCase {
  std::string options;  // name of the set of options
  logitless::v0_1::Problem
      problem;           // the full name, as a file that sees the library's core knows another Problem
  double logit_std = 2;  // standard deviation of the logits before the options
  bool ignored_rows = false;

  std::string name() const;  // "64x1000x64 bf16 softcap"
};
// Returns a case with loss, entropy, argmax and both gradients. `sizes`: tokens, vocabulary and dimension.
CheckCase make_case(std::string options, const std::array<int64_t, 3>& sizes, logitless_dtype hidden,
                    logitless_dtype weight);

// Returns all cases: shapes of every kind of remainder x dtypes x options. `full` adds larger shapes.
std::vector<CheckCase> check_grid(bool full);

// Operands of a case as float64 numbers that its dtypes hold exactly. Missing operands are empty.
struct CheckData {
  explicit CheckData(const CheckCase& c);

  std::vector<double> hidden;        // [N, D]
  std::vector<double> weight;        // [V, D]
  std::vector<double> bias;          // [V]
  std::vector<double> class_weight;  // [V]
  std::vector<double> token_weight;  // [N]
  std::vector<double> temperature;   // [N]
  std::vector<int64_t> targets;      // [N]
};

// Results of a case as float64 numbers. Ignored rows hold 0, and -1 as argmax.
struct CheckOutputs {
  std::vector<double> loss;      // [1]
  std::vector<double> row_loss;  // [N], before the reduction
  std::vector<double> nll, lse, entropy;
  std::vector<double> d_hidden, d_weight, d_bias;  // empty without gradients
  std::vector<int64_t> argmax;
};

// Runs a case within a budget in bytes (0: none). float64: run everything in float64.
CheckOutputs run_case(Runner& runner, const CheckCase& c, const CheckData& data, bool float64, size_t budget);
// Returns the different workspaces of the context's plans for the case.
std::vector<size_t> workspaces_of(const Context& context, const CheckCase& c);

// One output of one run against float64: the 2-norm of the difference, and its bound.
struct CheckedOutput {
  std::string name;
  double error = 0;
  double bound = 0;
  bool passed() const { return error <= bound; }  // false for a NaN
};

// Compares a run with the truth. The bounds follow only from the truth and norms of the operands
// (docs/numerics.md derives them). rounds_dz: gradients of the logits are rounded to the operands' common
// 16-bit dtype before they are multiplied, as tensor cores need them. An argmax is wrong if it is a logit
// that float32 can distinguish as smaller.
std::vector<CheckedOutput> compare(const CheckCase& c, const CheckData& data, const CheckOutputs& truth,
                                   const CheckOutputs& got, bool rounds_dz);

}  // namespace logitless::cli
