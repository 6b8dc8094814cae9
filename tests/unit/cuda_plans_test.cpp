// Plans of the CUDA backend for a made-up device: no driver is called.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/status.h"
#include "cuda/engines/engine.h"
#include "cuda/run/sparsified/sizes.h"
#include "head_plans.h"

namespace logitless::cuda {
namespace {

constexpr Head kHeads[] = {
    {8192, 256000, 2304, "gemma-2-2b"},       {8192, 128256, 4096, "llama-3-8b"},
    {16384, 128000, 2048, "linear-rnn-1.3b"}, {8192, 262144, 1536, "gemma-e2b"},
    {8192, 131072, 5120, "mistral-nemo"},     {4096, 128256, 4096, "llama, 4096 tokens"},
    {1024, 262144, 4096, "few tokens"},       {32768, 32768, 4096, "small vocabulary"},
    {32768, 262144, 4096, "largest"},         {16384, 151936, 1024, "narrow"}};

Problem sparsified_problem(const Head& head, double threshold) {
  Problem p = head_problem(head);
  p.gradient = GradientMethod::kSparsified;
  p.threshold = threshold;
  return validated(p);
}

// A loss alone takes little, gradients keep all exp logits where there is room, and sparsified ones need
// little room.
TEST(CudaPlans, MemoryAndProductsOfEveryHead) {
  for (const Head& head : kHeads) {
    SCOPED_TRACE(head.name);
    const Plan loss = best(head_problem(head, Pass::kForward));
    EXPECT_LE(loss.workspace_bytes, 8 * kMiB + 64 * static_cast<size_t>(head.tokens));
    EXPECT_DOUBLE_EQ(loss.cost_matmuls, 1);
    const Plan fastest = best(head_problem(head));
    EXPECT_EQ(fastest.kind, PlanKind::kWhole);
    EXPECT_DOUBLE_EQ(fastest.cost_matmuls, 3);
    if (head.tokens <= 16384) {
      EXPECT_DOUBLE_EQ(best(head_problem(head), 2560 * kMiB).cost_matmuls, 3);
    }
    if (head.tokens != 8192) continue;
    const Plan sparsified = best(sparsified_problem(head, 0x1p-9));
    EXPECT_EQ(sparsified.kind, PlanKind::kSparsified);
    EXPECT_LE(sparsified.workspace_bytes, 128 * kMiB);
    EXPECT_LT(sparsified.cost_matmuls, 1.05);
    EXPECT_LT(sparsified.predicted_seconds, fastest.predicted_seconds);
  }
}

// Logits of 8-bit operands take less time on Hopper alone. They need a window of the weight and a chunk's
// rows more, and no more than a budget.
TEST(CudaPlans, LogitsOfFp8) {
  for (const Head& head : kHeads) {
    for (const Pass pass : {Pass::kForward, Pass::kForwardBackward}) {
      const Problem plain = head_problem(head, pass);
      Problem fp8 = plain;
      fp8.compute_dtype = DType::kE4M3;
      const Plan fast = best(fp8);
      if (head.tokens >= 4096) {  // to round the weight takes as long for few tokens
        EXPECT_LT(fast.predicted_seconds, 0.95 * best(plain).predicted_seconds) << head.name;
      }
      EXPECT_NE(fast.config.find("e4m3"), std::string::npos);
      const auto rows = static_cast<size_t>(head.tokens * (head.hidden + 20));
      EXPECT_LE(fast.workspace_bytes, best(plain).workspace_bytes + 49 * kMiB + rows) << head.name;
      EXPECT_LE(best(fp8, 2560 * kMiB).workspace_bytes, 2560 * kMiB) << head.name;
    }
  }
}

// Behind a screen, products over the vocabulary have twice the rate where an engine draws from 8-bit
// operands.
TEST(CudaPlans, ScreensHalveTheTimeOfDraws) {
  EXPECT_FALSE(engine_named("mma")->traits().has_e4m3);
  EXPECT_FALSE(engine_named("portable")->traits().has_e4m3);
  const Engine& sm90 = *engine_named("sm90");
  ASSERT_TRUE(sm90.traits().has_e4m3);
  for (const Head& head : kHeads) {
    LogitsArgs args;
    args.rows = head.tokens, args.columns = head.vocab, args.depth = head.hidden;
    args.of_epilogue = DrawArgs{};
    const Problem problem = head_problem(head);
    const Device device = h200();
    const KernelTimes times(problem, device);
    const double whole = sm90.seconds(args, {}, 0, times);
    args.dtype = DType::kE4M3;
    EXPECT_NEAR(sm90.seconds(args, {}, 0, times), whole / 2, 0.02 * whole) << head.name;
  }
}

// No exact plan takes the place of a loss behind a screen.
TEST(CudaPlans, ScreensTheLossAlone) {
  Problem p = sparsified_problem({8192, 131072, 2048}, 0x1p-9);
  p.pass = Pass::kForward;
  p.has.d_hidden = p.has.d_weight = p.has.d_bias = false;
  p.screen = Screen::kFp8;
  EXPECT_EQ(best(validated(p)).kind, PlanKind::kSparsified);
}

// Rounded rows of hidden take fewer bytes, so raster groups differ from those of other draws.
TEST(CudaPlans, ScreensHaveEnoughPartials) {
  const Engine& sm90 = *engine_named("sm90");
  for (int64_t tokens = 1500; tokens < 20000; tokens += 500) {
    for (const int64_t hidden : {1024, 2056, 4096, 8192}) {
      Problem p = sparsified_problem({tokens, 128256, hidden}, 0x1p-9);
      p.gradient = GradientMethod::kAlwaysSparsified;
      p.screen = Screen::kFp8;
      p = validated(p);
      LogitsArgs args;
      args.dtype = DType::kE4M3;
      args.rows = tokens, args.columns = p.vocab, args.depth = (hidden + 15) / 16 * 16;
      args.of_epilogue = DrawArgs{};
      EXPECT_GE(detail_of(best(p)).partials, sm90.partials(args, h200())) << tokens << ", " << hidden;
    }
  }
}

// Gradients with label smoothing come from kept exp logits, where weighted logits can be dot products.
TEST(CudaPlans, LabelSmoothingTakesThreeMatmuls) {
  Problem p = head_problem(kHeads[0]);
  p.label_smoothing = 0.1;
  EXPECT_DOUBLE_EQ(best(validated(p)).cost_matmuls, 3);
  Problem capped = p, invariant = p;
  capped.softcap = 30;
  invariant.batch_invariant = true;
  for (const Problem& other : {capped, invariant}) EXPECT_DOUBLE_EQ(best(validated(other)).cost_matmuls, 4);
}

// By default a plan spends much memory only for much time. It takes at most a quarter of the head's float32
// logits + 64 MiB while a plan within that costs at most 6%.
TEST(CudaPlans, TheDefaultKeepsToAQuarterOfTheLogits) {
  for (Head head : kHeads) {
    for (const int64_t less : {0, 1, 500, 777}) {
      for (const Pass pass : {Pass::kForwardBackward, Pass::kBackward, Pass::kForward}) {
        for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
          const Problem problem = head_problem({head.tokens - less, head.vocab, head.hidden}, pass, dtype);
          const auto within = [&](uint64_t budget) { return make_plans(problem, h200(), "", budget); };
          const Plan chosen = chosen_plan(problem, within, 0);
          const Plan fastest = chosen_plan(problem, within, kFastest);
          const std::string what = std::string(head.name) + ", " + chosen.config;
          EXPECT_LE(chosen.workspace_bytes, fastest.workspace_bytes) << what;
          EXPECT_LE(chosen.predicted_seconds, kFastEnough * fastest.predicted_seconds) << what;
          const uint64_t most = default_bytes(problem);
          if (chosen.workspace_bytes <= most) continue;
          EXPECT_LE(chosen.predicted_seconds, kNearlyFastest * fastest.predicted_seconds) << what;
          const std::vector<Plan> plans = within(most);
          for (const Plan& plan : plans) {
            EXPECT_TRUE(plan.workspace_bytes > most ||
                        plan.predicted_seconds > kFastEnough * fastest.predicted_seconds)
                << what << "; " << plan.config;
          }
        }
      }
    }
  }
  const Problem gemma = head_problem(kHeads[0]);
  const auto within = [&](uint64_t budget) { return make_plans(gemma, h200(), "", budget); };
  EXPECT_LE(chosen_plan(gemma, within, 0).workspace_bytes, 2150 * kMiB);
}

TEST(CudaPlans, TheWorkspaceIsWhatTheLayoutTakes) {
  const std::pair<const char*, std::function<void(Problem&)>> options[] = {
      {"plain", [](Problem&) {}},
      {"float32 hidden", [](Problem& p) { p.dtype.hidden = p.dtype.d_hidden = DType::kF32; }},
      {"computed in bf16",
       [](Problem& p) {
         p.dtype.hidden = p.dtype.weight = p.dtype.d_hidden = p.dtype.d_weight = DType::kF32;
         p.compute_dtype = DType::kBF16;
       }},
      {"64 targets a row", [](Problem& p) { p.targets_per_row = 64; }},
      {"top 64", [](Problem& p) { p.top_k = p.pass == Pass::kForward ? 64 : 0; }},
      {"batch invariant", [](Problem& p) { p.batch_invariant = true; }},
      {"entropy, label smoothing",
       [](Problem& p) { p.has.entropy = true, p.label_smoothing = p.needs_forward() ? 0.1 : 0; }},
      {"copied rows", [](Problem& p) { p.hidden -= 5; }},
  };
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const Head& head : kHeads) expect_exact_bytes(head_problem(head, pass, dtype), head.name);
    }
    for (const auto& [what, change] : options) {
      Problem problem = head_problem({4096, 128256, 4096}, pass);
      change(problem);
      expect_exact_bytes(validated(problem), what);
    }
  }
}

