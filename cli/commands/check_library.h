#pragma once
#include <logitless/logitless.hpp>
#include <vector>

#include "commands/check_cases.h"
#include "commands/device_run.h"

namespace logitless::cli {

// A case through the library, with all outputs: in the dtypes of the case, or all in float64.
class CheckRunner {
 public:
  CheckRunner(const CheckCase& c, const CheckData& data, bool float64);

  // The workspaces that the context's plans take, each once.
  std::vector<size_t> workspaces(const Context& context) const;
  // Within a budget in bytes; 0: none.
  CheckOutputs run(Runner& runner, size_t budget) const;

 private:
  Problem make_problem(size_t budget) const;

  const CheckCase& case_;
  logitless_dtype hidden_dtype_;
  logitless_dtype classifier_dtype_;
  logitless_dtype stats_dtype_;
  // Operands in these dtypes.
  std::vector<std::byte> hidden_, classifier_, bias_, class_weight_, token_weight_, temperature_;
  std::vector<int64_t> targets_;
};

}  // namespace logitless::cli
