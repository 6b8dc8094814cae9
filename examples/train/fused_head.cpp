#include <algorithm>
#include <optional>
#include <utility>

#include "train/head.h"

namespace logitless::train {
namespace {

class FusedHead : public Head {
 public:
  FusedHead(Context context, int64_t max_workspace_bytes, const HeadGradient& gradient)
      : context_(std::move(context)),
        max_workspace_bytes_(static_cast<size_t>(max_workspace_bytes)),
        gradient_(gradient) {}

  std::string name() const override { return "fused"; }
  std::string description() const override { return description_; }

  double loss(const HeadInput& input) override { return run(Pass::forward, input, {}, {}); }

  double loss_and_gradients(const HeadInput& input, std::span<float> d_hidden,
                            std::span<float> d_classifier) override {
    ++gradient_.seed;  // a draw of its own for each step
    return run(Pass::forward_backward, input, d_hidden, d_classifier);
  }

  int64_t workspace_bytes() const override { return static_cast<int64_t>(most_bytes_); }

 private:
  double run(Pass pass, const HeadInput& input, std::span<float> d_hidden, std::span<float> d_classifier) {
    const Matrix<const float> hidden{input.hidden.data(), input.tokens(), input.dim};
    const Matrix<const float> classifier{input.classifier.data(), input.vocab, input.dim};
    // Planning takes microseconds; the workspace is kept from call to call.
    const Plan plan(context_, head_problem(pass, hidden, classifier, max_workspace_bytes_, gradient_));
    const PlanInfo info = plan.info();
    if (!workspace_ || workspace_->bytes().size() < info.workspace_bytes) {
      workspace_.reset();
      workspace_.emplace(info.workspace_bytes);
      most_bytes_ = std::max(most_bytes_, info.workspace_bytes);
    }
    if (pass == Pass::forward_backward) {
      const auto kind = static_cast<logitless_plan_kind>(info.kind);
      description_ = std::string(info.backend) + " backend, plan " + logitless_plan_kind_name(kind);
    }
    float loss = 0.0F;
    Buffers buffers = make_buffers(hidden, classifier, input.targets);
    buffers.loss = &loss;
    buffers.d_hidden = d_hidden.data();
    buffers.d_classifier = d_classifier.data();
    plan.run(buffers, workspace_->bytes());
    return static_cast<double>(loss);
  }

  Context context_;
  size_t max_workspace_bytes_;
  HeadGradient gradient_;
  std::optional<Workspace> workspace_;
  size_t most_bytes_ = 0;
  std::string description_;
};

}  // namespace

Problem head_problem(Pass pass, const Matrix<const float>& hidden, const Matrix<const float>& classifier,
                     size_t max_workspace_bytes, const HeadGradient& gradient) {
  Problem problem = make_problem(pass, hidden, classifier);
  problem.target_dtype = dtype_of<int32_t>();
  problem.want_d_hidden = problem.want_d_classifier = pass == Pass::forward ? 0 : 1;
  problem.max_workspace_bytes = max_workspace_bytes;
  set_gradient(problem, gradient.kind, gradient.threshold, gradient.seed);
  return problem;
}

void check_budget(const Context& context, int64_t tokens, int64_t vocab, int64_t dim,
                  int64_t max_workspace_bytes, const HeadGradient& gradient) {
  const Matrix<const float> hidden{nullptr, tokens, dim};
  const Matrix<const float> classifier{nullptr, vocab, dim};
  for (const Pass pass : {Pass::forward_backward, Pass::forward}) {
    const Plan plan(
        context, head_problem(pass, hidden, classifier, static_cast<size_t>(max_workspace_bytes), gradient));
  }
}

std::unique_ptr<Head> make_fused_head(Context context, int64_t max_workspace_bytes,
                                      const HeadGradient& gradient) {
  return std::make_unique<FusedHead>(std::move(context), max_workspace_bytes, gradient);
}

}  // namespace logitless::train
