#include "commands/device_run.h"

#include <algorithm>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

#include "commands/loss_options.h"
#include "commands/loss_stats.h"

namespace logitless::cli {
namespace {

constexpr size_t kBoundary = 256;
constexpr unsigned char kNan = 0xff;

size_t round_up(size_t bytes) {
  return (bytes + kBoundary - 1) / kBoundary * kBoundary;
}

// A tensor of the host's and where in the device's memory its copy is.
struct Copy {
  const std::byte* input;  // null: an output
  std::byte* output;       // null: an input
  size_t bytes;
  size_t offset;
};

// All tensors of a run. `device` has the host's pointers; relocate() makes them the device's.
class Copies {
 public:
  Copies(const Problem& p, Buffers& device) {
    const int64_t total = p.vocab_total == 0 ? p.vocab : p.vocab_total;
    const int64_t losses = p.reduction == LOGITLESS_REDUCTION_NONE ? p.tokens : 1;
    const logitless_dtype stats = p.hidden_dtype == LOGITLESS_F64 ? LOGITLESS_F64 : LOGITLESS_F32;
    add(device.hidden, p.tokens * p.hidden, p.hidden_dtype);
    add(device.classifier, p.vocab * p.hidden, p.classifier_dtype);
    add(device.bias, p.vocab, p.bias_dtype);
    add(device.targets, p.tokens * std::max<int64_t>(p.targets_per_row, 1), p.target_dtype);
    add(device.target_weight, p.tokens * p.targets_per_row, stats);
    add(device.class_weight, total, stats);
    add(device.token_weight, p.tokens, stats);
    add(device.temperature, p.tokens, stats);
    add(device.loss, losses, stats);
    add(device.nll, p.tokens, stats);
    for (const LossStat& stat : kLossStats) {
      if (stat.field != nullptr) {
        add(device.*stat.field, p.tokens, stats);
      } else {
        add(device.*stat.flag, p.tokens, ElementType::kBool);
      }
    }
    add(device.argmax, p.tokens, LOGITLESS_I64);
    add(device.correct_count, 1, LOGITLESS_I64);
    add(device.top_ids, p.tokens * p.top_k, LOGITLESS_I64);
    add(device.top_log_probs, p.tokens * p.top_k, stats);
    add(device.target_log_probs, p.tokens * p.targets_per_row, stats);
    add(device.d_hidden, p.tokens * p.hidden, p.d_hidden_dtype);
    add(device.d_classifier, p.vocab * p.hidden, p.d_classifier_dtype);
    add(device.d_bias, p.vocab, p.d_bias_dtype);
  }

  size_t bytes() const { return bytes_; }
  const std::vector<Copy>& list() const { return list_; }
  void relocate(std::byte* memory) const {
    for (const auto& move : moves_) move(memory);
  }

 private:
  template <class P>
  void add(P*& field, int64_t count, int32_t dtype) {
    add(field, count, element_from_dtype(static_cast<logitless_dtype>(dtype)));
  }
  template <class P>
  void add(P*& field, int64_t count, ElementType element) {
    if (field == nullptr) return;
    const auto bytes = static_cast<size_t>(count * bits_of(element) / 8);
    Copy copy{nullptr, nullptr, bytes, bytes_};
    if constexpr (std::is_const_v<P>) {
      copy.input = static_cast<const std::byte*>(static_cast<const void*>(field));
    } else {
      copy.output = static_cast<std::byte*>(static_cast<void*>(field));
    }
    list_.push_back(copy);
    moves_.emplace_back([&field, offset = bytes_](std::byte* memory) {
      field = static_cast<P*>(static_cast<void*>(memory + offset));
    });
    bytes_ += round_up(bytes);
  }

  std::vector<Copy> list_;
  std::vector<std::function<void(std::byte*)>> moves_;
  size_t bytes_ = 0;
};

}  // namespace

Runner::Runner(const Context& context, int device) : context_(context) {
  if (device != LOGITLESS_HOST_MEMORY) device_ = std::make_unique<CudaDevice>(device);
}

PlanInfo Runner::run(const Problem& problem, const Buffers& host) {
  const Plan plan(context_, problem);
  return device_ ? run_on_device(plan, problem, host) : run_on_host(plan, host);
}

PlanInfo Runner::run_on_host(const Plan& plan, const Buffers& host) {
  const PlanInfo info = plan.info();
  if (!workspace_ || workspace_->bytes().size() < info.workspace_bytes) {
    workspace_.reset();
    workspace_ = std::make_unique<Workspace>(info.workspace_bytes);
  }
  plan.run(host, workspace_->bytes());
  return info;
}

PlanInfo Runner::run_on_device(const Plan& plan, const Problem& problem, const Buffers& host) {
  const PlanInfo info = plan.info();
  Buffers buffers = host;
  const Copies copies(problem, buffers);
  const size_t needed = copies.bytes() + info.workspace_bytes;
  if (!memory_ || memory_->size() < needed) {
    memory_.reset();
    memory_ = std::make_unique<DeviceMemory>(*device_, needed);
  }
  copies.relocate(memory_->data());
  for (const Copy& copy : copies.list()) {
    std::byte* at = memory_->data() + copy.offset;
    if (copy.output != nullptr) {
      device_->fill(at, copy.bytes, kNan);
    } else {
      device_->upload(at, {copy.input, copy.bytes});
    }
  }
  plan.run(buffers, {memory_->data() + copies.bytes(), info.workspace_bytes}, device_->stream());
  for (const Copy& copy : copies.list()) {
    if (copy.output != nullptr) device_->download({copy.output, copy.bytes}, memory_->data() + copy.offset);
  }
  device_->wait();
  return info;
}

}  // namespace logitless::cli
