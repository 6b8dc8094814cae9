#include "commands/check_naive.h"

#include <algorithm>
#include <cmath>

namespace logitless::cli {
namespace {

std::vector<float> narrow(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// Sum of squares of each row of a [rows, depth] matrix.
std::vector<double> row_squares(const std::vector<double>& matrix, int64_t rows, int64_t depth) {
  std::vector<double> squares(static_cast<size_t>(rows));
  for (size_t i = 0; i < matrix.size(); ++i) {
    squares[i / static_cast<size_t>(depth)] += matrix[i] * matrix[i];
  }
  return squares;
}

// To the bits of the dtype, of any exponent: dz is scaled into the range of float16.
float rounded_bits(float value, logitless_dtype dtype) {
  if (dtype != LOGITLESS_F16) return static_cast<float>(rounded(value, dtype));
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);
  return std::ldexp(static_cast<float>(rounded(fraction, dtype)), exponent);
}

struct Naive {
  const CheckCase& c;
  const CheckData& data;
  const bool rounds_dz;
  std::vector<float> hidden = narrow(data.hidden);
  std::vector<float> classifier = narrow(data.classifier);
  std::vector<float> logits = {};  // [N, V]; turned into the gradient of the products, row by row
  float weight_total = 0;          // sum of the class weights
  std::vector<double> hidden_squares = row_squares(data.hidden, c.tokens, c.dim);
  std::vector<double> classifier_squares = row_squares(data.classifier, c.vocab, c.dim);
  GradientTerms squares = {};  // of the 2-norms

  float class_weight(int64_t j) const {
    return data.class_weight.empty() ? 1 : static_cast<float>(data.class_weight[static_cast<size_t>(j)]);
  }
  float token_weight(int64_t i) const {
    return data.token_weight.empty() ? 1 : static_cast<float>(data.token_weight[static_cast<size_t>(i)]);
  }

  float temperature(int64_t i) const { return static_cast<float>(temperature_of(c, data, i)); }

  void compute_logits() {
    const auto columns = static_cast<size_t>(c.vocab);
    const auto depth = static_cast<size_t>(c.dim);
    logits.resize(static_cast<size_t>(c.tokens) * columns);
    for (size_t i = 0; i < static_cast<size_t>(c.tokens); ++i) {
      const float t = temperature(static_cast<int64_t>(i));
      for (size_t j = 0; j < columns; ++j) {
        float dot = 0;
        for (size_t k = 0; k < depth; ++k) dot += hidden[i * depth + k] * classifier[j * depth + k];
        float z = static_cast<float>(c.scale) * dot;
        if (c.bias) z += static_cast<float>(data.bias[j]);
        if (c.softcap > 0) z = static_cast<float>(c.softcap) * std::tanh(z / static_cast<float>(c.softcap));
        logits[i * columns + j] = z / t;
      }
    }
    for (int64_t j = 0; j < c.vocab; ++j) weight_total += class_weight(j);
  }