// Some budgets get a chunk of tokens. They lie between those that keep all exp logits and those that compute
// them again.
TEST(CudaPlans, EveryKindIsChosenByABudget) {
  for (const auto& [dtype, engine] : {std::pair{DType::kBF16, "sm90"}, std::pair{DType::kF32, "portable"}}) {
    const Problem problem = head_problem({2000, 555, 72, "small"}, Pass::kForwardBackward, dtype);
    std::set<PlanKind> kinds;
    size_t before = SIZE_MAX;
    try {
      for (size_t budget = 0;; budget = before - 1) {
        const Plan plan = best(problem, budget, engine);
        ASSERT_LT(plan.workspace_bytes, before);
        before = plan.workspace_bytes;
        kinds.insert(plan.kind);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kBudgetTooSmall);
    }
    EXPECT_EQ(kinds, (std::set{PlanKind::kWhole, PlanKind::kTokenChunks, PlanKind::kVocabChunks})) << engine;
  }
}

// An engine that is the fastest for losses may keep no exp logits of the backward pass's.
TEST(CudaPlans, BothPassesOfSavedExpLogitsHaveOneEngine) {
  Device device = h200();
  device.measured.engines = {"portable", "sm90", "portable"};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Problem p = head_problem({512, 5000, 256}, Pass::kBackward, dtype);
    p.has.saved = true;
    p.saved_bytes = static_cast<int64_t>(kFastest);
    const Plan backward = make_plans(validated(p), device, "", 0).front();
    EXPECT_EQ(backward.engine, "sm90");
    Problem first = head_problem({512, 5000, 256}, Pass::kForward, dtype);
    first.has.saved = true;
    first.saved_bytes = static_cast<int64_t>(backward.saved_bytes);
    for (const Plan& forward : make_plans(validated(first), device, "", 0)) {
      EXPECT_EQ(forward.engine, "sm90");
      EXPECT_EQ(forward.saved_bytes, backward.saved_bytes);
    }
  }
}

