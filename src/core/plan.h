#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/buffers.h"
#include "core/communicator.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace logitless {

enum class PlanKind : int {
  kForward = 0,      // loss only, 1F
  kWhole = 1,        // all exp_logits are kept, 3F
  kTokenChunks = 2,  // exp_logits of one chunk of tokens are kept, 3F
  kVocabChunks = 3,  // logits are computed again for the gradients, up to 4F
  kBackward = 4,     // gradients only, from a known lse, 3F
  kSparsified = 5,   // sparsified gradients, with or without the forward pass, about 1F
};

const char* plan_kind_name(PlanKind kind);

// What a backend planned, in a form of its own that can be run. It holds copies of all that it needs of the
// problem and of the options, and is shared by copies of a Plan.
class BackendPlan {
 public:
  virtual ~BackendPlan() = default;
  // Buffers are complete for the problem; the workspace has Plan::workspace_bytes at kWorkspaceAlignment.
  // Allocates nothing of either's memory. stream: a cudaStream_t, null on the host. Any number of threads may
  // run a plan at once, with buffers and workspaces of their own. group: of a problem in a group, else null;
  // d_hidden is left as this rank's part.
  virtual void run(const Buffers& buffers, Workspace workspace, void* stream,
                   const Communicator* group) const = 0;
};

// How one backend will run one problem: facts about it, and the plan itself.
struct Plan {
  PlanKind kind = PlanKind::kForward;
  uint64_t workspace_bytes = 0;  // beyond inputs and outputs; exact, and all that the run uses
  uint64_t draws_bytes = 0;      // of Buffers::draws
  double cost_matmuls = 0;       // work in units of F = 2NVD FLOP
  double predicted_seconds = 0;
  double rounding_penalty = 1;  // times the seconds where plans are compared: what a rounding must gain
  // More of it where the choice is by default: for what is not predicted.
  double default_penalty = 1;
  std::string choice;  // why it was chosen among others, for people; empty: it was not
  int threads = 1;
  std::string engine;          // which kernels, by the name that BackendOptions::engine takes
  std::string reason;          // why these, for people
  std::string config;          // their configuration, for people
  int64_t token_chunk = 0;     // rows whose exp_logits are kept at once
  int64_t cached_columns = 0;  // the first ones, whose exp_logits are kept for the gradients
  int64_t vocab_window = 0;    // columns made at once of those that are not kept; 0: no such cut
  // In a group: all-gathers of row statistics, lse_estimates and cuts, and the bytes that they bring to each
  // rank.
  int64_t gathers = 0;
  uint64_t gathered_bytes = 0;
  std::shared_ptr<const BackendPlan> backend_plan;
};

// The fastest of those within the budget (0: no budget), each with its rounding_penalty. Throws
// kBudgetTooSmall naming the smallest need.
const Plan& choose_plan(const std::vector<Plan>& candidates, uint64_t max_workspace_bytes);

// A budget that any plan fits.
inline constexpr uint64_t kFastest = std::numeric_limits<int64_t>::max();

// The default, where the caller says nothing of memory: the smallest plan that takes at most kNearlyFastest
// times the fastest one's time, each with its rounding_penalty. If that has more than default_bytes(), the
// fastest within these, while its time is at most kFastEnough times the fastest one's, without penalties.
inline constexpr double kNearlyFastest = 1.03, kFastEnough = 1.06;
// A quarter of the float32 logits, and 64 MiB. Of a group those of its largest shard: all ranks plan alike.
uint64_t default_bytes(const Problem& problem);
// Plans within a budget, as Backend::plans.
using PlansWithin = std::function<std::vector<Plan>(uint64_t budget)>;
// The plan that a problem gets, with the reason of the choice. max_workspace_bytes 0: by default.
Plan chosen_plan(const Problem& problem, const PlansWithin& plans, uint64_t max_workspace_bytes);

// A planner compares plans by these.
struct PlanRank {
  uint64_t bytes = 0;
  double seconds = 0;
  double rounding_penalty = 1;
  bool is_no_worse(const PlanRank& other) const {
    return bytes <= other.bytes && seconds <= other.seconds && rounding_penalty <= other.rounding_penalty;
  }
};

// The candidates that may be chosen by default: no other one is no worse, or too fast beside them.
template <class Candidate>
class DefaultCandidates {
 public:
  bool is_too_slow(double seconds) const { return seconds > kFastEnough * fastest_; }
  void add(const PlanRank& rank, const Candidate& candidate) {
    if (is_too_slow(rank.seconds)) return;
    for (const Entry& entry : entries_) {
      if (entry.rank.is_no_worse(rank)) return;
    }
    std::erase_if(entries_, [&](const Entry& entry) { return rank.is_no_worse(entry.rank); });
    entries_.push_back({rank, candidate});
    fastest_ = std::min(fastest_, rank.seconds * rank.rounding_penalty);
  }
  template <class Use>
  void for_each(const Use& use) const {
    for (const Entry& entry : entries_) {
      if (!is_too_slow(entry.rank.seconds)) use(entry.candidate);
    }
  }

 private:
  struct Entry {
    PlanRank rank;
    Candidate candidate;
  };
  std::vector<Entry> entries_;
  double fastest_ = std::numeric_limits<double>::infinity();
};

}  // namespace logitless
