#pragma once

// The head of the model: logits = hidden * classifier^T, softmax, mean cross entropy, and the gradients of
// hidden and classifier. Two ways to compute the same numbers: with the N x V logits in memory, and fused.

#include <logitless/logitless.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace logitless::train {

// All in the memory that the head works on.
struct HeadInput {
  std::span<const float> hidden;      // [N, D]
  std::span<const float> classifier;  // [V, D]
  std::span<const int32_t> targets;   // [N], values in [0, V)
  int64_t vocab;
  int64_t dim;
  int64_t tokens() const { return static_cast<int64_t>(targets.size()); }
};

// How the fused head makes its gradients; threshold and seed are those of thinned ones.
struct HeadGradient {
  Gradient kind = Gradient::exact;
  double threshold = 0x1p-10;
  int64_t seed = 0;
};

class Head {
 public:
  virtual ~Head() = default;
  Head() = default;
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;

  virtual std::string name() const = 0;
  // How it computes, for people; complete after the first call with gradients.
  virtual std::string description() const = 0;

  // Mean loss.
  virtual double loss(const HeadInput& input) = 0;

  // Mean loss; writes d_hidden [N, D] and d_classifier [V, D].
  virtual double loss_and_gradients(const HeadInput& input, std::span<float> d_hidden,
                                    std::span<float> d_classifier) = 0;

  // The most bytes this head has held beyond its inputs and the gradients.
  virtual int64_t workspace_bytes() const = 0;
};

// Stores the logits [N, V], turns them into their own gradient in place, and multiplies: three GEMMs and one
// N x V block of fp32. Frameworks hold two or three such blocks.
std::unique_ptr<Head> make_materialized_head();

// What the fused head computes: fp32, int32 targets, both gradients unless the pass is forward.
Problem head_problem(Pass pass, const Matrix<const float>& hidden, const Matrix<const float>& classifier,
                     size_t max_workspace_bytes, const HeadGradient& gradient);

// Throws Error, LOGITLESS_BUDGET_TOO_SMALL, when no plan of the fused head fits `max_workspace_bytes`.
void check_budget(const Context& context, int64_t tokens, int64_t vocab, int64_t dim,
                  int64_t max_workspace_bytes, const HeadGradient& gradient = {});

// The library through its public C++ interface, fp32, with a hard limit on the workspace. Thinned gradients
// are drawn anew in each call.
std::unique_ptr<Head> make_fused_head(Context context, int64_t max_workspace_bytes,
                                      const HeadGradient& gradient = {});

}  // namespace logitless::train