TEST(CudaPlans, EveryPlanSaysWhichKernelsAndWhy) {
  Device ampere = h200();
  ampere.capability = 80;
  const Problem bf16 = head_problem(kHeads[0]);
  const Problem f32 = head_problem(kHeads[0], Pass::kForwardBackward, DType::kF32);
  const auto engine_and_reason = [](const Problem& problem, const Device& device, const char* engine) {
    std::set<std::string> texts;
    for (const Plan& plan : make_plans(problem, device, engine, 0)) {
      texts.insert(plan.engine + ": " + plan.reason);
    }
    EXPECT_EQ(texts.size(), 1U);
    return *texts.begin();
  };
  EXPECT_EQ(engine_and_reason(bf16, h200(), ""), "sm90: compute capability 9.0, 16-bit operands");
  EXPECT_EQ(engine_and_reason(bf16, h200(), "sm90"), "sm90: requested");
  EXPECT_EQ(engine_and_reason(bf16, h200(), "portable"), "portable: requested");
  EXPECT_EQ(engine_and_reason(f32, h200(), ""),
            "portable: sm90 needs both operands in bf16, or both in fp16");
  EXPECT_EQ(engine_and_reason(bf16, ampere, ""), "portable: sm90 needs compute capability 9.0, not 8.0");
}

