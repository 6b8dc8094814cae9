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
  kForward = 0,      // loss only: one matmul
  kWhole = 1,        // keeps all exp logits: three matmuls
  kTokenChunks = 2,  // keeps the exp logits of one chunk of tokens: three matmuls
  kVocabChunks = 3,  // computes logits again for the gradients: up to four matmuls
  kBackward = 4,     // gradients only, from a known lse: three matmuls
  kSparsified = 5,   // sparsified gradients, with or without the forward pass: about one matmul
};

const char* plan_kind_name(PlanKind kind);

// A backend's own form of a plan, which can be run. It holds copies of all that it needs of the problem and
// of the options. Copies of a Plan share it.
class BackendPlan {
 public:
  virtual ~BackendPlan() = default;
  // Runs the plan. Buffers are complete for the problem; the workspace has Plan::workspace_bytes at
  // kWorkspaceAlignment. Allocates no memory of their kind. stream: a cudaStream_t, null on the host. group:
  // not null if the problem is in a group; d_hidden stays this rank's part. Several threads may run a plan at
  // once, each with its own buffers and workspace.
  virtual void run(const Buffers& buffers, Workspace workspace, void* stream,
                   const Communicator* group) const = 0;
};

// How one backend runs one problem: facts about it, and the plan itself.
struct Plan {
  PlanKind kind = PlanKind::kForward;
  uint64_t workspace_bytes = 0;  // memory beyond inputs and outputs: exact, and all that the run uses
  uint64_t saved_bytes = 0;      // size of Buffers::saved
  // Size of Buffers::screen_weight; 0: the plan neither writes nor reads it.
  uint64_t screen_weight_bytes = 0;
  double cost_matmuls = 0;  // work in matmuls of F = 2NVD FLOP
  double predicted_seconds = 0;
  double rounding_penalty =
      1;  // factor of the seconds where plans are compared: a rounding must gain more than it
  // A second such factor where plans are chosen by default, for costs that are not predicted.
  double default_penalty = 1;
  std::string choice;  // reason for this plan among others, for people; empty if it was not chosen
  int threads = 1;
  std::string engine;          // set of kernels, as BackendOptions::engine takes it
  std::string reason;          // reason for this engine, for people
  std::string config;          // configuration of the kernels, for people
  int64_t token_chunk = 0;     // rows whose exp logits are kept at one time
  int64_t cached_columns = 0;  // first columns, whose exp logits stay for the gradients
  int64_t vocab_window = 0;    // other columns that are computed at one time; 0: all
  // All-gathers of a group's row statistics, lse estimates and cuts, and the bytes that they bring to each
  // rank.
  int64_t gathers = 0;
  uint64_t gathered_bytes = 0;
  std::shared_ptr<const BackendPlan> backend_plan;

  // The bytes that a budget limits. Draws do not count: no plan makes their lists smaller.
  uint64_t counted_bytes() const {
    return workspace_bytes + screen_weight_bytes + (kind == PlanKind::kSparsified ? 0 : saved_bytes);
  }
};

// Throws kBudgetTooSmall. required: the smallest budget that works. plan: its name in the message, if it has
// one.
[[noreturn]] void throw_budget_too_small(uint64_t required, uint64_t max_workspace_bytes,
                                         const std::string& plan = "");

// Returns the fastest plan within the budget (0: no budget), with rounding_penalty as a factor of its time.
// Throws kBudgetTooSmall with the smallest budget that works.
const Plan& choose_plan(const std::vector<Plan>& candidates, uint64_t max_workspace_bytes);

// A budget that any plan fits.
inline constexpr uint64_t kFastest = std::numeric_limits<int64_t>::max();

// The choice by default, where the caller sets no budget. It is the smallest plan that takes at most
// kNearlyFastest times the fastest one's time, both times their penalties. If that needs more than
// default_bytes(), it is the fastest plan within these, provided that its time is at most kFastEnough times
// the fastest one's, without penalties.
inline constexpr double kNearlyFastest = 1.03, kFastEnough = 1.06;
// A quarter of the float32 logits, plus 64 MiB. In a group it counts the largest shard's, so that all ranks
// plan alike.
uint64_t default_bytes(const Problem& problem);
// Returns the plans within a budget, as Backend::plans.
using PlansWithin = std::function<std::vector<Plan>(uint64_t budget)>;
// Returns the plan for a problem, with the reason of the choice. max_workspace_bytes 0: by default.
Plan chosen_plan(const Problem& problem, const PlansWithin& plans, uint64_t max_workspace_bytes);

// Numbers by which a planner compares plans.
struct PlanRank {
  uint64_t bytes = 0;
  double seconds = 0;
  double rounding_penalty = 1;
  bool is_no_worse(const PlanRank& other) const {
    return bytes <= other.bytes && seconds <= other.seconds && rounding_penalty <= other.rounding_penalty;
  }
};

// Candidates that may be chosen by default: no other one is at least as good in everything, and none is too
// slow beside them.
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
