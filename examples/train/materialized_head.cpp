#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "train/gemm.h"
#include "train/head.h"
#include "train/row_exponentials.h"

namespace logitless::train {
namespace {

class MaterializedHead : public Head {
 public:
  std::string name() const override { return "materialized"; }

  std::string description() const override { return "fp32 logits in memory, " + gemm_library(); }

  double loss(const HeadInput& input) override {
    compute_logits(input);
    return softmax(input, false);
  }

  double loss_and_gradients(const HeadInput& input, std::span<float> d_hidden,
                            std::span<float> d_classifier) override {
    compute_logits(input);
    const double mean = softmax(input, true);
    const int64_t tokens = input.tokens();
    // d_hidden [N, D] = dz [N, V] * classifier [V, D]; d_classifier [V, D] = dz^T * hidden [N, D].
    gemm(Op::kNone, Op::kNone, tokens, input.dim, input.vocab, logits_.data(), input.vocab,
         input.classifier.data(), input.dim, 0.0F, d_hidden.data(), input.dim);
    gemm(Op::kTranspose, Op::kNone, input.vocab, input.dim, tokens, logits_.data(), input.vocab,
         input.hidden.data(), input.dim, 0.0F, d_classifier.data(), input.dim);
    return mean;
  }

  int64_t workspace_bytes() const override {
    return static_cast<int64_t>(logits_.capacity() * sizeof(float) + losses_.capacity() * sizeof(double));
  }

 private:
  void compute_logits(const HeadInput& input) {
    logits_.resize(static_cast<size_t>(input.tokens() * input.vocab));
    gemm(Op::kNone, Op::kTranspose, input.tokens(), input.vocab, input.dim, input.hidden.data(), input.dim,
         input.classifier.data(), input.dim, 0.0F, logits_.data(), input.vocab);
  }

  // The mean loss; with `gradient`, logits_ becomes dz = (softmax - onehot) / N.
  double softmax(const HeadInput& input, bool gradient) {
    const int64_t tokens = input.tokens();
    losses_.resize(static_cast<size_t>(tokens));
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < tokens; ++row) {
      float* z = logits_.data() + row * input.vocab;
      const int64_t target = input.targets[static_cast<size_t>(row)];
      const float target_logit = z[target];
      const float max = *std::max_element(z, z + input.vocab);
      const double sum = row_exponentials(z, input.vocab, max);
      losses_[static_cast<size_t>(row)] = std::log(sum) + static_cast<double>(max - target_logit);
      if (!gradient) continue;
      const auto scale = static_cast<float>(1.0 / (sum * static_cast<double>(tokens)));
      for (int64_t j = 0; j < input.vocab; ++j) z[j] *= scale;
      z[target] -= 1.0F / static_cast<float>(tokens);
    }
    double total = 0.0;
    for (double loss : losses_) total += loss;
    return total / static_cast<double>(tokens);
  }

  std::vector<float> logits_;   // [N, V]
  std::vector<double> losses_;  // [N]
};

}  // namespace

std::unique_ptr<Head> make_materialized_head() {
  return std::make_unique<MaterializedHead>();
}

}  // namespace logitless::train
