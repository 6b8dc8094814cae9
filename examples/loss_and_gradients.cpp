// Loss and gradients in C++: lists the plans and runs the fastest one within a memory budget.
#include <cmath>
#include <cstdio>
#include <logitless/logitless.hpp>
#include <random>
#include <span>
#include <vector>

namespace {

constexpr int64_t kTokens = 512, kVocab = 8192, kHidden = 64;

std::vector<float> normal(int64_t count, float deviation, std::mt19937& random) {
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = distribution(random);
  return out;
}

float norm(std::span<const float> values) {
  double sum = 0;
  for (float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return static_cast<float>(std::sqrt(sum));
}

}  // namespace

int main() try {
  std::mt19937 random(1);
  const std::vector<float> hidden = normal(kTokens * kHidden, 1, random);      // [N, D]
  const std::vector<float> weight = normal(kVocab * kHidden, 0.125F, random);  // [V, D]
  std::vector<int64_t> targets(kTokens);                                       // [N]
  for (int64_t& target : targets) target = static_cast<int64_t>(random() % kVocab);
  const logitless::Matrix<const float> e{hidden.data(), kTokens, kHidden};
  const logitless::Matrix<const float> c{weight.data(), kVocab, kHidden};

  logitless::Problem problem = logitless::make_problem(logitless::Pass::forward_backward, e, c);
  problem.has.d_hidden = problem.has.d_weight = 1;
  problem.label_smoothing = 0.1;
  problem.softcap = 30;

  const logitless::Context context;
  std::printf("the logits would be %.1f MB; plans:\n", kTokens * kVocab * 4e-6);
  for (const logitless::PlanInfo& plan : context.plans(problem)) {
    std::printf("  %-13s %8.2f MB, cost %.1f of a matrix product\n",
                logitless_plan_kind_name(static_cast<logitless_plan_kind>(plan.kind)),
                static_cast<double>(plan.workspace_bytes) * 1e-6, plan.cost_matmuls);
  }

  problem.max_workspace_bytes = 4 << 20;
  const logitless::Plan plan(context, problem);  // throws if nothing fits
  const logitless::Workspace workspace(plan.info().workspace_bytes);

  float loss = 0;
  std::vector<float> nll(kTokens), d_hidden(hidden.size()), d_weight(weight.size());
  logitless::Buffers buffers = logitless::make_buffers(e, c, std::span<const int64_t>(targets));
  buffers.loss = &loss;
  buffers.nll = nll.data();
  buffers.d_hidden = d_hidden.data();
  buffers.d_weight = d_weight.data();
  plan.run(buffers, workspace.bytes());

  std::printf("with 4 MB: %s on %s\n",
              logitless_plan_kind_name(static_cast<logitless_plan_kind>(plan.info().kind)),
              plan.info().backend);
  std::printf("loss %.4f, first token's log probability %.4f, |d_hidden| %.5f, |d_weight| %.5f\n",
              static_cast<double>(loss), static_cast<double>(-nll[0]), static_cast<double>(norm(d_hidden)),
              static_cast<double>(norm(d_weight)));
  return std::isfinite(loss) ? 0 : 1;
} catch (const logitless::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
