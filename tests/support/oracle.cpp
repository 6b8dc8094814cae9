#include "oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats.h"

namespace logitless_test {
namespace {

template <class T>
class Materialised {
 public:
  Materialised(const Case& c, Rounds rounds)
      : c_(c),
        p_(c.problem),
        tokens_(static_cast<size_t>(p_.tokens)),
        vocab_(static_cast<size_t>(p_.vocab)),
        dim_(static_cast<size_t>(p_.hidden)),
        rounds_(rounds),
        hidden_(operand(c.hidden, p_.dtype.hidden)),
        weight_(operand(c.weight, p_.dtype.weight)),
        logit_hidden_(in_logits(hidden_)),
        logit_weight_(in_logits(weight_)),
        logits_(tokens_ * vocab_),
        slope_(tokens_ * vocab_, T(1)) {}

  Answer run() {
    compute_logits();
    forward();
    if (c_.wants_gradients()) backward();
    answer_.logits.assign(logits_.begin(), logits_.end());
    return answer_;
  }

 private:
  // The operand as the products see it.
  std::vector<T> operand(const std::vector<double>& values, int32_t dtype) const {
    const logitless_dtype to = product_dtype(p_, dtype);
    std::vector<T> out(values.begin(), values.end());
    for (size_t i = 0; i < out.size() && to != dtype; ++i) out[i] = static_cast<T>(rounded(values[i], to));
    return out;
  }

  // The operand as the logits' product sees it: with fp8 its rows are e4m3 numbers times a power of two.
  // These have three bits behind the leading one, exponents from -6 on, below which steps of 2^-9 remain, and
  // are at most 448.
  std::vector<T> in_logits(std::vector<T> values) const {
    if (p_.compute_dtype != LOGITLESS_FP8) return values;
    for (auto row = values.begin(); row != values.end(); row += static_cast<std::ptrdiff_t>(dim_)) {
      const auto end = row + static_cast<std::ptrdiff_t>(dim_);
      double largest = 0;
      for (auto x = row; x != end; ++x) largest = std::fmax(largest, std::fabs(static_cast<double>(*x)));
      int exponent = 0;
      if (largest > 0 && std::isfinite(largest)) {
        for (exponent = std::max(-118, std::ilogb(largest) - 9); std::ldexp(largest, -exponent) > 448;) {
          ++exponent;
        }
      }
      for (auto x = row; x != end; ++x) {
        const double scaled = std::ldexp(static_cast<double>(*x), -exponent);
        const double step = std::ldexp(1, std::max(scaled == 0 ? -6 : std::ilogb(scaled), -6) - 3);
        const double number = std::fabs(scaled) <= 448 ? std::nearbyint(scaled / step) * step : NAN;
        *x = static_cast<T>(std::ldexp(number, exponent));
      }
    }
    return values;
  }

  static T at(const std::vector<double>& values, size_t i, T otherwise) {
    return values.empty() ? otherwise : static_cast<T>(values[i]);
  }
  bool ignored(size_t i) const { return c_.target_of(static_cast<int64_t>(i)) == p_.ignore_index; }
  size_t target(size_t i) const { return static_cast<size_t>(c_.target_of(static_cast<int64_t>(i))); }
  // For each column, the sum of its weights as a target; or the sum of their magnitudes.
  std::vector<T> target_weights(size_t i, bool magnitudes = false) const {
    std::vector<T> q(vocab_);
    for (int64_t k = 0; k < c_.targets_per_row(); ++k) {
      const int64_t y = c_.target_of(static_cast<int64_t>(i), k);
      if (y == p_.ignore_index) continue;
      const auto weight = static_cast<T>(c_.target_weight_of(static_cast<int64_t>(i), k));
      q[static_cast<size_t>(y)] += magnitudes ? std::fabs(weight) : weight;
    }
    return q;
  }
  bool is_masked(size_t i, size_t j) const {
    return !c_.sample_mask.empty() && c_.sample_mask[i * vocab_ + j] == 0;
  }
  T class_weight(size_t j) const { return at(c_.class_weight, j, 1); }
  T token_weight(size_t i) const { return at(c_.token_weight, i, 1); }
  T temperature(size_t i) const { return static_cast<T>(c_.temperature_of(static_cast<int64_t>(i))); }
  T smoothing() const { return static_cast<T>(p_.label_smoothing); }

