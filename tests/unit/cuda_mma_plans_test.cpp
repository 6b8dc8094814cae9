// The mma engine in plans: where it is chosen, and its refusals, stages, partials and groups of rows.
#include <gtest/gtest.h>

#include "cuda/engines/engine.h"
#include "cuda/engines/fused/tile_schedule.h"
#include "cuda/engines/mma/launch.h"
#include "cuda/plan/device_models.h"
#include "head_plans.h"

namespace logitless::cuda::mma {
namespace {

Device ampere() {
  Device device;
  device.name = "a device";
  device.capability = 80;
  device.processors = 108;
  device.memory_bytes = size_t{80} << 30;
  device.shared_bytes = 163 << 10;
  device.l2_bytes = 40 << 20;
  return device;
}

constexpr Head kHead{8192, 128256, 4096};

Device of_capability(int capability) {
  Device device = ampere();
  device.capability = capability;
  return device;
}

TEST(MmaPlans, ChosenWhereNoOtherInstructionIsFaster) {
  const logitless::Problem p = head_problem(kHead);
  for (const int capability : {80, 86, 89, 120}) {
    const Choice choice = choose_engine(p, of_capability(capability), "");
    EXPECT_STREQ(choice.engine->name(), "mma") << capability;
    EXPECT_EQ(choice.reason,
              "sm90 needs compute capability 9.0, not " + of_capability(capability).capability_text());
  }
  for (const int capability : {87, 100, 103, 110, 121}) {
    const Choice choice = choose_engine(p, of_capability(capability), "");
    EXPECT_STREQ(choice.engine->name(), "portable") << capability;
    EXPECT_NE(
        choice.reason.find("mma: chosen on compute capability 8.0, 8.6, 8.9 and 12.0, not on " +
                           of_capability(capability).capability_text() + ", opt in with backend cuda:mma"),
        std::string::npos)
        << choice.reason;
  }
}

TEST(MmaPlans, ChosenByName) {
  const logitless::Problem p = head_problem(kHead);
  const Choice by_name = choose_engine(p, of_capability(100), "mma");
  EXPECT_STREQ(by_name.engine->name(), "mma");
  EXPECT_EQ(by_name.reason, "requested");
  for (const Plan& plan : make_plans(p, of_capability(100), "mma", 0)) EXPECT_EQ(plan.engine, "mma");
}

// Engines are measured by kind of work. With batch_invariant all passes take one engine.
TEST(MmaPlans, ARecordDecides) {
  Device device = ampere();
  device.measured.engines = {"portable", "mma", ""};
  device.measured.source = "a file";
  logitless::Problem p = head_problem(kHead);
  const auto chosen = [&] { return std::string(choose_engine(p, device, "").engine->name()); };
  EXPECT_EQ(chosen(), "mma");
  p.gradient = GradientMethod::kSparsified;
  EXPECT_EQ(chosen(), "mma");  // not measured, so by default
  device.measured.engines[2] = "portable";
  EXPECT_EQ(chosen(), "portable");
  p.gradient = GradientMethod::kExact;
  p.pass = Pass::kForward;
  p.has.d_hidden = p.has.d_weight = false;
  EXPECT_EQ(chosen(), "portable");
  EXPECT_EQ(choose_engine(p, device, "").reason, "the fastest of those measured, device record a file");
  EXPECT_STREQ(choose_engine(p, device, "mma").engine->name(), "mma");
  p.batch_invariant = true;
  EXPECT_EQ(chosen(), "mma");
  device.measured.engines.fill("sm90");  // which is for other devices
  EXPECT_EQ(chosen(), "mma");
}

TEST(MmaPlans, ADeviceWithWrongResultsUsesOtherKernels) {
  Device device = ampere();
  device.untrusted_engine = "mma";
  device.why_untrusted = "mma failed its self-check on this device: lse differs by 1";
  device.measured.engines.fill("mma");
  logitless::Problem p = head_problem(kHead);
  EXPECT_STREQ(choose_engine(p, device, "").engine->name(), "portable");
  EXPECT_STREQ(choose_engine(p, device, "mma").engine->name(), "portable");
}

// Ranks of a group plan alike, whatever one of them has measured or found wrong.
TEST(MmaPlans, RanksOfAGroupIgnoreWhatIsKnownOfOneDevice) {
  Device device = ampere();
  device.measured.engines.fill("portable");
  device.measured.matmul_flops = 1e13;
  logitless::Problem p = head_problem(kHead);
  p.group_size = 2;
  p.group_vocab = p.vocab;
  p.vocab_total = 2 * p.vocab;
  const Plan with_record = choose_plan(make_plans(p, device, "", 0), 0);
  const Plan without = choose_plan(make_plans(p, ampere(), "", 0), 0);
  EXPECT_EQ(with_record.engine, "mma");
  EXPECT_EQ(with_record.predicted_seconds, without.predicted_seconds);
  device.untrusted_engine = "mma";
  device.why_untrusted = "it failed";
  EXPECT_THROW(make_plans(p, device, "", 0), logitless::Error);
  EXPECT_EQ(make_plans(p, device, "portable", 0).front().engine, "portable");
}

// A backward pass on a shard may be planned outside the group, and reads the forward pass's draws.
TEST(MmaPlans, PassesOnAShardIgnoreIt) {
  Device device = ampere();
  device.measured.engines.fill("portable");
  logitless::Problem p = head_problem(kHead, Pass::kBackward);
  EXPECT_EQ(choose_plan(make_plans(p, device, "", 0), 0).engine, "portable");
  p.vocab_total = 2 * p.vocab;
  EXPECT_EQ(choose_plan(make_plans(p, device, "", 0), 0).engine, "mma");
}

TEST(MmaPlans, MeasuredRatesGiveThePredictions) {
  const logitless::Problem p = head_problem(kHead);
  Device device = ampere();
  const auto predicted = [&](const char* engine) {
    return choose_plan(make_plans(p, device, engine, 0), kFastest).predicted_seconds;
  };
  device.measured.matmul_flops = 2e14;
  device.measured.mma_share = 1;
  const double mma = predicted("mma"), portable = predicted("portable");
  device.measured.mma_share = 0.5;  // halves the rate of one of three matmuls
  EXPECT_NEAR(predicted("mma") / mma, 4 / 3.0, 0.03);
  EXPECT_EQ(predicted("portable"), portable);
  device.measured.matmul_flops = 1e14;
  EXPECT_GT(predicted("portable"), 1.8 * portable);
  device.measured.bytes_per_second = 1e11;
  EXPECT_GT(predicted("portable"), 2 * portable);
}

TEST(MmaPlans, RefusesOtherProblems) {
  const Engine& mma = *engine_named("mma");
  EXPECT_EQ(mma.why_not(ampere(), DType::kF32), "mma needs both operands in bf16, or both in fp16");
  Device small = ampere();
  small.shared_bytes = 64 << 10;
  EXPECT_EQ(mma.why_not(small, DType::kBF16), "mma needs 91920 bytes of shared memory a block, not 65536");
}

LogitsArgs launch_of(int64_t rows, int64_t columns, int64_t depth) {
  LogitsArgs args;
  args.rows = rows;
  args.columns = columns;
  args.depth = depth;
  args.of_epilogue = StatsArgs{};
  return args;
}

TEST(MmaPlans, StagesFollowSharedMemory) {
  Device device = ampere();
  for (const auto& [kilobytes, stages] : {std::pair{99, 3}, {100, 3}, {163, 5}, {227, 5}}) {
    device.shared_bytes = int64_t{kilobytes} << 10;
    EXPECT_EQ(plan_logits(launch_of(8192, 128256, 4096), device, false).stages, stages) << kilobytes;
    EXPECT_LE(shared_bytes(stages), device.shared_bytes);
  }
}

// Groups of rows stay in L2, or are as long as a wave of tiles is wide; partials are few.
TEST(MmaPlans, GroupsFollowL2) {
  Device device = ampere();
  const LogitsPlan large = plan_logits(launch_of(1 << 16, 128256, 4096), device, false);
  EXPECT_EQ(large.tiling.preferred_units, 9);  // sqrt(108 192 / 256), more than 16 MiB of 2 MiB each
  device.processors = 72;
  device.l2_bytes = 6 << 20;
  EXPECT_EQ(plan_logits(launch_of(1 << 16, 128256, 4096), device, false).tiling.preferred_units, 7);
  device.l2_bytes = 72 << 20;
  EXPECT_EQ(plan_logits(launch_of(1 << 16, 128256, 4096), device, false).tiling.preferred_units, 14);
  EXPECT_LE(large.partials, 33);
}

// Every device whose facts are known has plans by this engine and by the other, and all their times follow
// the vendor's rates.
TEST(MmaPlans, EveryModelOfDeviceHasPlans) {
  const logitless::Problem p = head_problem(kHead);
  const double flop = 3 * 2.0 * 8192 * 128256 * 4096;
  for (const char* name : {"a100", "a10", "l40s", "rtx-4090", "rtx-5090", "h100", "h200", "b200"}) {
    const Device* device = device_model(name);
    ASSERT_NE(device, nullptr) << name;
    EXPECT_NE(known_models().find(name), std::string::npos);
    EXPECT_EQ(stages_of(device->shared_bytes), device->shared_bytes < 160'000 ? kFewStages : kMostStages);
    for (const char* engine : {"mma", "portable"}) {
      const Plan plan = choose_plan(make_plans(p, *device, engine, 0), 0);
      EXPECT_EQ(plan.engine, engine) << name;
      EXPECT_GT(plan.predicted_seconds, flop / device->flops) << name << ' ' << engine;
      EXPECT_LT(plan.predicted_seconds, 3 * flop / device->flops) << name << ' ' << engine;
    }
  }
}

TEST(MmaPlans, ADeviceThatIsAModelHasItsRates) {
  const auto rates = [](const char* name, int capability, int processors, double gigabytes) {
    Device device;
    device.name = name;
    device.capability = capability;
    device.processors = processors;
    device.memory_bytes = static_cast<uint64_t>(gigabytes * 1e9);
    add_rates(device);
    return std::pair{device.flops, device.bytes_per_second};
  };
  const std::pair unknown{0.0, 0.0};
  EXPECT_EQ(rates("NVIDIA A100-SXM4-80GB", 80, 108, 85.1), (std::pair{312e12, 2039e9}));
  EXPECT_EQ(rates("NVIDIA A100-SXM4-40GB", 80, 108, 42.4), unknown);
  EXPECT_EQ(rates("NVIDIA A10", 86, 72, 23.7), (std::pair{125e12, 600e9}));
  EXPECT_EQ(rates("NVIDIA A10G", 86, 80, 23.7), unknown);
  EXPECT_EQ(rates("NVIDIA GeForce RTX 4090", 89, 128, 25.3), (std::pair{165.2e12, 1008e9}));
  EXPECT_EQ(rates("NVIDIA GeForce RTX 4090 Laptop GPU", 89, 76, 17), unknown);
  EXPECT_EQ(rates("NVIDIA H200", 90, 132, 150.1), (std::pair{989.5e12, 4800e9}));
}

TEST(MmaPlans, EachTileHasItsPartialWhereRowsDoNotDependOnTheBatch) {
  LogitsArgs args = launch_of(300, 1000, 64);
  args.batch_invariant = true;
  EXPECT_EQ(plan_logits(args, ampere(), true).partials, 6);
  args.column_offset = 192;
  EXPECT_EQ(plan_logits(args, ampere(), true).partials, 7);
}

}  // namespace
}  // namespace logitless::cuda::mma
