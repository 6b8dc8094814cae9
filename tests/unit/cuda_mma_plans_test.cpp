// The mma engine in plans: it is never chosen by default. Tests its refusals, stages, partials and groups of
// rows.
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

TEST(MmaPlans, ChosenOnlyByName) {
  const logitless::Problem p = head_problem(kHead);
  const Choice by_default = choose_engine(p, ampere(), "");
  EXPECT_STREQ(by_default.engine->name(), "portable");
  EXPECT_NE(by_default.reason.find("mma: experimental, opt in with backend cuda:mma"), std::string::npos)
      << by_default.reason;
  const Choice by_name = choose_engine(p, ampere(), "mma");
  EXPECT_STREQ(by_name.engine->name(), "mma");
  EXPECT_EQ(by_name.reason, "requested");
  for (const Plan& plan : make_plans(p, ampere(), "mma", 0)) EXPECT_EQ(plan.engine, "mma");
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
