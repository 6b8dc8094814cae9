#include <algorithm>
#include <cmath>
#include <limits>

#include "core/logit_transform.h"
#include "core/row_coefficients.h"

namespace logitless::cli {
using LibraryProblem = Problem;  // before logitless.hpp, which has another Problem
}

#include "commands/check.h"

namespace logitless::cli {
namespace {

constexpr double kUnit = 0x1p-24;  // unit of float32, in which all but operands and gradients is computed
// Number of roundings by which an operation may be off: of a logit, an exponential and a coefficient.
constexpr double kRoundings = 8;

double rounding_unit(int32_t dtype) {
  return dtype == LOGITLESS_BF16 ? 0x1p-8 : dtype == LOGITLESS_F16 ? 0x1p-11 : kUnit;
}
// Returns half of the dtype's smallest subnormal: below it, rounding errors are absolute.
double smallest_half(int32_t dtype) {
  return dtype == LOGITLESS_BF16 ? 0x1p-134 : dtype == LOGITLESS_F16 ? 0x1p-25 : 0x1p-150;
}

double at(const std::vector<double>& values, int64_t i, double without) {
  return values.empty() ? without : values[static_cast<size_t>(i)];
}

// Returns the Euclidean norm of the difference of two vectors.
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

double norm(const std::vector<double>& a) {
  return distance(a, std::vector<double>(a.size()));
}

double dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += a[k] * b[k];
  return sum;
}

// Returns the problem as the library's own formulas read it: its options.
LibraryProblem library_problem(const CheckCase& c) {
  LibraryProblem p;
#define LOGITLESS_OPTION(name, NAME) p.name = static_cast<decltype(p.name)>(c.problem.name);
#include <logitless/options.def>
  p.vocab_total = p.vocab;
  return p;
}

// Error bounds of a case: one for each row, and those of the gradients, which follow from them.
class Bounds {
 public:
  Bounds(const CheckCase& c, const CheckData& data, const CheckOutputs& truth, bool rounds_dz)
      : p_(c.problem), data_(data), truth_(truth), transform_(logit_transform<double>(library_problem(c))) {
    for (int64_t j = 0; j < p_.vocab; ++j) {
      const double* weight = &data.weight[static_cast<size_t>(j * p_.hidden)];
      largest_weight_ = std::max(largest_weight_, std::sqrt(dot(weight, weight, p_.hidden)));
      largest_bias_ = std::max(largest_bias_, std::fabs(at(data.bias, j, 0)));
      class_weights_ += at(data.class_weight, j, 1);
    }
    params_ = loss_params(library_problem(c), class_weights_);
    rounds_dz = rounds_dz && p_.dtype.hidden == p_.dtype.weight;
    dz_unit_ = rounds_dz ? rounding_unit(p_.dtype.hidden) : 0;
    for (int64_t i = 0; i < p_.tokens; ++i) {
      if (counts(i)) weights_ += at(data.token_weight, i, 1) * at(data.class_weight, target(i), 1);
    }
    divisor_ = p_.reduction == LOGITLESS_REDUCTION_SUM ? 1 : p_.num_items > 0 ? p_.num_items : weights_;
    for (int64_t i = 0; i < p_.tokens; ++i) add_row(i);
  }

  std::vector<double> lse, nll, entropy, row_loss;
  double d_hidden = 0, d_weight = 0, d_bias = 0;  // squares of 2-norms
  double divisor() const { return divisor_; }

  // Whether a row's argmax is neither the truth's nor one that float32 sums cannot distinguish from it.
  bool is_wrong_argmax(int64_t i, int64_t chosen) const {
    const int64_t best = truth_.argmax[static_cast<size_t>(i)];
    if (best == chosen) return false;
    if (best < 0 || chosen < 0 || chosen >= p_.vocab) return true;
    return !(logit(i, best) - logit(i, chosen) <= 2 * logit_error(i));
  }

 private:
  bool counts(int64_t i) const { return truth_.argmax[static_cast<size_t>(i)] >= 0; }
  int64_t target(int64_t i) const { return data_.targets[static_cast<size_t>(i + p_.shift)]; }
  double temperature(int64_t i) const { return at(data_.temperature, i, p_.temperature); }

  double logit(int64_t i, int64_t j) const {
    const double product = dot(&data_.hidden[static_cast<size_t>(i * p_.hidden)],
                               &data_.weight[static_cast<size_t>(j * p_.hidden)], p_.hidden);
    return transform_.logit(product, at(data_.bias, j, 0), 1 / temperature(i));
  }
  double hidden_norm(int64_t i) const {
    const double* row = &data_.hidden[static_cast<size_t>(i * p_.hidden)];
    return std::sqrt(dot(row, row, p_.hidden));
  }
  // Returns a bound on the magnitude of a row's logits.
  double logit_size(int64_t i) const {
    return (std::fabs(p_.scale) * hidden_norm(i) * largest_weight_ + largest_bias_) / temperature(i);
  }
  double logit_error(int64_t i) const {
    return kRoundings * kUnit * (logit_size(i) + p_.softcap / temperature(i));
  }