  // Losses of a row; its logits become their gradients.
  void row(int64_t i, float over_divisor, CheckOutputs& out) {
    const auto at = static_cast<size_t>(i);
    const int64_t y = shifted_target(c, data, i);
    float* z = &logits[at * static_cast<size_t>(c.vocab)];
    if (y == kCheckIgnoreIndex) {
      std::fill_n(z, c.vocab, 0.0F);
      out.argmax[at] = -1;
      return;
    }
    const float max = *std::max_element(z, z + c.vocab);
    out.argmax[at] = std::max_element(z, z + c.vocab) - z;
    float sum = 0;
    for (int64_t j = 0; j < c.vocab; ++j) sum += std::exp(z[j] - max);
    const float lse = max + std::log(sum);
    const float nll = lse - z[y];
    const auto smoothing = static_cast<float>(c.label_smoothing);
    const float smooth = smoothing / static_cast<float>(c.vocab);
    const auto z_loss = static_cast<float>(c.z_loss);
    float mean_logit = 0;
    float spread = 0;  // sum_j w_j (lse - z_j)
    for (int64_t j = 0; j < c.vocab; ++j) {
      mean_logit += std::exp(z[j] - lse) * z[j];
      spread += class_weight(j) * (lse - z[j]);
    }
    const float target = (1 - smoothing) * class_weight(y);
    const float loss = token_weight(i) * (target * nll + smooth * spread + z_loss * lse * lse);
    out.row_loss[at] = loss;
    out.nll[at] = nll;
    out.lse[at] = lse;
    out.entropy[at] = lse - mean_logit;
    const float k = token_weight(i) * over_divisor;
    const float a = k * (target + smooth * weight_total + 2 * z_loss * lse);
    const float t = temperature(i);
    const float cap = static_cast<float>(c.softcap) / t;
    for (int64_t j = 0; j < c.vocab; ++j) {
      const float slope = (cap > 0 ? 1 - (z[j] / cap) * (z[j] / cap) : 1) / t;
      const float softmax_part = std::exp(z[j] - lse) * a;
      const float smooth_part = k * smooth * class_weight(j);
      const float target_part = j == y ? k * target : 0;
      const float dz = (softmax_part - smooth_part - target_part) * slope;
      add_terms(at, static_cast<size_t>(j),
                (std::fabs(softmax_part) + std::fabs(smooth_part) + std::fabs(target_part)) * slope);
      z[j] = rounds_dz ? rounded_bits(dz, c.hidden_dtype) : dz;
    }
  }

  // A dz_ij that is off by `terms` puts row i of d_hidden off by terms * scale * |C_j|, and so on.
  void add_terms(size_t i, size_t j, double terms) {
    const double products = terms * terms * c.scale * c.scale;
    squares.d_hidden += products * classifier_squares[j];
    squares.d_classifier += products * hidden_squares[i];
    squares.d_bias += terms * terms;
  }

  void gradients(CheckOutputs& out) const {
    const auto columns = static_cast<size_t>(c.vocab);
    const auto depth = static_cast<size_t>(c.dim);
    const auto rows = static_cast<size_t>(c.tokens);
    const auto scale = static_cast<float>(c.scale);
    for (size_t i = 0; c.grad_hidden && i < rows; ++i) {
      std::vector<float> sum(depth);
      for (size_t j = 0; j < columns; ++j) {
        for (size_t k = 0; k < depth; ++k) sum[k] += logits[i * columns + j] * classifier[j * depth + k];
      }
      for (size_t k = 0; k < depth; ++k) out.d_hidden.push_back(rounded(scale * sum[k], c.hidden_dtype));
    }
    for (size_t j = 0; c.grad_classifier && j < columns; ++j) {
      std::vector<float> sum(depth);
      float bias = 0;
      for (size_t i = 0; i < rows; ++i) {
        bias += logits[i * columns + j];
        for (size_t k = 0; k < depth; ++k) sum[k] += logits[i * columns + j] * hidden[i * depth + k];
      }
      for (size_t k = 0; k < depth; ++k)
        out.d_classifier.push_back(rounded(scale * sum[k], c.classifier_dtype));
      if (c.bias) out.d_bias.push_back(rounded(bias, c.classifier_dtype));
    }
  }
};

}  // namespace

CheckOutputs naive_float32(const CheckCase& c, const CheckData& data, bool rounds_dz) {
  Naive naive{c, data, rounds_dz && c.hidden_dtype == c.classifier_dtype};
  naive.compute_logits();
  CheckOutputs out;
  const auto rows = static_cast<size_t>(c.tokens);
  for (auto* values : {&out.row_loss, &out.nll, &out.lse, &out.entropy}) values->resize(rows);
  out.argmax.resize(rows);
  const auto divisor = loss_divisor<float>(c, data);
  float sum = 0;
  for (int64_t i = 0; i < c.tokens; ++i) {
    naive.row(i, 1 / divisor, out);
    sum += static_cast<float>(out.row_loss[static_cast<size_t>(i)]);
  }
  out.loss = sum / divisor;
  naive.gradients(out);
  out.terms = {std::sqrt(naive.squares.d_hidden), std::sqrt(naive.squares.d_classifier),
               std::sqrt(naive.squares.d_bias)};
  return out;
}

}  // namespace logitless::cli
