#include <vector>

#include "train/cuda/heads.h"
#include "train/cuda/layers.h"
#include "train/cuda/products.h"

namespace logitless::train::cuda {
namespace {

class MaterializedHead : public Head {
 public:
  explicit MaterializedHead(Session& session) : session_(session) {}

  std::string name() const override { return "materialized"; }
  std::string description() const override {
    return "fp32 logits in the GPU's memory, " + products_library() + " with the scratch of the model's body";
  }

  double loss(const HeadInput& input) override { return run(input, false); }

  double loss_and_gradients(const HeadInput& input, std::span<float> d_hidden,
                            std::span<float> d_classifier) override {
    const double mean = run(input, true);
    const int64_t tokens = input.tokens();
    // d_hidden [N, D] = dz [N, V] * classifier [V, D]; d_classifier [V, D] = dz^T * hidden [N, D].
    session_.gemm(Op::kNone, Op::kNone, tokens, input.dim, input.vocab, logits_.data(), input.vocab,
                  input.classifier.data(), input.dim, 0.0F, d_hidden.data(), input.dim);
    session_.gemm(Op::kTranspose, Op::kNone, input.vocab, input.dim, tokens, logits_.data(), input.vocab,
                  input.hidden.data(), input.dim, 0.0F, d_classifier.data(), input.dim);
    session_.wait();
    return mean;
  }

  int64_t workspace_bytes() const override { return logits_.bytes() + losses_.bytes(); }

 private:
  // The mean loss; with `gradient`, logits_ becomes dz = (softmax - onehot) / N.
  double run(const HeadInput& input, bool gradient) {
    const int64_t tokens = input.tokens();
    if (logits_.count() != tokens * input.vocab) {
      logits_ = {};
      logits_ = session_.allocate<float>(tokens * input.vocab);
      losses_ = session_.allocate<double>(tokens);
    }
    session_.gemm(Op::kNone, Op::kTranspose, tokens, input.vocab, input.dim, input.hidden.data(), input.dim,
                  input.classifier.data(), input.dim, 0.0F, logits_.data(), input.vocab);
    softmax(tokens, input.vocab, input.targets.data(), gradient, logits_.data(), losses_.data(),
            session_.stream());
    session_.download(host_losses_, losses_);
    double total = 0.0;
    for (const double loss : host_losses_) total += loss;
    return total / static_cast<double>(tokens);
  }

  Session& session_;
  Memory<float> logits_;   // [N, V]
  Memory<double> losses_;  // [N]
  std::vector<double> host_losses_;
};

}  // namespace

std::unique_ptr<Head> make_materialized_head(Session& session) {
  return std::make_unique<MaterializedHead>(session);
}

}  // namespace logitless::train::cuda