  static void raise(double* largest, T term) {
    const auto magnitude = static_cast<double>(std::fabs(term));
    if (magnitude > *largest) *largest = magnitude;
  }

  // logits = softcap(scale * hidden weight^T + bias) / temperature
  void compute_logits() {
    for (size_t i = 0; i < tokens_; ++i) {
      const T t = temperature(i);
      for (size_t j = 0; j < vocab_ && !ignored(i); ++j) {
        T dot = 0;
        for (size_t k = 0; k < dim_; ++k) {
          const T term = logit_hidden_[i * dim_ + k] * logit_weight_[j * dim_ + k];
          dot += term;
          raise(&answer_.terms.logit, static_cast<T>(p_.scale) * term / t);
        }
        T z = static_cast<T>(p_.scale) * dot + at(c_.bias, j, 0);
        raise(&answer_.terms.logit, z / t);
        raise(&answer_.terms.logit, at(c_.bias, j, 0) / t);
        if (p_.softcap > 0) {
          const auto cap = static_cast<T>(p_.softcap);
          const T tanh = std::tanh(z / cap);
          z = cap * tanh;
          slope_[i * vocab_ + j] = 1 - tanh * tanh;
        }
        slope_[i * vocab_ + j] /= t;
        logits_[i * vocab_ + j] = is_masked(i, j) ? -std::numeric_limits<T>::infinity() : z / t;
      }
    }
  }

  void forward() {
    answer_.argmax.assign(tokens_, -1);
    lse_.assign(tokens_, 0);
    row_loss_.assign(tokens_, 0);
    for (std::vector<double>* out :
         {&answer_.nll, &answer_.entropy, &answer_.target_logit, &answer_.mean_logit,
          &answer_.log_sum_sq_probs, &answer_.max_logit, &answer_.terms.loss}) {
      out->assign(tokens_, 0);
    }
    T sum = 0;
    T weights = 0;
    for (size_t i = 0; i < tokens_; ++i) {
      if (ignored(i)) continue;
      ++answer_.valid_count;
      forward_row(i);
      sum += row_loss_[i];
      weights += token_weight(i) * class_weight(target(i));
    }
    answer_.lse.assign(lse_.begin(), lse_.end());
    answer_.row_loss.assign(row_loss_.begin(), row_loss_.end());
    divisor_ = 1;
    if (p_.reduction == LOGITLESS_REDUCTION_MEAN)
      divisor_ = p_.num_items > 0 ? static_cast<T>(p_.num_items) : weights;
    answer_.divisor = static_cast<double>(divisor_);
    if (p_.reduction == LOGITLESS_REDUCTION_NONE)
      answer_.loss = answer_.row_loss;
    else
      answer_.loss = {static_cast<double>(sum / divisor_)};
  }

