// Random problems over all options agree with the materialised computation, on every engine.
#include <gtest/gtest.h>

#include "compare.h"

namespace logitless_test {
namespace {

// The truth about a problem is worked out once for all engines on host memory.
class Agreement : public testing::TestWithParam<uint64_t> {};
class AgreementOnDevice : public testing::TestWithParam<Engine> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AgreementOnDevice);

// Longer than one block of the kernels in each direction, mostly one direction at a time.
constexpr CaseLimits kLong{.largest_dimension = 1500, .most_products = 1'500'000};

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
    expect_agreement(random_case(GetParam() * 20 + i), host_engines());
  }
}

TEST_P(Agreement, OverSeveralBlocks) {
  expect_agreement(random_case(1'000'000 + GetParam(), kLong), host_engines());
}

// The first 300 that the engine can run; some of them have both operands in one 16-bit format for sm90.
TEST_P(AgreementOnDevice, WithTheMaterialisedComputation) {
  int tested = 0;
  for (uint64_t seed = 0; tested < 300; ++seed) {
    const Case c = random_case(seed, {.allow_fp64 = false});
    if (!GetParam().can_run(c.problem)) continue;
    ++tested;
    expect_agreement(c, {GetParam()});
  }
}

TEST_P(AgreementOnDevice, OverSeveralBlocks) {
  for (uint64_t seed = 1'000'000; seed < 1'000'060; ++seed) {
    expect_agreement(random_case(seed, kLong), {GetParam()});
  }
}

// More rows and columns than one tile of the kernels, in whole tiles and not.
TEST_P(AgreementOnDevice, OverSeveralTiles) {
  const PlainSize sizes[] = {{256, 384, 64}, {300, 500, 72}, {129, 1031, 40}, {700, 97, 136}};
  for (const PlainSize& size : sizes) {
    for (logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
      Case c = plain_case(static_cast<uint64_t>(size.vocab), size, dtype);
      if (!GetParam().can_run(c.problem)) continue;
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        c.mode = mode;
        expect_agreement(c, {GetParam()});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Agreement, testing::Range<uint64_t>(0, 20));
INSTANTIATE_TEST_SUITE_P(Engines, AgreementOnDevice, testing::ValuesIn(device_engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
