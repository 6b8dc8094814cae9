// Random problems over all options agree with the materialized computation, on every engine.
#include <gtest/gtest.h>

#include "engine_test.h"

namespace logitless_test {
namespace {

// Computes the truth about a problem once for all engines on host memory.
class Agreement : public testing::TestWithParam<uint64_t> {};
class AgreementOnDevice : public EngineTest {};

// Longer than one block of the kernels in each direction, mostly one direction at a time.
constexpr CaseLimits kLong{.largest_dimension = 1500, .most_products = 1'500'000};

// Every third case has several targets a row, with weights of both signs, of one sign, or ones. Every second
// one with two passes saves exp logits.
Case case_of(uint64_t seed, const CaseLimits& limits) {
  Case c = random_case(seed, limits);
  if (c.mode == Mode::kForwardThenBackward && seed % 2 == 0) c = saving(c);
  if (seed % 3 != 1) return c;
  Random random(seed);
  const double low = random.pick<double>({-1, 0, 0});
  give_targets(random, &c, random.pick<int64_t>({1, 1, 2, 3, 8, 63, 64}), low, 1.5);
  if (random.chance(0.3)) c.target_weight.clear();
  return c;
}

void expect_agreement(const Case& c, const std::vector<Engine>& all) {
  const Expected expected(c);
  for (const Engine& engine : all) {
    if (!engine.can_run(c.problem)) continue;
    SCOPED_TRACE(engine.name());
    const Outputs got = solve(make_context(engine), c);
    expected.check(engine, got);
  }
}

TEST_P(Agreement, WithTheMaterialisedComputation) {
  for (uint64_t i = 0; i < seeds(20); ++i) {
    expect_agreement(case_of(GetParam() * 20 + i, {}), host_engines());
  }
}

TEST_P(Agreement, OverSeveralBlocks) {
  expect_agreement(case_of(1'000'000 + GetParam(), kLong), host_engines());
}

// The first 300 cases that the engine can run. Some have both operands in one 16-bit format, for sm90.
TEST_P(AgreementOnDevice, WithTheMaterialisedComputation) {
  int tested = 0;
  for (uint64_t seed = 0; tested < 300; ++seed) {
    const Case c = case_of(seed, {.allow_fp64 = false});
    if (!engine().can_run(c.problem)) continue;
    ++tested;
    expect_truth(c);
  }
}

TEST_P(AgreementOnDevice, OverSeveralBlocks) {
  for (uint64_t seed = 1'000'000; seed < 1'000'060; ++seed) {
    expect_agreement(case_of(seed, kLong), {GetParam()});
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Agreement, testing::Range<uint64_t>(0, 20));
LOGITLESS_TEST_ON(AgreementOnDevice, device_engines());

}  // namespace
}  // namespace logitless_test
