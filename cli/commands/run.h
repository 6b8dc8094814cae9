#pragma once
#include <cstddef>
#include <functional>
#include <logitless/logitless.hpp>
#include <memory>
#include <span>
#include <vector>

namespace logitless::cli {

// A CUDA device through its driver: memory, a stream and times on it. The driver is opened at run time, so
// this program also starts on machines without one. An object belongs to one thread, on which the device
// stays current. Everything throws std::runtime_error with the driver's words; an allocation that does not
// fit throws std::bad_alloc.
class CudaDevice {
 public:
  explicit CudaDevice(int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  void* stream() const { return stream_; }  // a cudaStream_t

  // Returns uninitialised memory, aligned to 256 bytes. It is freed when the stream is empty, and must not
  // outlive the device.
  std::shared_ptr<std::byte> allocate(size_t bytes) const;
  // Copies and fills in the stream's order. Host memory may be used again when these return.
  void upload(void* to, std::span<const std::byte> from) const;
  void download(std::span<std::byte> to, const void* from) const;
  void fill(void* to, size_t bytes, unsigned char value) const;
  // Returns the device's own time for the work that `launch` puts on the stream, and waits for it.
  double seconds_of(const std::function<void()>& launch) const;

 private:
  int device_ = 0;
  void* stream_ = nullptr;
};

// A tensor of a run in host memory. Inputs are not written to. Without data there is no such tensor.
struct RunTensor {
  RunTensor(logitless_tensor_id tensor, std::span<const std::byte> bytes)
      : id(tensor), data(const_cast<std::byte*>(bytes.data()), bytes.size()) {}

  logitless_tensor_id id;
  std::span<std::byte> data;
};
using RunTensors = std::vector<RunTensor>;

const char* tensor_name(logitless_tensor_id id);
Buffers buffers_of(const RunTensors& tensors);

// Runs problems whose tensors are in host memory: on the host, or on a CUDA device through copies.
class Runner {
 public:
  // device: LOGITLESS_HOST_MEMORY or an ordinal, as in the context.
  Runner(const Context& context, int device);

  // Plans for these tensors, whose rows are tight, and runs. On a device, outputs that the run leaves out are
  // full of NaN. Memory is kept for the next run.
  PlanInfo run(const Problem& problem, RunTensors tensors);

  // The steps of run(). Before prepare(), a caller may set pointers in the buffers of place() to null.
  Buffers& place(RunTensors tensors);
  Buffers& buffers() { return buffers_; }
  PlanInfo prepare(const Problem& problem);
  void launch();
  void fetch();
  const CudaDevice* device() const { return device_.get(); }  // null: on the host

 private:
  struct Memory {
    std::shared_ptr<std::byte> data;
    size_t bytes = 0;
  };
  void reserve(Memory& memory, size_t bytes) const;

  const Context& context_;
  RunTensors tensors_;
  Buffers buffers_;
  std::unique_ptr<CudaDevice> device_;
  Memory copies_, workspace_;  // in the memory of the run
  std::unique_ptr<Plan> plan_;
};

}  // namespace logitless::cli
