// The bounds of `logitless check`: they allow roundings, even where these cancel, and find real errors.

#include <gtest/gtest.h>

#include <cmath>

#include "commands/check.h"
#include "commands/run.h"

namespace logitless::cli {
namespace {

// A case with its truth.
struct Known {
  explicit Known(const CheckCase& problem) : c(problem), data(c), truth(compute()) {}

  CheckOutputs compute() const {
    ContextOptions options;
    options.backend = "reference";
    const Context context(options);
    Runner runner(context, LOGITLESS_HOST_MEMORY);
    return run_case(runner, c, data, true, 0);
  }

  bool passes(const std::string& name, const CheckOutputs& got, bool rounds_dz = false) const {
    for (const CheckedOutput& output : compare(c, data, truth, got, rounds_dz)) {
      if (output.name == name) return output.passed();
    }
    ADD_FAILURE() << "no " << name;
    return false;
  }

  // The target's part of its logit's gradient in row i: -1 / N without weights, with a mean.
  double target_part() const {
    return -(1 - c.problem.label_smoothing) / static_cast<double>(c.problem.tokens);
  }
  double weight(size_t j, size_t k) const { return data.weight[j * depth() + k]; }
  size_t depth() const { return static_cast<size_t>(c.problem.hidden); }

  CheckCase c;
  CheckData data;
  CheckOutputs truth;
};

// The grid draws numbers of options. They are fixed here, because an error that a bound must find depends on
// them.
void set_numbers(CheckCase& c) {
  Problem& p = c.problem;
  const Problem plain;
  p.scale = plain.scale, p.softcap = plain.softcap, p.temperature = plain.temperature;
  p.label_smoothing = plain.label_smoothing, p.z_loss = plain.z_loss, p.num_items = plain.num_items;
  if (c.options == "softcap") p.softcap = 5, p.scale = 1.5;
  if (c.options == "temperature") p.temperature = 0.3, p.softcap = 10, p.has.bias = true;
  if (c.options == "label_smoothing") p.label_smoothing = 0.1;
  if (c.options == "class-weight") p.label_smoothing = 0.2;
  if (c.options == "all") p.scale = 1.25, p.softcap = 8, p.label_smoothing = 0.1, p.z_loss = 1e-3;
}

// Returns cases of the grid with these options, without its largest shape, which takes seconds.
std::vector<CheckCase> cases(const std::string& options, bool one_element) {
  std::vector<CheckCase> chosen;
  for (CheckCase c : check_grid(false)) {
    if (c.options != options || (c.problem.vocab == 1) != one_element || c.problem.tokens > 65) continue;
    set_numbers(c);
    chosen.push_back(c);
  }
  EXPECT_FALSE(chosen.empty());
  return chosen;
}

TEST(CheckBounds, FindOneRowWithoutItsTarget) {
  for (const char* options : {"plain", "label_smoothing", "large-logits"}) {
    for (const CheckCase& c : cases(options, false)) {
      SCOPED_TRACE(c.name());
      const Known known(c);
      const size_t row = static_cast<size_t>(c.problem.tokens) / 2;
      const auto y = static_cast<size_t>(known.data.targets[row]);
      CheckOutputs got = known.truth;
      for (size_t k = 0; k < known.depth(); ++k) {
        got.d_hidden[row * known.depth() + k] -= known.target_part() * known.weight(y, k);
        got.d_weight[y * known.depth() + k] -=
            known.target_part() * known.data.hidden[row * known.depth() + k];
      }
      for (const bool rounds_dz : {false, true}) {
        for (const char* name : {"d_hidden", "d_weight"}) {
          EXPECT_TRUE(known.passes(name, known.truth, rounds_dz));
          EXPECT_FALSE(known.passes(name, got, rounds_dz));
        }
      }
    }
  }
}

TEST(CheckBounds, FindOneWrongElementOfTheLogitsGradient) {
  for (const CheckCase& c : cases("label_smoothing", false)) {
    if (c.problem.dtype.hidden != LOGITLESS_F32) continue;
    SCOPED_TRACE(c.name());
    const Known known(c);
    // 2^-9 of a target's part is a single rounding to 16 bits.
    CheckOutputs got = known.truth;
    for (size_t k = 0; k < known.depth(); ++k) {
      got.d_hidden[k] +=
          known.target_part() * 0x1p-9 * known.weight(static_cast<size_t>(known.data.targets[0]), k);
    }
    EXPECT_FALSE(known.passes("d_hidden", got));
  }
}

// The errors are logits that were rounded to 16 bits, and a row's statistics without one column.
TEST(CheckBounds, FindRowsThatAreSlightlyOff) {
  for (const char* options : {"plain", "softcap", "temperature", "all"}) {
    for (const CheckCase& c : cases(options, false)) {
      SCOPED_TRACE(c.name());
      const Known known(c);
      CheckOutputs got = known.truth;
      for (auto* values : {&got.lse, &got.nll, &got.entropy, &got.row_loss}) {
        for (double& value : *values) value *= 1 + 0x1p-9;
      }
      got.loss[0] *= 1 + 0x1p-9;
      for (const char* name : {"lse", "nll", "entropy", "row_loss", "loss"})
        EXPECT_FALSE(known.passes(name, got)) << name;
      got.argmax[0] = (known.truth.argmax[0] + 1) % c.problem.vocab;
      EXPECT_FALSE(known.passes("argmax", got));
      got.argmax[0] = c.problem.vocab;
      EXPECT_FALSE(known.passes("argmax", got));
      got.lse[0] = NAN;
      EXPECT_FALSE(known.passes("lse", got));
    }
  }
}

// With one column dz = a - c - g is 0. Each term is rounded on its own, but their difference is not.
TEST(CheckBounds, AllowTheRoundingOfTermsThatCancel) {
  for (const char* options : {"plain", "label_smoothing", "class-weight"}) {
    for (const CheckCase& c : cases(options, true)) {
      SCOPED_TRACE(c.name());
      const Known known(c);
      const double smoothing = c.problem.label_smoothing;
      const double dz = 1 - static_cast<double>(static_cast<float>(smoothing)) -
                        static_cast<double>(static_cast<float>(1 - smoothing));
      CheckOutputs got = known.truth;
      got.d_hidden[0] = dz * known.data.weight[0];
      got.d_weight[0] = dz * known.data.hidden[0];
      EXPECT_TRUE(known.passes("d_hidden", got));
      EXPECT_TRUE(known.passes("d_weight", got));
    }
  }
}

// z = cap - 2 cap / (1 + exp(2 x / cap)) in float32 has an error relative to cap, not to z.
TEST(CheckBounds, AllowTheRoundingOfACapThatCancels) {
  for (const CheckCase& c : cases("softcap", true)) {
    SCOPED_TRACE(c.name());
    const Known known(c);
    const auto cap = static_cast<float>(c.problem.softcap);
    const auto dot = static_cast<float>(c.problem.scale * known.data.hidden[0] * known.data.weight[0]);
    CheckOutputs got = known.truth;
    got.lse[0] = static_cast<double>(cap - 2 * cap / (1 + std::exp(2 * dot / cap)));
    EXPECT_TRUE(known.passes("lse", got));
    got.lse[0] = known.truth.lse[0] + 1e-5 * c.problem.softcap;
    EXPECT_FALSE(known.passes("lse", got));
  }
}

}  // namespace
}  // namespace logitless::cli
