#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.h"

namespace headroom {

enum class PlanKind : int {
  kForward = 0,      // loss only, 1F
  kWhole = 1,        // all exps are kept, 3F
  kTokenChunks = 2,  // exps of one chunk of tokens are kept, 3F
  kVocabChunks = 3,  // logits are computed again for the gradients, up to 4F
  kBackward = 4,     // gradients only, from a known lse, 3F
  kThinned = 5,      // thinned gradients, with or without the forward pass, about 1F
};

const char* plan_kind_name(PlanKind kind);

// How one backend will run one problem. The numbers below the line are the backend's own.
struct Plan {
  PlanKind kind = PlanKind::kForward;
  size_t workspace_bytes = 0;  // beyond inputs and outputs; exact, and all that the run uses
  size_t draws_bytes = 0;      // of Buffers::draws
  double cost_f = 0;           // work in units of F = 2NVD FLOP
  double predicted_seconds = 0;
  int threads = 1;
  std::string implementation;  // which kernels, by the name that BackendOptions::isa takes
  std::string reason;          // why these, for people
  std::string config;          // their configuration, for people
  // ----
  int64_t token_chunk = 0;          // rows whose exps are kept at once
  int64_t cached_vocab_blocks = 0;  // vocabulary blocks whose exps are kept
  int64_t detail[10] = {};
};

// The fastest of those within the budget (0: no budget). Throws kBudgetTooSmall naming the smallest need.
const Plan& choose_plan(const std::vector<Plan>& candidates, size_t max_workspace_bytes);

}  // namespace headroom
