// Thinned gradients in groups of ranks on the host: the same seed keeps the same elements for any cut of the
// vocabulary, which are those of the float64 reference on one device.
#include "groups_fixture.h"

namespace logitless_test {
namespace {

class ThinnedGroups : public ThinnedGroupsTest {
 protected:
  // Of the same elements: each run is off by its own rounding, and each rank's part of d_hidden is rounded.
  void expect_same_elements(const Case& c, const Sizes& sizes, const Outputs& reference) const {
    expect_same_elements(c, sizes, reference, Expected(c).bounds_of(engine()));
  }
  void expect_same_elements(const Case& c, const Sizes& sizes, const Outputs& reference,
                            const Bounds& of_one) const {
    SCOPED_TRACE(testing::Message() << describe(c) << "\ncut into " << testing::PrintToString(sizes));
    Bounds bounds = static_cast<double>(sizes.size() + 2) * of_one;
    bounds.lse += static_cast<double>(sizes.size()) * 0x1p-24;
    expect_same_results(c, reference, solve_in_group(c, sizes), bounds);
  }

  logitless::Context reference_ = make_context({"reference", ""}, 2);
};

TEST_P(ThinnedGroups, TheSameElementsForAnyCutSlow) {
  Case c = thinned(plain(41, {60, 3000, 24}), 1.0 / 64);
  for (size_t i = 0; i < c.hidden.size() / 2; ++i) c.hidden[i] *= 2;  // some rows more peaked than others
  c.targets[5] = c.problem.ignore_index;
  for (const double smoothing : {0.0, 0.25}) {
    c.problem.label_smoothing = smoothing;
    const Bounds bounds = Expected(c).bounds_of(engine());
    for (const int64_t seed : {7, 8}) {
      c.problem.seed = seed;
      c.mode = Mode::kForwardBackward;
      c.problem.has.draws = 0;
      const Outputs reference = logitless_test::solve(reference_, c);
      for (const Sizes& sizes :
           {Sizes{3000}, Sizes{1500, 1500}, Sizes{17, 0, 2983}, Sizes{449, 1000, 1, 1550}}) {
        for (const bool keeps : {false, true}) {
          for (const Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
            c.mode = mode;
            c.problem.has.draws = keeps && mode == Mode::kForwardThenBackward;
            expect_same_elements(c, sizes, reference, bounds);
          }
        }
      }
      c.problem.seed = seed + 100;  // other elements are further away than that
      EXPECT_FALSE(close("d_hidden", logitless_test::solve(reference_, c).d_hidden, reference.d_hidden,
                         4 * bounds.d_hidden, LOGITLESS_F32));
    }
  }
}

TEST_P(ThinnedGroups, RandomProblems) {
  uint64_t done = 0;
  for (uint64_t seed = 0; done < seeds(60); ++seed) {
    Case c = thinned(random_case(seed, {.largest_dimension = 400, .allow_fp64 = engine().has_float64()}),
                     1.0 / 32);
    if (c.mode == Mode::kForward || !engine().can_thin(c.problem)) continue;
    ++done;
    Random random(seed);
    const int64_t first = random.integer(0, c.problem.vocab),
                  second = random.integer(0, c.problem.vocab - first);
    expect_same_elements(c, {first, second, c.problem.vocab - first - second},
                         logitless_test::solve(reference_, c));
  }
}

TEST_P(ThinnedGroups, TheMeanOverSeedsIsTheGradientSlow) {
  expect_unbiased(thinned(plain(3, {6, 90, 5}), 0.25), {40, 50}, is_slowed_down() ? 150 : 1000, 1e-6);
}

// Lists that fill up early are thinned by what a rank knows of lse, which is less than all do.
TEST_P(ThinnedGroups, FlatRowsOfManyColumns) {
  Case c = thinned(plain(5, {20, 9000, 8}), 1.0 / 16);
  for (double& value : c.hidden) value /= 64;
  const Outputs reference = logitless_test::solve(reference_, c);
  expect_same_elements(c, {4500, 4500}, reference);
  expect_same_elements(c, {100, 8900}, reference);
}

LOGITLESS_TEST_ON(ThinnedGroups, host_engines());

}  // namespace
}  // namespace logitless_test
