#include "commands/run.h"

namespace logitless::cli {
namespace {

constexpr unsigned char kNan = 0xff;

size_t round_up(size_t bytes) {
  constexpr size_t kBoundary = 256;
  return (bytes + kBoundary - 1) / kBoundary * kBoundary;
}

}  // namespace

Runner::Runner(const Context& context, int device) : context_(context) {
  if (device != LOGITLESS_HOST_MEMORY) device_ = std::make_unique<CudaDevice>(device);
}

PlanInfo Runner::run(const Problem& problem, const RunTensors& tensors) {
  const Plan plan(context_, problem);
  PlanInfo info = plan.info();
  const auto bytes = static_cast<size_t>(info.workspace_bytes);
  device_ ? run_on_device(plan, tensors, bytes) : run_on_host(plan, tensors, bytes);
  return info;
}

void Runner::run_on_host(const Plan& plan, const RunTensors& tensors, size_t workspace_bytes) {
  if (!workspace_ || workspace_->bytes().size() < workspace_bytes) {
    workspace_.reset();
    workspace_ = std::make_unique<Workspace>(workspace_bytes);
  }
  Buffers buffers;
  for (const RunTensor& tensor : tensors.list()) tensor.set(buffers, tensor.data);
  plan.run(buffers, workspace_->bytes());
}

void Runner::run_on_device(const Plan& plan, const RunTensors& tensors, size_t workspace_bytes) {
  size_t needed = workspace_bytes;
  for (const RunTensor& tensor : tensors.list()) needed += round_up(tensor.bytes);
  if (!memory_ || memory_->size() < needed) {
    memory_.reset();
    memory_ = std::make_unique<DeviceMemory>(*device_, needed);
  }
  Buffers buffers;
  std::byte* at = memory_->data();
  for (const RunTensor& tensor : tensors.list()) {
    tensor.set(buffers, at);
    if (tensor.is_output) {
      device_->fill(at, tensor.bytes, kNan);
    } else {
      device_->upload(at, {tensor.data, tensor.bytes});
    }
    at += round_up(tensor.bytes);
  }
  plan.run(buffers, {at, workspace_bytes}, device_->stream());
  at = memory_->data();
  for (const RunTensor& tensor : tensors.list()) {
    if (tensor.is_output) device_->download({tensor.data, tensor.bytes}, at);
    at += round_up(tensor.bytes);
  }
  device_->wait();
}

}  // namespace logitless::cli
