// The bounds of `logitless check`: they allow roundings, also where these cancel, and find real errors.

#include <gtest/gtest.h>

#include <cmath>

#include "commands/check_cases.h"
#include "commands/check_compare.h"
#include "commands/check_library.h"
#include "commands/check_naive.h"
#include "commands/device_run.h"

namespace logitless::cli {
namespace {

// A case with its truth and the naive computation.
struct Known {
  explicit Known(const CheckCase& problem, bool rounds_dz = false)
      : c(problem), data(make_data(c)), reference(truth()), naive(naive_float32(c, data, rounds_dz)) {}

  CheckOutputs truth() const {
    ContextOptions options;
    options.backend = "reference";
    const Context context(options);
    Runner runner(context, LOGITLESS_HOST_MEMORY);
    return CheckRunner(c, data, true).run(runner, 0);
  }

  CheckedOutput checked(const std::string& name, const CheckOutputs& got) const {
    for (const CheckedOutput& output : compare(c, data, reference, naive, got)) {
      if (output.name == name) return output;
    }
    ADD_FAILURE() << "no " << name;
    return {};
  }
  bool passes(const std::string& name, const CheckOutputs& got) const { return checked(name, got).passed(); }

  // What the target of row i adds to its logit's gradient: -1 / N without weights, with a mean.
  double target_part() const { return -(1 - c.label_smoothing) / static_cast<double>(c.tokens); }
  double classifier(size_t j, size_t k) const { return data.classifier[j * depth() + k]; }
  size_t depth() const { return static_cast<size_t>(c.dim); }

  CheckCase c;
  CheckData data;
  CheckOutputs reference, naive;
};

// Cases of the grid with these options, without its largest shape, which takes seconds.
std::vector<CheckCase> cases(const std::string& options, bool one_element) {
  std::vector<CheckCase> found;
  for (const CheckCase& c : check_grid(false)) {
    if (c.options == options && (c.vocab == 1) == one_element && c.tokens <= 65) found.push_back(c);
  }
  EXPECT_FALSE(found.empty());
  return found;
}

TEST(CheckBounds, FindOneRowWithoutItsTarget) {
  for (const char* options : {"plain", "smoothing", "large-logits"}) {
    for (const CheckCase& c : cases(options, false)) {
      for (const bool rounds_dz : {false, true}) {
        SCOPED_TRACE(c.name());
        const Known known(c, rounds_dz);
        EXPECT_TRUE(known.passes("d_hidden", known.naive));
        EXPECT_TRUE(known.passes("d_classifier", known.naive));
        const size_t row = static_cast<size_t>(c.tokens) / 2;
        const auto y = static_cast<size_t>(known.data.targets[row]);
        CheckOutputs got = known.naive;
        for (size_t k = 0; k < known.depth(); ++k) {
          got.d_hidden[row * known.depth() + k] -= known.target_part() * known.classifier(y, k);
          got.d_classifier[y * known.depth() + k] -=
              known.target_part() * known.data.hidden[row * known.depth() + k];
        }
        EXPECT_FALSE(known.passes("d_hidden", got));
        EXPECT_FALSE(known.passes("d_classifier", got));
      }
    }
  }
}

TEST(CheckBounds, FindOneWrongElementOfTheLogitsGradient) {
  for (const CheckCase& c : cases("smoothing", false)) {
    if (c.hidden_dtype != LOGITLESS_F32) continue;
    SCOPED_TRACE(c.name());
    const Known known(c);
    // 2^-9 of a target's part: a single rounding to 16 bits.
    CheckOutputs got = known.naive;
    for (size_t k = 0; k < known.depth(); ++k) {
      got.d_hidden[k] +=
          known.target_part() * 0x1p-9 * known.classifier(static_cast<size_t>(known.data.targets[0]), k);
    }
    EXPECT_FALSE(known.passes("d_hidden", got));
  }
}

// With one column dz = a - c - g is 0, and the naive computation finds just that.
TEST(CheckBounds, AllowTheRoundingOfTermsThatCancel) {
  for (const char* options : {"plain", "smoothing", "class-weight"}) {
    for (const CheckCase& c : cases(options, true)) {
      SCOPED_TRACE(c.name());
      const Known known(c);
      const double smoothing = c.label_smoothing;
      // Each term rounded on its own, their difference not.
      const double dz = 1 - static_cast<double>(static_cast<float>(smoothing)) -
                        static_cast<double>(static_cast<float>(1 - smoothing));
      CheckOutputs got = known.naive;
      got.d_hidden[0] = dz * known.data.classifier[0];
      got.d_classifier[0] = dz * known.data.hidden[0];
      EXPECT_EQ(dz == 0, smoothing == 0);
      EXPECT_TRUE(known.passes("d_hidden", got));
      EXPECT_TRUE(known.passes("d_classifier", got));
      // Two units of each term are too much, and so is any real error.
      got.d_hidden[0] = 2 * 2 * 0x1p-24 * known.data.classifier[0];
      EXPECT_FALSE(known.passes("d_hidden", got));
    }
  }
}

// z = cap - 2 cap / (1 + exp(2 x / cap)) in float32 has an error relative to cap, not to z.
TEST(CheckBounds, AllowTheRoundingOfACapThatCancels) {
  for (const CheckCase& c : cases("softcap", true)) {
    SCOPED_TRACE(c.name());
    const Known known(c);
    const auto cap = static_cast<float>(c.softcap);
    const auto dot = static_cast<float>(c.scale * known.data.hidden[0] * known.data.classifier[0]);
    CheckOutputs got = known.naive;
    got.lse[0] = static_cast<double>(cap - 2 * cap / (1 + std::exp(2 * dot / cap)));
    EXPECT_TRUE(known.passes("lse", got));
    got.lse[0] = known.reference.lse[0] + 1e-6 * c.softcap;
    EXPECT_FALSE(known.passes("lse", got));
  }
}

}  // namespace
}  // namespace logitless::cli
