// Gradient descent on a CUDA device in C++: one plan and one workspace for all steps, everything on the
// caller's stream. A C program does it like loss_and_gradients.c, with a context of `options.device = 0`,
// memory of the device and a stream. The head's gradient comes in bf16. To keep this short, the host updates
// the weight, with copies there and back. Exits with 77 if there is no usable device.
#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <logitless/logitless.hpp>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int64_t kTokens = 128, kVocab = 512, kHidden = 64;
constexpr int kSteps = 5, kSkipped = 77;
constexpr float kLearningRate = 20;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
template <class T>
std::unique_ptr<T, Free> device_memory(int64_t count) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, static_cast<size_t>(count) * sizeof(T)));
  return std::unique_ptr<T, Free>(static_cast<T*>(memory));
}

float widen(logitless::bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
logitless::bf16 narrow(float value) {  // rounds to nearest, ties away from zero
  return {static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + 0x8000U) >> 16)};
}

std::vector<logitless::bf16> normal(int64_t count, float deviation, std::mt19937& random) {
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<logitless::bf16> out(static_cast<size_t>(count));
  for (logitless::bf16& value : out) value = narrow(distribution(random));
  return out;
}

template <class T>
void copy(T* to, std::span<const T> from, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from.data(), from.size_bytes(), cudaMemcpyDefault, stream));
  check_cuda(cudaStreamSynchronize(stream));
}

}  // namespace

int main() try {
  std::string why_not;
  const std::vector<logitless::DeviceInfo> devices = logitless::devices(&why_not);
  if (!devices.empty()) why_not = devices[0].why_unavailable;
  if (!why_not.empty()) {
    std::printf("skipped: no usable CUDA device: %s\n", why_not.c_str());
    return kSkipped;
  }
  check_cuda(cudaSetDevice(0));
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream));

  std::mt19937 random(1);
  const std::vector<logitless::bf16> host_hidden = normal(kTokens * kHidden, 1, random);
  std::vector<logitless::bf16> host_weight = normal(kVocab * kHidden, 0.1F, random);
  std::vector<int64_t> host_targets(kTokens);
  for (int64_t& target : host_targets) target = static_cast<int64_t>(random() % kVocab);

  const auto hidden = device_memory<logitless::bf16>(kTokens * kHidden);
  const auto weight = device_memory<logitless::bf16>(kVocab * kHidden);
  const auto d_weight = device_memory<logitless::bf16>(kVocab * kHidden);
  const auto targets = device_memory<int64_t>(kTokens);
  const auto device_loss = device_memory<float>(1);
  const auto device_invalid = device_memory<int64_t>(2);  // targets cannot be refused before a run
  copy<logitless::bf16>(hidden.get(), host_hidden, stream);
  copy<int64_t>(targets.get(), host_targets, stream);

  const logitless::Matrix<const logitless::bf16> e{hidden.get(), kTokens, kHidden};
  const logitless::Matrix<const logitless::bf16> c{weight.get(), kVocab, kHidden};
  logitless::Problem problem = logitless::make_problem(logitless::Pass::forward_backward, e, c);
  problem.has.d_weight = 1;
  logitless::ContextOptions options;
  options.device = 0;
  const logitless::Plan plan(logitless::Context(options), problem);
  const logitless::PlanInfo info = plan.info();
  const auto workspace = device_memory<std::byte>(static_cast<int64_t>(info.workspace_bytes));
  std::printf("%s: %s with %s (%s)\n", devices[0].name,
              logitless_plan_kind_name(static_cast<logitless_plan_kind>(info.kind)), info.engine,
              info.reason);

  logitless::Buffers buffers =
      logitless::make_buffers(e, c, std::span<const int64_t>(targets.get(), static_cast<size_t>(kTokens)));
  buffers.loss = device_loss.get();
  buffers.invalid_targets = device_invalid.get();
  buffers.d_weight = d_weight.get();
  std::vector<logitless::bf16> gradient(host_weight.size());
  float first = 0, loss = 0;
  int64_t invalid[2] = {};  // how many, and the first row with one
  for (int step = 0; step < kSteps; ++step) {
    copy<logitless::bf16>(weight.get(), host_weight, stream);
    plan.run(buffers, {workspace.get(), info.workspace_bytes}, stream);
    copy<float>(&loss, {device_loss.get(), 1}, stream);
    copy<logitless::bf16>(gradient.data(), {d_weight.get(), gradient.size()}, stream);
    std::printf("step %d: loss %.4f\n", step, static_cast<double>(loss));
    if (step == 0) first = loss;
    for (size_t i = 0; i < gradient.size(); ++i) {
      host_weight[i] = narrow(widen(host_weight[i]) - kLearningRate * widen(gradient[i]));
    }
  }
  copy<int64_t>(invalid, {device_invalid.get(), 2}, stream);
  check_cuda(cudaStreamDestroy(stream));
  return std::isfinite(loss) && loss < first && invalid[0] == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
