#include "commands/check_compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace logitless::cli {
namespace {

double rounding_unit(logitless_dtype dtype) {
  switch (dtype) {
    case LOGITLESS_BF16:
      return 0x1p-8;
    case LOGITLESS_F16:
      return 0x1p-11;
    case LOGITLESS_F64:
      return 0x1p-53;
    default:
      return 0x1p-24;
  }
}
// Below this a number of the dtype has an absolute rounding error: half of its smallest subnormal.
double smallest_half(logitless_dtype dtype) {
  switch (dtype) {
    case LOGITLESS_BF16:
      return 0x1p-134;
    case LOGITLESS_F16:
      return 0x1p-25;
    default:
      return 0x1p-150;
  }
}

double norm(const std::vector<double>& a) {
  double sum = 0;
  for (const double x : a) sum += x * x;
  return std::sqrt(sum);
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

// z_ij in float64, before softcap and temperature, which keep the order.
double logit(const CheckCase& c, const CheckData& data, int64_t i, int64_t j) {
  double dot = 0;
  for (int64_t k = 0; k < c.dim; ++k) {
    dot +=
        data.hidden[static_cast<size_t>(i * c.dim + k)] * data.classifier[static_cast<size_t>(j * c.dim + k)];
  }
  return c.scale * dot + (c.bias ? data.bias[static_cast<size_t>(j)] : 0);
}

// Rows whose argmax is neither the reference's nor one that float32 sums cannot tell from it.
double wrong_argmax(const CheckCase& c, const CheckData& data, const CheckOutputs& reference,
                    const CheckOutputs& got) {
  double wrong = 0;
  for (int64_t i = 0; i < c.tokens; ++i) {
    const int64_t best = reference.argmax[static_cast<size_t>(i)];
    const int64_t chosen = got.argmax[static_cast<size_t>(i)];
    if (best == chosen) continue;
    if (best < 0 || chosen < 0 || chosen >= c.vocab) {
      ++wrong;
      continue;
    }
    const double high = logit(c, data, i, best);
    const double low = logit(c, data, i, chosen);
    // Where the cap saturates, different logits become equal.
    const bool saturated = c.softcap > 0 && std::fabs(high) > 4 * c.softcap;
    double terms = std::fabs(high) + std::fabs(low);
    for (int64_t k = 0; k < c.dim; ++k) {
      const double e = data.hidden[static_cast<size_t>(i * c.dim + k)];
      terms += std::fabs(c.scale * e * data.classifier[static_cast<size_t>(best * c.dim + k)]) +
               std::fabs(c.scale * e * data.classifier[static_cast<size_t>(chosen * c.dim + k)]);
    }
    const double rounding = static_cast<double>(c.dim + 2) * rounding_unit(LOGITLESS_F32) * terms;
    if (!(high - low <= rounding) && !saturated) ++wrong;
  }
  return wrong;
}

// Row statistics and losses are differences of numbers as large as the row's lse and logits. A capped logit,
// cap tanh(x) = cap - 2 cap / (1 + exp(2 x)), is itself the difference of cap and of up to 2 cap.
double row_size(const CheckCase& c, const CheckData& data, const CheckOutputs& reference, size_t i) {
  if (reference.argmax[i] < 0) return 0;  // ignored
  return std::max(std::fabs(reference.lse[i]) + std::fabs(reference.nll[i]) + std::fabs(reference.entropy[i]),
                  3 * c.softcap / temperature_of(c, data, static_cast<int64_t>(i)));
}

}  // namespace

std::vector<CheckedOutput> compare(const CheckCase& c, const CheckData& data, const CheckOutputs& reference,
                                   const CheckOutputs& naive, const CheckOutputs& got) {
  std::vector<CheckedOutput> out;
  const double unit = rounding_unit(LOGITLESS_F32);
  double magnitude = 0;
  for (size_t i = 0; i < reference.lse.size(); ++i) {
    const double size = row_size(c, data, reference, i);
    magnitude += size * size;
  }
  magnitude = std::sqrt(magnitude);
  const auto add_rows = [&](const char* name, const std::vector<double>& ref,
                            const std::vector<double>& plain, const std::vector<double>& x, double scale) {
    out.push_back({name, distance(x, ref), 2 * distance(plain, ref) + unit * scale});
  };
  add_rows("lse", reference.lse, naive.lse, got.lse, magnitude);
  add_rows("nll", reference.nll, naive.nll, got.nll, magnitude);
  add_rows("entropy", reference.entropy, naive.entropy, got.entropy, magnitude);
  add_rows("row_loss", reference.row_loss, naive.row_loss, got.row_loss,
           std::max(magnitude, norm(reference.row_loss)));

  // Rows' errors may cancel in the naive sum by luck; that luck is not asked of anyone.
  double row_errors = 0;
  double row_sizes = 0;
  for (size_t i = 0; i < reference.row_loss.size(); ++i) {
    row_errors += std::fabs(naive.row_loss[i] - reference.row_loss[i]);
    row_sizes += row_size(c, data, reference, i) + std::fabs(reference.row_loss[i]);
  }
  const double over = 1 / loss_divisor<double>(c, data);
  const bool both_nan = std::isnan(reference.loss) && std::isnan(got.loss);
  out.push_back({"loss", both_nan ? 0 : std::fabs(got.loss - reference.loss),
                 both_nan ? 0 : over * (2 * row_errors + unit * row_sizes)});
  out.push_back({"argmax", wrong_argmax(c, data, reference, got), 0});

  const auto add_gradient = [&](const char* name, const std::vector<double>& ref,
                                const std::vector<double>& plain, const std::vector<double>& x,
                                logitless_dtype dtype, double terms) {
    if (ref.empty() && x.empty()) return;
    const double floor = smallest_half(dtype) * std::sqrt(static_cast<double>(ref.size()));
    // The rounding of the output, or of the terms of dz where these cancel.
    const double rounding = std::max(rounding_unit(dtype) * norm(ref), unit * terms);
    out.push_back({name, distance(x, ref), 2 * distance(plain, ref) + rounding + floor});
  };
  add_gradient("d_hidden", reference.d_hidden, naive.d_hidden, got.d_hidden, c.hidden_dtype,
               naive.terms.d_hidden);
  add_gradient("d_classifier", reference.d_classifier, naive.d_classifier, got.d_classifier,
               c.classifier_dtype, naive.terms.d_classifier);
  add_gradient("d_bias", reference.d_bias, naive.d_bias, got.d_bias, c.classifier_dtype, naive.terms.d_bias);
  return out;
}

}  // namespace logitless::cli
