#include "api/run.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/candidates.h"
#include "core/group_stats.h"
#include "core/number_text.h"
#include "core/status.h"
#include "core/targets.h"
#include "core/validate.h"

namespace logitless {
namespace {

// Throws unless the size of a tensor is 0 or what the plan says.
void check_size(const char* argument, uint64_t given, uint64_t planned) {
  if (given == 0 || given == planned) return;
  throw Error(Status::kInvalidArgument,
              ErrorInfo{.argument = argument,
                        .expected = (planned > 0 ? "0 or " : "") + std::to_string(planned) +
                                    ", as this problem's plan says",
                        .got = std::to_string(given),
                        .required_bytes = planned});
}

// Checks the sizes of tensors that another run wrote. Another size of exp logits would mean whole columns of
// fewer bytes, and passes with different columns read wrong ones. A rounded weight of another size is that of
// another weight or engine. An exact plan reads none.
void check_sizes(const Problem& problem, const Plan& plan) {
  if (problem.saved_bytes < kFastest) check_size("saved_bytes", problem.saved_bytes, plan.saved_bytes);
  if (plan.kind == PlanKind::kSparsified && problem.tokens > 0) {
    check_size("screen_weight_bytes", problem.screen_weight_bytes, plan.screen_weight_bytes);
  }
}

// Returns a backend's plans, with notes that hold for all backends.
std::vector<Plan> plans_of(const Backend& backend, const Problem& valid, const BackendOptions& options,
                           uint64_t max_workspace_bytes) {
  std::vector<Plan> plans = backend.plans(valid, options, max_workspace_bytes);
  for (Plan& plan : plans) {
    check_sizes(valid, plan);
    if (valid.batch_invariant) plan.reason += "; a row's sums have the same bits in any batch";
  }
  return plans;
}

// Prints a line on stderr for every plan made, with LOGITLESS_VERBOSE=1.
void report(const Problem& problem, const Backend& backend, const Plan& plan) {
  const char* verbose = std::getenv("LOGITLESS_VERBOSE");
  if (verbose == nullptr || std::strcmp(verbose, "1") != 0) return;
  std::fprintf(
      stderr,
      "logitless: N %lld, V %lld, D %lld: %s on %s (%s), %lld tokens and %lld columns at once, %lld columns "
      "kept, workspace %llu bytes, %s matmuls, %s; %s because: %s\n",
      static_cast<long long>(problem.tokens), static_cast<long long>(problem.vocab),
      static_cast<long long>(problem.hidden), plan_kind_name(plan.kind), backend.name, plan.config.c_str(),
      static_cast<long long>(plan.token_chunk), static_cast<long long>(plan.vocab_window),
      static_cast<long long>(plan.cached_columns), static_cast<unsigned long long>(plan.workspace_bytes),
      fixed_text(plan.cost_matmuls, 2).c_str(), plan.choice.c_str(), plan.engine.c_str(),
      plan.reason.c_str());
}

}  // namespace

std::vector<Plan> list_plans(const Context& context, const Problem& problem, const Backend** backend) {
  const Problem valid = validated(problem);
  *backend = &choose_backend(context.backend, valid, context.options);
  return plans_of(**backend, valid, context.options,
                  problem.max_workspace_bytes >= kFastest ? 0 : problem.max_workspace_bytes);
}

PlannedProblem make_plan(const Context& context, const Problem& problem) {
  const Problem valid = validated(problem);
  const Backend& backend = choose_backend(context.backend, valid, context.options);
  const auto within = [&](uint64_t budget) { return plans_of(backend, valid, context.options, budget); };
  Plan best = chosen_plan(valid, within, problem.max_workspace_bytes);
  report(valid, backend, best);
  return {valid, &backend, context.options, std::move(best)};
}

void check_stream(const BackendOptions& options, const void* stream) {
  if (options.on_host() && stream != nullptr) {
    throw_invalid("stream", "null for buffers in host memory", "a pointer");
  }
}

void refuse_without_device(const BackendOptions& options) {
  if (options.device_model.empty()) return;
  throw Error(Status::kUnsupported,
              ErrorInfo{.argument = "device_model",
                        .expected = "none to run anything (make a context with a device)",
                        .got = options.device_model});
}

namespace {

void check_group(const Problem& problem, const Buffers& buffers, const Communicator* group) {
  if (!problem.in_group() && group != nullptr) {
    throw_invalid("plan", "one with group_size for a run of a group", "one without");
  }
  if (!problem.in_group()) return;
  if (group == nullptr) {
    throw_invalid("plan", "one without group_size (logitless_run_group runs one of a group)",
                  "one with group_size");
  }
  if (group->size != problem.group_size) {
    throw_invalid("communicator.size", std::to_string(problem.group_size) + ", the plan's group_size",
                  std::to_string(group->size));
  }
  if (group->size == 1) return;
  if (buffers.target_log_probs != nullptr && group->all_reduce == nullptr) {
    throw_invalid("communicator.all_reduce", "a function (each rank has some of target_log_probs)", "null");
  }
  const GroupDHidden sum = problem.group_d_hidden;
  if (sum == GroupDHidden::kSum && group->all_reduce == nullptr) {
    throw_invalid("communicator.all_reduce", "a function (d_hidden is added up)", "null");
  }
  if (sum == GroupDHidden::kSumOfOwn && group->reduce_scatter == nullptr) {
    throw_invalid("communicator.reduce_scatter", "a function (d_hidden is added up)", "null");
  }
}

void check_alignment(const void* pointer, const char* argument) {
  const uint64_t off = reinterpret_cast<uintptr_t>(pointer) % kWorkspaceAlignment;
  if (off != 0) throw_invalid(argument, "64-byte alignment", "a pointer off by " + std::to_string(off));
}

void check_workspace(const void* workspace, size_t bytes, uint64_t needed) {
  if (bytes < needed) {
    throw Error(Status::kInvalidArgument, ErrorInfo{.argument = "workspace_bytes",
                                                    .expected = "at least " + std::to_string(needed),
                                                    .got = std::to_string(bytes),
                                                    .required_bytes = needed});
  }
  if (needed > 0) required(workspace, "workspace");
  check_alignment(workspace, "workspace");
}

// Adds up the ranks' parts. Of each log-probability one rank has all and the others 0, so the sum rounds
// nothing.
void add_up(const Problem& p, const Buffers& buffers, void* stream, const Communicator& group) {
  if (buffers.target_log_probs != nullptr) {
    group.sum(buffers.target_log_probs, p.tokens * p.targets_per_row, p.stats_dtype(), stream);
  }
  const int64_t count = p.tokens * p.hidden;
  if (p.group_d_hidden == GroupDHidden::kSum) group.sum(buffers.d_hidden, count, p.dtype.d_hidden, stream);
  if (p.group_d_hidden == GroupDHidden::kSumOfOwn) {
    group.sum_own(buffers.d_hidden, count / group.size, p.dtype.d_hidden, stream);
  }
}

}  // namespace

void run(const PlannedProblem& planned, const Buffers& buffers, void* workspace, size_t workspace_bytes,
         void* stream, const Communicator* group) {
  refuse_without_device(planned.options);
  check_group(planned.problem, buffers, group);
  const Buffers valid = validated(planned.problem, buffers);
  check_workspace(workspace, workspace_bytes, planned.plan.workspace_bytes);
  if (planned.problem.tokens > 0 && planned.plan.saved_bytes > 0) {
    check_alignment(required(valid.saved, "saved"), "saved");
  }
  if (planned.problem.tokens > 0 && planned.plan.screen_weight_bytes > 0) {
    check_alignment(required(valid.screen_weight, "screen_weight"), "screen_weight");
  }
  if (!planned.backend->device_memory) {
    check_stream(planned.options, stream);
    if (group != nullptr) check_agreement(planned.problem, *group, valid.targets, Workspace(workspace));
    check_targets(planned.problem, valid.targets);
  }
  planned.plan.backend_plan->run(valid, Workspace(workspace), stream, group);
  if (group != nullptr) add_up(planned.problem, valid, stream, *group);
}

const Backend& backend_of_rows(const Context& context, DType dtype) {
  Problem any;
  any.dtype.hidden = any.dtype.weight = dtype;
  BackendOptions options = context.options;
  if (!options.on_host()) options.engine.clear();
  return choose_backend(context.backend, any, options);
}

uint64_t candidates_bytes(const Context& context, const Candidates& c) {
  refuse_without_device(context.options);
  const Backend& backend = backend_of_rows(context, c.stats_dtype());
  const uint64_t bytes = backend.candidates_bytes(c, context.options);
  if (c.max_workspace_bytes != 0 && bytes > c.max_workspace_bytes) {
    throw_budget_too_small(bytes, c.max_workspace_bytes, "");
  }
  return bytes;
}

void run_candidates(const Context& context, const Candidates& c, void* workspace, size_t workspace_bytes,
                    void* stream) {
  refuse_without_device(context.options);
  check_stream(context.options, stream);
  const Backend& backend = backend_of_rows(context, c.stats_dtype());
  check_workspace(workspace, workspace_bytes, candidates_bytes(context, c));
  if (context.options.on_host()) check_lists(c.lists);
  backend.candidates(c, context.options, Workspace(workspace), stream);
}

}  // namespace logitless
