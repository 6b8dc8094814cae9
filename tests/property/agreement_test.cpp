// Random problems over all options agree with the materialised computation, on every engine.
#include <gtest/gtest.h>

#include "compare.h"

namespace headroom_test {
namespace {

class Agreement : public testing::TestWithParam<uint64_t> {};

void expect_agreement(const Case& c) {
  const Expected expected(c);
  for (const Engine& engine : engines()) {
    if (!engine.can_run(c.problem)) continue;
    SCOPED_TRACE(engine.name());
    const Outputs got = solve(make_context(engine), c);
    expected.check(engine, got);
  }
}

TEST_P(Agreement, WithTheMaterialisedComputation) {
  for (uint64_t i = 0; i < seeds(20); ++i) expect_agreement(random_case(GetParam() * 20 + i));
}

// Longer than one block of the kernels in each direction, mostly one direction at a time.
TEST_P(Agreement, OverSeveralBlocks) {
  expect_agreement(
      random_case(1'000'000 + GetParam(), {.largest_dimension = 1500, .most_products = 1'500'000}));
}

INSTANTIATE_TEST_SUITE_P(Seeds, Agreement, testing::Range<uint64_t>(0, 20));

}  // namespace
}  // namespace headroom_test
