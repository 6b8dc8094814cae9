// With batch_invariant, rows, budget, pass and device have no part in anything that sets the order of a row's
// sums.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "cuda/engines/engine.h"
#include "cuda/plan/sizes.h"
#include "head_plans.h"

namespace logitless::cuda::batch_invariant {
namespace {

constexpr int64_t kVocabs[] = {1, 100, 3011, 8000, 20371, 128256, 262144};

Device device_of(int processors) {
  Device device = h200();
  device.processors = processors;
  return device;
}

Problem problem_of(int64_t tokens, int64_t vocab, Pass pass, DType hidden, DType weight,
                   int64_t depth = 1024) {
  Problem p = head_problem({tokens, vocab, depth}, pass, hidden);
  p.dtype.weight = p.dtype.d_weight = weight;
  p.batch_invariant = true;
  return validated(p);
}

void check(const Problem& p, const Plan& plan, bool relative_to_offset = true) {
  const PlanDetail& d = detail_of(plan);
  const EngineTraits traits = d.engine->traits();
  SCOPED_TRACE(std::string(d.engine->name()) + ", " + std::to_string(p.tokens) + " x " +
               std::to_string(p.vocab) + ": " + plan.config);
  EXPECT_EQ(d.partials, ceil_div(p.vocab, traits.partial_columns));
  EXPECT_EQ(d.relative_to_offset, relative_to_offset && traits.offsets_first);
  if (d.copies_weight && d.vocab_window < p.vocab) {
    EXPECT_EQ(d.vocab_window % traits.partial_columns, 0);
  }
  if (traits.needs_scratch && d.scratch_columns < p.vocab) {
    EXPECT_EQ(d.scratch_columns % traits.partial_columns, 0);
  }
}

TEST(CudaBatchInvariantPlans, SumsFollowColumnsAlone) {
  const std::pair<DType, DType> operands[] = {{DType::kBF16, DType::kBF16},
                                              {DType::kF16, DType::kF16},
                                              {DType::kF32, DType::kF32},
                                              {DType::kF32, DType::kBF16}};
  for (const auto& [hidden, weight] : operands) {
    for (const char* engine : {"", "portable"}) {
      for (const int64_t vocab : kVocabs) {
        for (const int64_t tokens : {1, 300, 8192}) {
          for (const int processors : {108, 132}) {
            for (const Pass pass : {Pass::kForward, Pass::kForwardBackward}) {
              const Problem p = problem_of(tokens, vocab, pass, hidden, weight);
              for (const size_t budget : {size_t{0}, size_t{1}, 40 * kMiB, 200 * kMiB}) {
                for (const Plan& plan : make_plans(p, device_of(processors), engine, budget)) {
                  check(p, plan);
                }
              }
            }
          }
        }
      }
    }
  }
}

// Rows of such a hidden size are copied, window by window.
TEST(CudaBatchInvariantPlans, WindowsOfCopiesAreWholePartials) {
  for (const int64_t vocab : kVocabs) {
    for (const int64_t tokens : {512, 2048}) {
      for (const Pass pass : {Pass::kForward, Pass::kForwardBackward}) {
        const Problem p = problem_of(tokens, vocab, pass, DType::kF32, DType::kF32, 1002);
        for (const size_t budget : {size_t{0}, 20 * kMiB, 32 * kMiB, 200 * kMiB}) {
          for (const Plan& plan : make_plans(p, device_of(108), "portable", budget)) check(p, plan);
        }
      }
    }
  }
}

// Exp logits cannot be kept, so no pass has sums relative to logit offsets.
TEST(CudaBatchInvariantPlans, LabelSmoothingHasNoOffsets) {
  for (const Pass pass : {Pass::kForward, Pass::kForwardBackward}) {
    Problem p = problem_of(300, 3011, pass, DType::kBF16, DType::kBF16);
    p.label_smoothing = 0.1;
    for (const Plan& plan : make_plans(p, device_of(132), "", 0)) check(p, plan, false);
  }
}

// The bytes are partials of two sums a row, beside the loss's own. A small budget takes fewer rows at a time.
TEST(CudaBatchInvariantPlans, TheirBytes) {
  for (const int64_t tokens : {8192, 65536}) {
    const Problem p = problem_of(tokens, 128256, Pass::kForward, DType::kBF16, DType::kBF16);
    const std::vector<Plan> plans = make_plans(p, device_of(132), "", 0);
    const Plan& plan = choose_plan(plans, 0);
    EXPECT_EQ(detail_of(plan).source, HiddenSource::kCaller);
    EXPECT_LE(plan.workspace_bytes, 8 * kMiB + static_cast<size_t>(tokens) * (64 + 668 * 8));
    const size_t budget = 32 * kMiB;
    const std::vector<Plan> small = make_plans(p, device_of(132), "", budget);
    EXPECT_LE(choose_plan(small, budget).workspace_bytes, budget);
  }
}

}  // namespace
}  // namespace logitless::cuda::batch_invariant