// A flat softmax keeps so much of a small vocabulary that sparsification would be slower. Then the plan is
// exact, unless a budget makes an exact plan slow or the caller knows better.
TEST(CudaPlans, SparsificationThatWouldBeSlowerIsExact) {
  struct Case {
    Head head;
    double threshold;
    size_t budget;
    bool sparsified;
  };
  const Case cases[] = {{{32768, 32768, 4096, "32k-32k"}, 0x1p-9, 0, false},
                        {{8192, 50257, 1600, "gpt2-xl"}, 0x1p-9, 0, false},
                        {{8192, 50257, 1600, "gpt2-xl"}, 0x1p-8, 0, true},
                        {{8192, 50257, 1600, "gpt2-xl"}, 0x1p-9, 128 * kMiB, true},
                        {{4096, 32001, 4096, "llama-2+1"}, 0x1p-9, 0, false},
                        {{9014, 20109, 1728, "9014"}, 0x1p-9, 0, false},
                        {{794, 61043, 877, "rows of 1754 bytes"}, 0x1p-9, 0, false},
                        {{5003, 100277, 2560, "odd"}, 0x1p-9, 0, true}};
  for (const Case& c : cases) {
    const Plan plan = best(sparsified_problem(c.head, c.threshold), c.budget);
    EXPECT_EQ(plan.kind == PlanKind::kSparsified, c.sparsified) << c.head.name << ", " << plan.config;
    EXPECT_EQ(plan.reason.find("; exact, because sparsified") == std::string::npos, c.sparsified)
        << plan.reason;
    Problem always = sparsified_problem(c.head, c.threshold);
    always.gradient = GradientMethod::kAlwaysSparsified;
    EXPECT_EQ(best(always, c.budget).kind, PlanKind::kSparsified);
  }
  Device ampere = h200();
  ampere.capability = 80;
  for (const auto& [head, sparsified] : {std::pair{kHeads[0], true}, std::pair{cases[1].head, false}}) {
    const Problem problem = sparsified_problem(head, 0x1p-9);
    const Plan plan = choose_plan(make_plans(problem, ampere, "portable", 0), 0);
    EXPECT_EQ(plan.kind == PlanKind::kSparsified, sparsified) << head.name;
  }
}

// A forward pass that keeps draws and the backward pass that reads them have only sizes in common.
TEST(CudaPlans, BothPassesOfKeptDrawsAgree) {
  int sparsified = 0, exact = 0;
  for (int64_t vocab = 500; vocab < 300000; vocab = vocab * 5 / 4) {
    for (const int64_t hidden : {int64_t{64}, int64_t{1600}, int64_t{4096}}) {
      std::set<bool> kinds;
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        for (const size_t budget : {size_t{0}, 900 * kMiB}) {
          Problem p = head_problem({3000, vocab, hidden}, pass);
          p.gradient = GradientMethod::kSparsified;
          p.has.saved = true;
          if (pass == Pass::kBackward) p.has.d_weight = budget == 0;
          for (const char* engine : {"", "portable"}) {
            const Plan plan = best(validated(p), budget, engine);
            EXPECT_EQ(plan.saved_bytes > 0, plan.kind == PlanKind::kSparsified);
            kinds.insert(plan.kind == PlanKind::kSparsified);
          }
        }
      }
      EXPECT_EQ(kinds.size(), 1U) << vocab << " x " << hidden;
      (*kinds.begin() ? sparsified : exact) += 1;
    }
  }
  EXPECT_GT(sparsified, 10);
  EXPECT_GT(exact, 10);
}

// A switch that is turned between the passes does not change the layout of draws.
TEST(CudaPlans, BothPassesOfKeptDrawsAgreeWhateverTf32Does) {
  for (const auto& [tokens, vocab, hidden, threshold] : {std::tuple{8192, 32768, 2048, 0x1p-10},
                                                         {32768, 32768, 1024, 0x1p-10},
                                                         {8192, 128256, 2048, 0x1p-12}}) {
    std::set<size_t> saved_bytes;
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      for (const bool allow : {false, true}) {
        Problem p = head_problem({tokens, vocab, hidden}, pass, DType::kF32);
        p.gradient = GradientMethod::kSparsified;
        p.has.saved = true;
        p.threshold = threshold;
        p.allow_tf32 = allow;
        saved_bytes.insert(best(validated(p), 0).saved_bytes);
      }
    }
    EXPECT_EQ(saved_bytes.size(), 1U) << tokens << " x " << vocab << " x " << hidden;
  }
}