  void add_row(int64_t i) {
    if (!counts(i)) {
      for (auto* bounds : {&lse, &nll, &entropy, &row_loss}) bounds->push_back(0);
      return;
    }
    const auto row = static_cast<size_t>(i);
    const double z = logit_error(i), size = logit_size(i), t = temperature(i);
    const double true_lse = std::fabs(truth_.lse[row]), true_entropy = std::fabs(truth_.entropy[row]);
    const double sum = kUnit * (kRoundings + std::sqrt(static_cast<double>(p_.vocab)));  // for V terms
    lse.push_back(z + sum + kUnit * true_lse);
    nll.push_back(lse.back() + z + kUnit * std::fabs(truth_.nll[row]));
    entropy.push_back(lse.back() + z * (1 + 4 * true_entropy) + sum * (size + true_lse));

    // No term is negative, so coefficients at |lse| are sums of magnitudes.
    const RowWeights<double> weights{.token = at(data_.token_weight, i, 1),
                                     .target = at(data_.class_weight, target(i), 1)};
    const auto coefficients = [&](double at_lse) {
      return row_coefficients<double>(params_, weights, {.loss = 1}, at_lse, 0);
    };
    const RowCoefficients<double> k = coefficients(true_lse);
    const double all_classes = std::fabs(k.c) * class_weights_;
    row_loss.push_back(k.a * lse.back() + k.g * (z + kUnit * std::fabs(truth_.nll[row])) +
                       all_classes * (z + sum * (size + true_lse)) +
                       kRoundings * kUnit * std::fabs(truth_.row_loss[row]));

    // dz = (a p - c w - g q) slope / divisor / t; each sum is one of magnitudes over the vocabulary.
    const double terms = k.a + all_classes + k.g;
    const double slope = p_.softcap > 0 ? 2 * z * t / p_.softcap : 0;
    const double dz = (k.a * (z + lse.back()) + coefficients(true_lse + lse.back()).a - k.a +
                       terms * (slope + sum + dz_unit_)) /
                      divisor_ / t;
    // These gradients are sums over the tokens.
    const double rows = terms / divisor_ / t * kUnit * std::sqrt(static_cast<double>(p_.tokens));
    const double through = std::fabs(p_.scale);
    d_hidden += std::pow(through * largest_weight_ * dz, 2);
    d_weight += std::pow(through * hidden_norm(i) * (dz + rows), 2);
    d_bias += std::pow(dz + rows, 2);
  }

  const v0_1::Problem& p_;
  const CheckData& data_;
  const CheckOutputs& truth_;
  LogitTransform<double> transform_;
  LossParams<double> params_;
  double largest_weight_ = 0, largest_bias_ = 0;
  double class_weights_ = 0;  // sum of all class weights
  double weights_ = 0;        // sum over the rows that count
  double divisor_ = 1;
  double dz_unit_ = 0;
};

}  // namespace

std::vector<CheckedOutput> compare(const CheckCase& c, const CheckData& data, const CheckOutputs& truth,
                                   const CheckOutputs& got, bool rounds_dz) {
  const auto& p = c.problem;
  const Bounds bounds(c, data, truth, rounds_dz);
  std::vector<CheckedOutput> out{{"lse", distance(got.lse, truth.lse), norm(bounds.lse)},
                                 {"nll", distance(got.nll, truth.nll), norm(bounds.nll)},
                                 {"entropy", distance(got.entropy, truth.entropy), norm(bounds.entropy)},
                                 {"row_loss", distance(got.row_loss, truth.row_loss), norm(bounds.row_loss)}};
  const double sum = kUnit * (kRoundings + std::sqrt(static_cast<double>(p.tokens)));
  double errors = 0, wrong = 0;
  for (size_t i = 0; i < truth.row_loss.size(); ++i) {
    errors += bounds.row_loss[i] + sum * std::fabs(truth.row_loss[i]);
    wrong += bounds.is_wrong_argmax(static_cast<int64_t>(i), got.argmax[i]) ? 1 : 0;
  }
  const bool both_nan = std::isnan(truth.loss[0]) && std::isnan(got.loss[0]);  // no row counts
  out.push_back(
      {"loss", both_nan ? 0 : distance(got.loss, truth.loss), both_nan ? 0 : errors / bounds.divisor()});
  out.push_back({"argmax", wrong, 0});
  const auto add_gradient = [&](const char* name, const std::vector<double>& exact,
                                const std::vector<double>& x, int32_t dtype, double squares) {
    if (exact.empty() && x.empty()) return;
    // A plan may round a part of a sum to the dtype before it is complete.
    const double rounding = 2 * rounding_unit(dtype) * norm(exact) +
                            smallest_half(dtype) * std::sqrt(static_cast<double>(exact.size()));
    out.push_back({name, distance(x, exact), std::sqrt(squares) + rounding});
  };
  add_gradient("d_hidden", truth.d_hidden, got.d_hidden, p.dtype.d_hidden, bounds.d_hidden);
  add_gradient("d_weight", truth.d_weight, got.d_weight, p.dtype.d_weight, bounds.d_weight);
  add_gradient("d_bias", truth.d_bias, got.d_bias, p.dtype.d_bias, bounds.d_bias);
  return out;
}

}  // namespace logitless::cli
