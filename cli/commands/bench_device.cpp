#include "commands/bench_device.h"

#include <algorithm>
#include <memory>
#include <new>
#include <span>

#include "commands/bench_data.h"
#include "commands/loss_options.h"
#include "device_memory.h"

namespace logitless::cli {
namespace {

constexpr size_t kPieceBytes = size_t{64} << 20;  // what of a matrix is in host memory at once
constexpr int kWarmUps = 2;

// A matrix of normal numbers on the device.
std::unique_ptr<DeviceMemory> make_matrix(const CudaDevice& device, int64_t count,
                                          const NormalNumbers& numbers, logitless_dtype dtype) {
  const auto size = static_cast<size_t>(dtype_bytes(dtype));
  auto memory = std::make_unique<DeviceMemory>(device, static_cast<size_t>(count) * size);
  std::vector<std::byte> piece(std::min(memory->size(), kPieceBytes));
  for (size_t done = 0; done < memory->size(); done += piece.size()) {
    const size_t bytes = std::min(piece.size(), memory->size() - done);
    for (size_t i = 0; i < bytes; i += size) numbers.write((done + i) / size, &piece[i]);
    device.upload(memory->data() + done, {piece.data(), bytes});
  }
  return memory;
}

class DeviceBench {
 public:
  DeviceBench(const Context& context, const BenchRequest& request, int ordinal)
      : context_(context), request_(request), device_(ordinal), timer_(device_) {
    const auto& [tokens, vocab, dim] = request.shape;
    hidden_ = make_matrix(device_, tokens * dim, bench_hidden(request.dtype), request.dtype);
    classifier_ =
        make_matrix(device_, vocab * dim, bench_classifier(request.shape, request.dtype), request.dtype);
    const std::vector<int32_t> ids = bench_targets(request.shape);
    targets_ = std::make_unique<DeviceMemory>(device_, ids.size() * sizeof(int32_t));
    device_.upload(targets_->data(), std::as_bytes(std::span(ids)));
    d_hidden_ = std::make_unique<DeviceMemory>(device_, hidden_->size());
    d_classifier_ = std::make_unique<DeviceMemory>(device_, classifier_->size());
    loss_ = std::make_unique<DeviceMemory>(device_, sizeof(float));
  }

  // One timed run; the first of a method warms up, too.
  void measure(BenchResult& result) {
    const Plan plan(context_, bench_problem(request_, result));
    const PlanInfo info = plan.info();
    if (!workspace_ || workspace_->size() < info.workspace_bytes) {
      workspace_.reset();
      workspace_ = std::make_unique<DeviceMemory>(device_, info.workspace_bytes);
    }
    for (int i = 0; result.seconds.empty() && i < kWarmUps; ++i) run(plan, result);
    run(plan, result);  // the device is busy while the next is queued
    timer_.start();
    run(plan, result);
    timer_.stop();
    result.seconds.push_back(timer_.seconds());
    float loss = 0;
    device_.download(std::as_writable_bytes(std::span(&loss, 1)), loss_->data());
    result.loss = static_cast<double>(loss);
    describe_plan(info, result);
  }

 private:
  void run(const Plan& plan, const BenchResult& result) {
    Buffers buffers;
    buffers.hidden = hidden_->data();
    buffers.classifier = classifier_->data();
    buffers.targets = targets_->data();
    buffers.loss = loss_->data();
    if (result.gradients) {
      buffers.d_hidden = d_hidden_->data();
      buffers.d_classifier = d_classifier_->data();
    }
    plan.run(buffers, {workspace_->data(), workspace_->size()}, device_.stream());
  }

  const Context& context_;
  const BenchRequest& request_;
  CudaDevice device_;
  DeviceTimer timer_;
  std::unique_ptr<DeviceMemory> hidden_, classifier_, targets_, d_hidden_, d_classifier_, loss_, workspace_;
};

}  // namespace

std::vector<BenchResult> run_device_bench(const GlobalOptions& globals, const BenchRequest& request,
                                          const DeviceChoice& device,
                                          const std::function<void(const std::string&)>& step) {
  const Context context = make_context(globals, {}, device);
  DeviceBench bench(context, request, device.ordinal);
  std::vector<BenchResult> results = bench_methods(request, false);
  for (int repeat = 0; repeat < request.repeats; ++repeat) {
    for (BenchResult& result : results) {
      if (!result.refusal.empty()) continue;
      try {
        bench.measure(result);
      } catch (const Error& error) {
        if (error.status() != LOGITLESS_BUDGET_TOO_SMALL) throw;
        result.refusal = error.what();
      } catch (const std::bad_alloc&) {
        result.refusal = "not enough memory on the device";
      }
      step(request.shape.text() + ", " + result.method);
    }
  }
  return results;
}

}  // namespace logitless::cli
