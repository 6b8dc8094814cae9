#include <utility>

#include "train/adamw.h"
#include "train/clock.h"
#include "train/model.h"
#include "train/network.h"

namespace logitless::train {
namespace {

class HostNetwork : public Network {
 public:
  HostNetwork(const TrainerConfig& config, std::unique_ptr<Head> head)
      : config_(config),
        model_(config.model, config.seed),
        optimizer_(config.optimizer, model_.parameters()),
        head_(std::move(head)),
        d_hidden_(static_cast<size_t>(config.batch.tokens() * config.model.dim)) {}

  HeadLoss loss_and_gradients(const Batch& batch) override {
    const HeadInput input = head_input(batch);
    const Clock::time_point start = Clock::now();
    HeadLoss result{};
    result.loss = head_->loss_and_gradients(input, d_hidden_, model_.head().gradient);
    result.head_seconds = seconds_since(start);
    model_.backward(d_hidden_);
    return result;
  }

  void update(double learning_rate) override { optimizer_.step(model_.parameters(), learning_rate); }
  double loss(const Batch& batch) override { return head_->loss(head_input(batch)); }

  const Head& head() const override { return *head_; }
  const std::vector<Parameter>& parameters() override { return model_.parameters(); }
  std::span<const float> hidden() override { return hidden_; }
  std::span<const float> d_hidden() override { return d_hidden_; }

 private:
  HeadInput head_input(const Batch& batch) {
    hidden_ = model_.forward(batch.tokens, config_.batch.batch, config_.batch.length);
    return {hidden_, model_.head().value, batch.targets, config_.model.vocab, config_.model.dim};
  }

  TrainerConfig config_;
  Model model_;
  AdamW optimizer_;
  std::unique_ptr<Head> head_;
  std::span<const float> hidden_;  // the model's
  std::vector<float> d_hidden_;    // [N, D]
};

}  // namespace

std::unique_ptr<Network> make_host_network(const TrainerConfig& config, std::unique_ptr<Head> head) {
  return std::make_unique<HostNetwork>(config, std::move(head));
}

}  // namespace logitless::train
