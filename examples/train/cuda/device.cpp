#include <cmath>
#include <utility>

#include "train/clock.h"
#include "train/cuda/heads.h"
#include "train/cuda/layers.h"
#include "train/cuda/model.h"
#include "train/cuda/open.h"
#include "train/cuda/products.h"

namespace logitless::train {
namespace cuda {
namespace {

class DeviceNetwork : public Network {
 public:
  DeviceNetwork(std::shared_ptr<Session> session, const TrainerConfig& config, std::unique_ptr<Head> head)
      : session_(std::move(session)),
        config_(config),
        host_(initial_parameters(config.model, config.seed)),
        model_(*session_, config, host_),
        targets_(session_->allocate<int32_t>(config.batch.tokens())),
        d_hidden_(session_->allocate<float>(config.batch.tokens() * config.model.dim)),
        head_(std::move(head)) {
    for (const Parameter& parameter : host_) {
      Moments& moments = moments_.emplace_back();
      for (Memory<float>* moment : {&moments.first, &moments.second}) {
        *moment = session_->allocate<float>(parameter.size());
        session_->clear(moment->data(), parameter.size());
      }
    }
  }

  HeadLoss loss_and_gradients(const Batch& batch) override {
    const HeadInput input = forward(batch);
    const Memory<float>& d_classifier = model_.head().gradient;
    const Clock::time_point start = Clock::now();
    HeadLoss result{};
    result.loss = head_->loss_and_gradients(input, span_of(d_hidden_), span_of(d_classifier));
    result.head_seconds = seconds_since(start);
    model_.backward(d_hidden_.data());
    return result;
  }

  void update(double learning_rate) override {
    const AdamWConfig& config = config_.optimizer;
    const auto steps = static_cast<double>(++steps_);
    AdamWStep step{};
    step.beta1 = static_cast<float>(config.beta1);
    step.beta2 = static_cast<float>(config.beta2);
    step.epsilon = static_cast<float>(config.epsilon);
    step.rate = static_cast<float>(learning_rate / (1.0 - std::pow(config.beta1, steps)));
    step.second_scale = static_cast<float>(1.0 / (1.0 - std::pow(config.beta2, steps)));
    for (size_t p = 0; p < host_.size(); ++p) {
      const DeviceParameter& parameter = model_.parameters()[p];
      step.shrink = static_cast<float>(host_[p].decays ? 1.0 - learning_rate * config.weight_decay : 1.0);
      adamw(step, parameter.value.count(), parameter.gradient.data(), moments_[p].first.data(),
            moments_[p].second.data(), parameter.value.data(), session_->stream());
    }
    session_->wait();
  }

  double loss(const Batch& batch) override { return head_->loss(forward(batch)); }
  const Head& head() const override { return *head_; }

  const std::vector<Parameter>& parameters() override {
    for (size_t p = 0; p < host_.size(); ++p) {
      session_->download(host_[p].value, model_.parameters()[p].value);
      session_->download(host_[p].gradient, model_.parameters()[p].gradient);
    }
    return host_;
  }
  std::span<const float> hidden() override {
    session_->download(host_hidden_, model_.hidden());
    return host_hidden_;
  }
  std::span<const float> d_hidden() override {
    session_->download(host_d_hidden_, d_hidden_);
    return host_d_hidden_;
  }

 private:
  struct Moments {
    Memory<float> first;
    Memory<float> second;
  };

  template <class T>
  static std::span<T> span_of(const Memory<T>& memory) {
    return {memory.data(), static_cast<size_t>(memory.count())};
  }

  HeadInput forward(const Batch& batch) {
    model_.forward(batch.tokens);
    session_->upload(targets_, batch.targets);  // waits, so that the head's time is its own
    return {span_of(model_.hidden()), span_of(model_.head().value), span_of(targets_), config_.model.vocab,
            config_.model.dim};
  }

  std::shared_ptr<Session> session_;
  TrainerConfig config_;
  std::vector<Parameter> host_;
  DeviceModel model_;
  std::vector<Moments> moments_;
  int64_t steps_ = 0;
  Memory<int32_t> targets_;
  Memory<float> d_hidden_;  // [N, D]
  std::unique_ptr<Head> head_;
  std::vector<float> host_hidden_;
  std::vector<float> host_d_hidden_;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int ordinal) : session_(std::make_shared<Session>(ordinal)) {}

  std::string name() const override { return session_->device_name(); }
  std::string matrix_library() const override { return products_library(); }

  std::unique_ptr<Head> materialized_head() override { return cuda::make_materialized_head(*session_); }
  std::unique_ptr<Head> fused_head(Context context, int64_t max_workspace_bytes,
                                   const HeadGradient& gradient) override {
    return cuda::make_fused_head(*session_, std::move(context), max_workspace_bytes, gradient);
  }
  std::unique_ptr<Network> network(const TrainerConfig& config, std::unique_ptr<Head> head) override {
    return std::make_unique<DeviceNetwork>(session_, config, std::move(head));
  }

  std::string peak_name() const override { return "GPU: peak allocated"; }
  int64_t peak_bytes() const override { return session_->held().peak; }
  bool reset_peak() override {
    session_->held().peak = session_->held().now;
    return true;
  }

 private:
  std::shared_ptr<Session> session_;
};

}  // namespace
}  // namespace cuda

std::string why_no_cuda() {
  return cuda::why_no_products();
}

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  return std::make_unique<cuda::CudaDevice>(ordinal);
}

}  // namespace logitless::train