// More memory is never predicted to be slower, beyond what windows in steps leave, and buys something nearly
// everywhere.
TEST(CudaPlans, TimeFallsWithEveryBudget) {
  for (const Head& head : kHeads) {
    for (const Pass pass : {Pass::kForwardBackward, Pass::kBackward}) {
      const Problem problem = head_problem(head, pass);
      double before = 1e9;
      for (double mib = 12; mib <= 20480; mib *= 1.1) {
        const auto budget = static_cast<size_t>(mib * static_cast<double>(kMiB));
        std::vector<Plan> plans = make_plans(problem, h200(), "", budget);
        const bool fits = std::any_of(plans.begin(), plans.end(),
                                      [&](const Plan& plan) { return plan.workspace_bytes <= budget; });
        if (!fits) continue;
        const Plan plan = choose_plan(plans, budget);
        const double seconds = plan.predicted_seconds * plan.rounding_penalty;
        EXPECT_LE(seconds, before * 1.005) << head.name << ", " << mib << " MiB: " << plan.config;
        before = std::min(before, seconds);
      }
    }
  }
  const Problem gemma = head_problem(kHeads[0]);
  EXPECT_LT(best(gemma, 1280 * kMiB).cost_matmuls, 3.3);
  EXPECT_LT(best(gemma, 160 * kMiB).cost_matmuls, 4);
}

// d_weight is rounded for more than three chunks only where little else fits.
// Blocks of logits follow the L2, in whole waves of tiles.
TEST(CudaPlans, PortableBlocksFollowTheL2) {
  Device device = h200();
  const auto block = [&] {
    return detail_of(choose_plan(make_plans(head_problem(kHeads[1]), device, "portable", 0), kFastest));
  };
  EXPECT_EQ(block().scratch_columns, 2048);
  device.l2_bytes = 50 << 20;
  EXPECT_EQ(block().scratch_columns, 2048);
  device.l2_bytes = 126 << 20;
  device.processors = 148;
  EXPECT_EQ(block().scratch_columns, 4736);  // 16 x 37 tiles of 256 x 128 are four waves
}

// Products of new sizes take the host milliseconds at their first use. A few plans remain, as one or another
// may be the fastest.
TEST(CudaPlans, NumbersOfTokensOfAClassHaveFewWindowsWithinABudget) {
  for (const auto& [first, last] : {std::pair{3585, 4096}, {4097, 4608}, {7169, 8192}}) {
    for (const size_t budget : {160 * kMiB, 256 * kMiB, 512 * kMiB}) {
      std::set<std::pair<int64_t, int64_t>> windows;
      for (int64_t tokens = first; tokens <= last; tokens += 73) {
        const PlanDetail d = detail_of(best(head_problem({tokens, 128256, 2048}), budget));
        windows.insert({d.cached_columns, d.vocab_window});
      }
      EXPECT_LE(windows.size(), 3U) << first << ' ' << budget;
    }
  }
}

TEST(CudaPlans, RoundingsAreFewWhereThereIsRoom) {
  for (const Head& head : kHeads) {
    for (const size_t mib : {320, 512, 1024, 2560}) {
      const Plan plan = best(head_problem(head), mib * kMiB);
      if (!detail_of(plan).rounds_between_chunks) continue;
      EXPECT_GE(3 * plan.token_chunk, head.tokens) << head.name << ", " << mib << " MiB: " << plan.config;
    }
  }
}

