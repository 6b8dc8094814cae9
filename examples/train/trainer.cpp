#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace headroom::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

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
                 std::span<const int32_t> validation, std::unique_ptr<Head> head)
    : config_(config),
      model_(config.model, config.seed),
      optimizer_(config.optimizer, model_.parameters()),
      batches_(train, config.batch, config.seed ^ kDataStream),
      validation_(even_batches(validation, config.batch, config.validation_batches)),
      head_(std::move(head)),
      d_hidden_(static_cast<size_t>(config.batch.tokens() * config.model.dim)) {}

HeadInput Trainer::head_input(std::span<const float> hidden, const Batch& batch) {
  return {hidden, model_.head().value, batch.targets, config_.model.vocab, config_.model.dim};
}

StepResult Trainer::step(double learning_rate, bool with_bounds) {
  StepResult result{};
  const Clock::time_point start = Clock::now();
  const Batch batch = batches_.next();
  const std::span<const float> hidden =
      model_.forward(batch.tokens, config_.batch.batch, config_.batch.length);
  const Clock::time_point head_start = Clock::now();
  result.loss = head_->loss_and_gradients(head_input(hidden, batch), d_hidden_, model_.head().gradient);
  result.head_seconds = seconds_since(head_start);
  if (!std::isfinite(result.loss)) {
    throw std::runtime_error("the loss is not finite: training diverged; try a smaller --learning-rate");
  }
  model_.backward(d_hidden_);
  optimizer_.step(model_.parameters(), learning_rate);
  result.seconds = seconds_since(start);
  if (!with_bounds) return result;
  for (const Parameter& p : model_.parameters()) result.gradient_norm += sum_of_magnitudes(p.gradient);
  result.logit_bound =
      largest_row_norm(hidden, config_.model.dim) * largest_row_norm(model_.head().value, config_.model.dim);
  return result;
}

std::span<const float> Trainer::hidden_of(const Batch& batch) {
  return model_.forward(batch.tokens, config_.batch.batch, config_.batch.length);
}

double Trainer::loss_of(const Batch& batch) {
  return head_->loss(head_input(hidden_of(batch), batch));
}

Validation Trainer::validate() {
  const Clock::time_point start = Clock::now();
  double sum = 0.0;
  for (const Batch& batch : validation_) sum += loss_of(batch);
  return {sum / static_cast<double>(validation_.size()), seconds_since(start)};
}

int64_t Trainer::head_gradient_bytes() const {
  return static_cast<int64_t>((d_hidden_.size() + model_.parameters().back().gradient.size()) *
                              sizeof(float));
}

}  // namespace headroom::train