  void forward_row(size_t i) {
    const T* z = logits_.data() + i * vocab_;
    const size_t y = target(i);
    const size_t best = static_cast<size_t>(std::max_element(z, z + vocab_) - z);
    T sum = 0;
    for (size_t j = 0; j < vocab_; ++j) sum += std::exp(z[j] - z[best]);
    const T lse = lse_[i] = z[best] + std::log(sum);
    T entropy = 0;  // -sum p log p
    T smooth = 0;   // -sum w log p
    T smooth_terms = 0;
    T logits = 0;
    T squares = 0;
    T nll = 0;           // -sum q log p
    T target_logit = 0;  // sum q z
    T nll_terms = 0;
    T magnitudes = 0;
    const auto largest_logit = static_cast<T>(answer_.terms.logit);
    const std::vector<T> q = target_weights(i), magnitude = target_weights(i, true);
    for (size_t j = 0; j < vocab_; ++j) {
      if (q[j] != 0) nll += q[j] * (lse - z[j]), target_logit += q[j] * z[j];
      if (magnitude[j] != 0) nll_terms += magnitude[j] * (std::fabs(lse) + std::fabs(z[j]) + largest_logit);
      magnitudes += magnitude[j];
      if (is_masked(i, j)) continue;
      const T log_p = z[j] - lse;
      if (std::exp(log_p) > 0) entropy -= std::exp(log_p) * log_p;
      smooth -= class_weight(j) * log_p;
      logits += z[j];
      squares += std::exp(2 * (z[j] - z[best]));
      smooth_terms += class_weight(j) * (std::fabs(z[j]) + std::fabs(lse) + largest_logit);
    }
    raise(&answer_.terms.target_weight, magnitudes);
    const T z_loss = static_cast<T>(p_.z_loss);
    const T total = static_cast<T>(p_.vocab);
    const T hard = (1 - smoothing()) * class_weight(y);
    row_loss_[i] = token_weight(i) * (hard * nll + smoothing() / total * smooth + z_loss * lse * lse);
    answer_.terms.loss[i] = static_cast<double>(
        token_weight(i) * (hard * nll_terms + smoothing() / total * smooth_terms +
                           z_loss * std::fabs(lse) * (std::fabs(lse) + 2 * largest_logit)));
    raise(&answer_.terms.row_loss, static_cast<T>(answer_.terms.loss[i]));
    raise(&answer_.terms.entropy, std::fabs(lse) + largest_logit * (1 + std::fabs(entropy)));
    answer_.nll[i] = static_cast<double>(nll);
    answer_.entropy[i] = static_cast<double>(entropy);
    answer_.target_logit[i] = static_cast<double>(target_logit);
    answer_.mean_logit[i] = static_cast<double>(logits / total);
    answer_.log_sum_sq_probs[i] = static_cast<double>(std::log(squares) - 2 * std::log(sum));
    answer_.max_logit[i] = static_cast<double>(z[best]);
    answer_.argmax[i] = static_cast<int64_t>(best);
  }

  // Rounds to the operands' precision, without an end of the exponents: an engine scales float16 gradients
  // into their range.
  T shortened(T value) const {
    if (rounds_ == Rounds::kNothing || value == 0 || !std::isfinite(value)) return value;
    int exponent = 0;
    const double mantissa = std::frexp(static_cast<double>(value), &exponent);
    return static_cast<T>(std::ldexp(rounded(mantissa, product_dtype(p_, p_.dtype.hidden)), exponent));
  }

  // Gradient of scale * dot + bias of one logit, and its terms.
  struct Gradient {
    T value, part, by_logit;
  };

  // Differentiates through the losses to log_softmax, through log_softmax to the logits, and through the
  // softcap. Returns the factor of exp(z_ij - z_iy) in it.
  T d_logits_row(size_t i, std::vector<Gradient>* d) const {
    const T* z = logits_.data() + i * vocab_;
    const size_t y = target(i);
    const size_t loss_index = p_.reduction == LOGITLESS_REDUCTION_NONE ? i : 0;
    const T upstream = at(c_.grad_loss, loss_index, 1) / divisor_ * token_weight(i);
    const T d_entropy = at(c_.grad_entropy, i, 0);
    const T d_target_logit = at(c_.grad_target_logit, i, 0);
    const T d_lse = upstream * 2 * static_cast<T>(p_.z_loss) * lse_[i] + at(c_.grad_lse, i, 0);
    const std::vector<T> q = target_weights(i), magnitude = target_weights(i, true);
    T sum = 0;
    T terms = std::fabs(d_lse);
    for (size_t j = 0; j < vocab_; ++j) {
      const T log_p = z[j] - lse_[i];
      const T probability = std::exp(log_p);
      T d_log_p = -upstream * smoothing() / static_cast<T>(p_.vocab) * class_weight(j);
      T part = std::fabs(d_log_p);
      if (magnitude[j] != 0) {
        const T of_target = upstream * (1 - smoothing()) * class_weight(y) + at(c_.grad_nll, i, 0);
        d_log_p -= of_target * q[j];
        part += std::fabs(of_target) * magnitude[j];
      }
      if (d_entropy != 0 && probability > 0) {
        d_log_p -= d_entropy * probability * (log_p + 1);
        part += std::fabs(d_entropy) * probability * (std::fabs(z[j]) + std::fabs(lse_[i]) + 1);
      }
      (*d)[j] = {d_log_p, part, 0};
      sum += d_log_p;
      terms += part;
    }
    const T t = temperature(i);
    const T logit_terms = std::fabs(lse_[i]) + static_cast<T>(answer_.terms.logit);
    for (size_t j = 0; j < vocab_; ++j) {
      const T probability = std::exp(z[j] - lse_[i]);
      const T slope = slope_[i * vocab_ + j];
      const T direct = d_target_logit * q[j];
      T value = ((*d)[j].value + direct + probability * (d_lse - sum)) * slope;
      value = shortened(value);
      const T part = ((*d)[j].part + std::fabs(d_target_logit) * magnitude[j] + probability * terms) / t;
      // The softcap's slope 1 - tanh^2 changes by at most 2 tanh / cap times the rounding.
      const T by_slope = p_.softcap > 0 ? part * 2 * t / static_cast<T>(p_.softcap) * logit_terms : 0;
      (*d)[j] = {value, part, probability * terms / t * logit_terms + by_slope};
    }
    return (d_lse - sum) / t * std::exp(z[y] - lse_[i]);
  }

