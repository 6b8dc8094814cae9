#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "train/clock.h"

namespace logitless::train {
namespace {

double largest_row_norm(std::span<const float> matrix, int64_t columns) {
  double largest = 0.0;
  for (size_t at = 0; at < matrix.size(); at += static_cast<size_t>(columns)) {
    double square = 0.0;
    for (const float x : matrix.subspan(at, static_cast<size_t>(columns)))
      square += static_cast<double>(x) * x;
    largest = std::max(largest, square);
  }
  return std::sqrt(largest);
}

// Streams of random numbers that must not be the same.
constexpr uint64_t kDataStream = 0x646174610000ULL;

}  // namespace

double sum_of_magnitudes(std::span<const float> values) {
  constexpr int64_t kBlock = 1 << 16;
  const auto size = static_cast<int64_t>(values.size());
  std::vector<double> partial(static_cast<size_t>((size + kBlock - 1) / kBlock));
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < static_cast<int64_t>(partial.size()); ++block) {
    double sum = 0.0;
    for (int64_t i = block * kBlock; i < std::min(size, (block + 1) * kBlock); ++i) {
      sum += static_cast<double>(std::abs(values[static_cast<size_t>(i)]));
    }
    partial[static_cast<size_t>(block)] = sum;
  }
  double total = 0.0;
  for (const double sum : partial) total += sum;
  return total;
}

Trainer::Trainer(const TrainerConfig& config, std::span<const int32_t> train,
                 std::span<const int32_t> validation, std::unique_ptr<Network> network)
    : config_(config),
      batches_(train, config.batch, config.seed ^ kDataStream),
      validation_(even_batches(validation, config.batch, config.validation_batches)),
      network_(std::move(network)) {}

StepResult Trainer::step(double learning_rate, bool with_bounds) {
  StepResult result{};
  const Clock::time_point start = Clock::now();
  const HeadLoss head = network_->loss_and_gradients(batches_.next());
  result.loss = head.loss;
  result.head_seconds = head.head_seconds;
  if (!std::isfinite(result.loss)) {
    throw std::runtime_error("the loss is not finite: training diverged; try a smaller --learning-rate");
  }
  network_->update(learning_rate);
  result.seconds = seconds_since(start);
  if (!with_bounds) return result;
  const std::vector<Parameter>& parameters = network_->parameters();
  for (const Parameter& p : parameters) result.gradient_norm += sum_of_magnitudes(p.gradient);
  const int64_t dim = config_.model.dim;
  result.logit_bound =
      largest_row_norm(network_->hidden(), dim) * largest_row_norm(parameters.back().value, dim);
  return result;
}

Validation Trainer::validate() {
  const Clock::time_point start = Clock::now();
  double sum = 0.0;
  for (const Batch& batch : validation_) sum += network_->loss(batch);
  return {sum / static_cast<double>(validation_.size()), seconds_since(start)};
}

int64_t Trainer::head_gradient_bytes() const {
  const int64_t rows = config_.batch.tokens() + config_.model.vocab;  // of d_hidden and d_classifier
  return rows * config_.model.dim * static_cast<int64_t>(sizeof(float));
}

}  // namespace logitless::train
