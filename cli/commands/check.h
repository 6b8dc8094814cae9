#pragma once
#include <array>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

namespace logitless::cli {

class Runner;

// One problem of the grid: loss and gradients in its dtypes, the weight's for the bias, too.
struct CheckCase {
  std::string options;               // name of the set of options
  logitless::v0_1::Problem problem;  // a file that sees the library's core knows one more of this name
  double logit_std = 2;              // of the logits before the options
  bool ignored_rows = false;

  std::string name() const;  // "64x1000x64 bf16 softcap"
};
// Loss, entropy, argmax and both gradients of hidden states of `sizes`: tokens, vocabulary and dimension.
CheckCase make_case(std::string options, const std::array<int64_t, 3>& sizes, logitless_dtype hidden,
                    logitless_dtype weight);

// Shapes of every kind of remainder x dtypes x options; `full` adds larger shapes.
std::vector<CheckCase> check_grid(bool full);

// Operands of a case as float64 numbers that its dtypes hold exactly; empty without.
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

// Results of a case as float64 numbers. Rows that are ignored hold 0, and -1 as argmax.
struct CheckOutputs {
  std::vector<double> loss;      // [1]
  std::vector<double> row_loss;  // [N], before the reduction
  std::vector<double> nll, lse, entropy;
  std::vector<double> d_hidden, d_weight, d_bias;  // empty without
  std::vector<int64_t> argmax;
};

// A case through the library within a budget in bytes, 0: none. float64: all of it in float64.
CheckOutputs run_case(Runner& runner, const CheckCase& c, const CheckData& data, bool float64, size_t budget);
// The workspaces that the context's plans take, each once.
std::vector<size_t> workspaces_of(const Context& context, const CheckCase& c);

// One output of one run against float64: the 2-norm of the difference, and what it may be.
struct CheckedOutput {
  std::string name;
  double error = 0;
  double bound = 0;
  bool passed() const { return error <= bound; }  // false for a NaN
};

// The bounds follow from the truth and norms of the operands alone: docs/numerics.md derives them. rounds_dz:
// gradients of the logits are rounded to the operands' dtype, where both have the same 16-bit one, before
// they are multiplied, as tensor cores need them. argmax: rows that chose a logit that float32 can tell to be
// smaller.
std::vector<CheckedOutput> compare(const CheckCase& c, const CheckData& data, const CheckOutputs& truth,
                                   const CheckOutputs& got, bool rounds_dz);

}  // namespace logitless::cli
