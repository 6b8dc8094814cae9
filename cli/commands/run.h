#pragma once
#include <logitless/logitless.hpp>
#include <memory>
#include <span>
#include <vector>

#include "device_memory.h"

namespace logitless::cli {

// A tensor of a run in host memory, and the pointer of the buffers that is it.
struct RunTensor {
  using SetPointer = void (*)(logitless::Buffers& buffers, std::byte* data);

  SetPointer set;
  std::byte* data;
  size_t bytes;
  bool is_output;
};

// The pointer of a field.
template <auto kField>
void set_pointer(logitless::Buffers& buffers, std::byte* data) {
  using Pointer = std::remove_reference_t<decltype(buffers.*kField)>;
  buffers.*kField = static_cast<Pointer>(static_cast<void*>(data));
}

class RunTensors {
 public:
  template <auto kField>
  void add_input(std::span<const std::byte> data) {
    if (data.data() != nullptr)
      list_.push_back({set_pointer<kField>, const_cast<std::byte*>(data.data()), data.size(), false});
  }
  void add_output(RunTensor::SetPointer set, std::span<std::byte> data) {
    if (data.data() != nullptr) list_.push_back({set, data.data(), data.size(), true});
  }
  const std::vector<RunTensor>& list() const { return list_; }

 private:
  std::vector<RunTensor> list_;
};

// Runs problems whose tensors are in host memory: there, or on a CUDA device through copies.
class Runner {
 public:
  // device: LOGITLESS_HOST_MEMORY or an ordinal, as the context's.
  Runner(const Context& context, int device);

  // Tight rows only. Outputs that the run leaves out are full of NaN on a device. A workspace is kept for the
  // next run.
  PlanInfo run(const Problem& problem, const RunTensors& tensors);

 private:
  void run_on_host(const Plan& plan, const RunTensors& tensors, size_t workspace_bytes);
  void run_on_device(const Plan& plan, const RunTensors& tensors, size_t workspace_bytes);

  const Context& context_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<CudaDevice> device_;    // null: on the host
  std::unique_ptr<DeviceMemory> memory_;  // copies and workspace
};

}  // namespace logitless::cli
