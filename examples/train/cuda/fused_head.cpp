#include <map>
#include <utility>

#include "train/cuda/heads.h"

namespace logitless::train::cuda {
namespace {

class FusedHead : public Head {
 public:
  FusedHead(Session& session, Context context, int64_t max_workspace_bytes, const HeadGradient& gradient)
      : session_(session),
        context_(std::move(context)),
        max_workspace_bytes_(max_workspace_bytes),
        gradient_(gradient),
        seed_(session.allocate<int64_t>(1)),
        loss_(session.allocate<float>(1)) {}

  std::string name() const override { return "fused"; }
  std::string description() const override { return description_; }

  double loss(const HeadInput& input) override { return run(Pass::forward, input, {}, {}); }

  double loss_and_gradients(const HeadInput& input, std::span<float> d_hidden,
                            std::span<float> d_classifier) override {
    session_.upload(seed_, {++gradient_.seed});  // a draw of its own for each step
    return run(Pass::forward_backward, input, d_hidden, d_classifier);
  }

  int64_t workspace_bytes() const override { return workspace_.bytes(); }

 private:
  double run(Pass pass, const HeadInput& input, std::span<float> d_hidden, std::span<float> d_classifier) {
    const Matrix<const float> hidden{input.hidden.data(), input.tokens(), input.dim};
    const Matrix<const float> classifier{input.classifier.data(), input.vocab, input.dim};
    const Plan& plan = plan_of(pass, hidden, classifier);
    Buffers buffers = make_buffers(hidden, classifier, input.targets);
    buffers.loss = loss_.data();
    buffers.d_hidden = d_hidden.data();
    buffers.d_classifier = d_classifier.data();
    if (pass == Pass::forward_backward && gradient_.kind != Gradient::exact) buffers.seed = seed_.data();
    plan.run(buffers, {workspace_.data(), static_cast<size_t>(workspace_.bytes())}, session_.stream());
    session_.download(host_loss_, loss_);
    return static_cast<double>(host_loss_.front());
  }

  // All runs of a pass are of one size: each is planned once.
  const Plan& plan_of(Pass pass, const Matrix<const float>& hidden, const Matrix<const float>& classifier) {
    if (const auto at = plans_.find(pass); at != plans_.end()) return at->second;
    const Problem problem =
        head_problem(pass, hidden, classifier, static_cast<size_t>(max_workspace_bytes_), gradient_);
    const Plan& plan = plans_.emplace(pass, Plan(context_, problem)).first->second;
    const PlanInfo info = plan.info();
    const auto bytes = static_cast<int64_t>(info.workspace_bytes);
    if (workspace_.bytes() < bytes) {
      workspace_ = {};
      workspace_ = session_.allocate<std::byte>(bytes);
    }
    if (pass == Pass::forward_backward) {
      const auto kind = static_cast<logitless_plan_kind>(info.kind);
      description_ = std::string(info.backend) + " backend, plan " + logitless_plan_kind_name(kind) +
                     ", kernels " + info.implementation;
    }
    return plan;
  }

  Session& session_;
  Context context_;
  int64_t max_workspace_bytes_;
  HeadGradient gradient_;
  std::map<Pass, Plan> plans_;
  Memory<std::byte> workspace_;  // what the plans ask for, and no more
  Memory<int64_t> seed_;
  Memory<float> loss_;
  std::vector<float> host_loss_;
  std::string description_;
};

}  // namespace

std::unique_ptr<Head> make_fused_head(Session& session, Context context, int64_t max_workspace_bytes,
                                      const HeadGradient& gradient) {
  return std::make_unique<FusedHead>(session, std::move(context), max_workspace_bytes, gradient);
}

}  // namespace logitless::train::cuda