// Lists have room for the elements expected of any softmax, and indices for all of it.
TEST(CudaPlans, SparsifiedListsHaveRoom) {
  for (double threshold : {1.0, 0.5, 0x1p-4, 0x1p-9, 0x1p-13, 1e-30}) {
    for (int64_t vocab : {int64_t{1}, int64_t{2}, int64_t{9}, int64_t{50}, int64_t{1000}, int64_t{262144}}) {
      const SparsifiedSizes s = sparsified_sizes(sparsified_problem({64, vocab, 64}, threshold));
      const int64_t drawn = vocab - s.dense;
      EXPECT_GE(s.dense, 1);
      EXPECT_LE(s.dense + s.sampled, vocab);
      const double most = most_expected(threshold) / threshold;
      const auto room = static_cast<double>(s.capacity - 1);  // beside the target
      EXPECT_GE(room, std::min(static_cast<double>(drawn), most + 8 * std::sqrt(most)))
          << vocab << " " << threshold;
      EXPECT_LE(s.capacity, drawn + 2);
      EXPECT_GE(s.kept, 64);
    }
  }
}

// All ranks' lse estimates become one, and the dense columns of all ranks are those of the vocabulary.
TEST(CudaPlans, RanksShareWhatIsDenseAndSampled) {
  Problem problem = sparsified_problem({64, 128000, 64}, 0x1p-9);
  const SparsifiedSizes one = sparsified_sizes(problem);
  problem.vocab_total = problem.vocab;
  problem.group_size = 4;
  problem.vocab = problem.group_vocab = problem.vocab_total / 4;
  const SparsifiedSizes rank = sparsified_sizes(problem);
  EXPECT_EQ(4 * rank.dense, one.dense);
  EXPECT_EQ(4 * rank.sampled, one.sampled);
  EXPECT_LE(4 * rank.frequent, one.frequent);
  EXPECT_EQ(rank.capacity, one.capacity);  // all of a row's elements may be one rank's
  // A smaller shard has as many dense and sampled columns, as far as it has so many columns, and lists as
  // long.
  for (const int64_t vocab : {31999, 1500, 1000, 300, 100, 1, 0}) {
    problem.vocab = vocab;
    const SparsifiedSizes s = sparsified_sizes(problem);
    EXPECT_EQ(s.dense, std::min(rank.dense, vocab));
    EXPECT_EQ(s.sampled, std::min(rank.sampled, vocab - s.dense));
    EXPECT_LE(s.frequent, rank.frequent);
    EXPECT_TRUE(s.frequent == 0 || s.dense % 8 == 0)
        << "the frequent columns of dz are read in pieces of 16 bytes";
    EXPECT_EQ(s.capacity, rank.capacity);
    EXPECT_EQ(s.kept, rank.kept);
  }
}

TEST(CudaPlans, RowsThatCannotBeLoadedInBulkAreCopied) {
  for (const auto& [hidden, unaligned, copied] :
       {std::tuple{99, false, true}, std::tuple{96, false, false}, std::tuple{96, true, true}}) {
    Problem problem = head_problem({1000, 5000, hidden}, Pass::kForward);
    problem.unaligned_rows = unaligned;
    EXPECT_EQ(detail_of(best(problem)).copies_weight, copied) << hidden;
  }
}

// d_weight is staged in the copy's place, in its own dtype. It takes no bytes beside exp logits, copies and
// sums of d_hidden.
TEST(CudaPlans, RowsOfOddLengthsAreCopiedOnce) {
  for (const Head& head : {Head{794, 61043, 877, "small"}, Head{8192, 128256, 4095, "large"}}) {
    const Problem problem = head_problem(head);
    const Plan plan = best(problem, 0);
    const PlanDetail detail = detail_of(plan);
    EXPECT_EQ(plan.kind, PlanKind::kWhole);
    EXPECT_EQ(detail.vocab_window, head.vocab) << plan.config;
    EXPECT_EQ(staging_dtype(problem), DType::kBF16);
    const int64_t depth = padded_hidden(problem);
    const int64_t bytes =
        2 * (head.tokens * exp_logits_stride(problem, detail) + head.vocab * depth) + 6 * head.tokens * depth;
    EXPECT_LT(plan.workspace_bytes, static_cast<size_t>(bytes) + 36 * kMiB) << plan.config;
    Problem padded = head_problem({head.tokens, head.vocab, depth}, Pass::kForwardBackward);
    EXPECT_LT(plan.predicted_seconds, 1.2 * best(padded, 0).predicted_seconds) << plan.config;
  }
  Problem fp32 = head_problem({794, 61043, 877, "fp32 gradient"}, Pass::kForwardBackward);
  fp32.dtype.d_weight = DType::kF32;
  EXPECT_EQ(staging_dtype(fp32), DType::kF32) << "nothing is rounded on the way";
}

}  // namespace
}  // namespace logitless::cuda