  static void raise(Answer::Terms::Gradient* largest, const Gradient& d, T factor) {
    raise(&largest->part, d.part * factor);
    raise(&largest->by_logit, d.by_logit * factor);
  }

  void backward() {
    std::vector<T> d_hidden(tokens_ * dim_), d_weight(vocab_ * dim_), d_bias(vocab_);
    const auto scale = static_cast<T>(p_.scale);
    std::vector<Gradient> d(vocab_);
    for (size_t i = 0; i < tokens_; ++i) {
      if (ignored(i)) continue;
      const T factor = d_logits_row(i, &d);
      const bool scaled = rounds_ == Rounds::kExpLogits && factor != 0 && std::isfinite(factor);
      for (size_t j = 0; j < vocab_; ++j) {
        d_bias[j] += d[j].value;
        raise(&answer_.terms.d_bias, d[j], 1);
        T largest_hidden = 0;
        T largest_weight = 0;
        for (size_t k = 0; k < dim_; ++k) {
          const T e = hidden_[i * dim_ + k];
          const T c = weight_[j * dim_ + k];
          d_hidden[i * dim_ + k] += d[j].value * c;
          d_weight[j * dim_ + k] += d[j].value * (scaled ? shortened(e * factor) / factor : e);
          largest_hidden = std::max(largest_hidden, std::fabs(e));
          largest_weight = std::max(largest_weight, std::fabs(c));
        }
        raise(&answer_.terms.d_hidden, d[j], scale * largest_weight);
        raise(&answer_.terms.d_weight, d[j], scale * largest_hidden);
      }
      if (rounds_ == Rounds::kExpLogits && i == tokens_ / 2) round_to_output(&d_weight);
    }
    if (p_.has.d_hidden)
      answer_.d_hidden = finished(d_hidden, scale, c_.d_hidden_start, &answer_.terms.d_hidden);
    if (p_.has.d_weight) {
      answer_.d_weight = finished(d_weight, scale, c_.d_weight_start, &answer_.terms.d_weight);
    }
    if (p_.has.d_bias) answer_.d_bias = finished(d_bias, 1, c_.d_bias_start, &answer_.terms.d_bias);
  }

  void round_to_output(std::vector<T>* d_weight) const {
    for (T& value : *d_weight) {
      value = static_cast<T>(rounded(static_cast<double>(value), as_dtype(p_.dtype.d_weight)));
    }
  }

  static std::vector<double> finished(const std::vector<T>& gradient, T scale,
                                      const std::vector<double>& start, Answer::Terms::Gradient* terms) {
    std::vector<double> out(gradient.size());
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<double>(at(start, i, 0) + scale * gradient[i]);
      raise(&terms->by_logit, at(start, i, 0));
    }
    return out;
  }

  const Case& c_;
  const logitless::Problem& p_;
  size_t tokens_, vocab_, dim_;
  Rounds rounds_;
  std::vector<T> hidden_, weight_, logit_hidden_, logit_weight_, logits_, slope_, lse_, row_loss_;
  T divisor_ = 1;
  Answer answer_;
};

}  // namespace

template <class T>
Answer materialise(const Case& c, Rounds rounds) {
  return Materialised<T>(c, rounds).run();
}

template Answer materialise<float>(const Case&, Rounds);
template Answer materialise<double>(const Case&, Rounds);
template Answer materialise<long double>(const Case&, Rounds);

}  // namespace logitless_test
