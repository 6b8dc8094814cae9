#pragma once
#include <cstddef>
#include <functional>
#include <logitless/logitless.hpp>
#include <memory>
#include <span>
#include <vector>

namespace logitless::cli {

// A CUDA device through its driver, opened at run time, so that this program starts on machines without one:
// memory, a stream and times on it. Made for one thread, on which the device stays current. Everything throws
// std::runtime_error with the driver's words; an allocation that does not fit throws std::bad_alloc.
class CudaDevice {
 public:
  explicit CudaDevice(int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  void* stream() const { return stream_; }  // a cudaStream_t

  // Memory aligned to 256 bytes, uninitialised, which is freed when the stream is empty and lives no longer
  // than the device.
  std::shared_ptr<std::byte> allocate(size_t bytes) const;
  // All in the order of the stream; the host's memory may be used again when these return.
  void upload(void* to, std::span<const std::byte> from) const;
  void download(std::span<std::byte> to, const void* from) const;
  void fill(void* to, size_t bytes, unsigned char value) const;
  // The device's own time of the work that `launch` puts on the stream; waits for it.
  double seconds_of(const std::function<void()>& launch) const;

 private:
  int device_ = 0;
  void* stream_ = nullptr;
};

// A tensor of a run in host memory; inputs are not written to. No data: there is no such tensor.
struct RunTensor {
  RunTensor(logitless_tensor_id tensor, std::span<const std::byte> bytes)
      : id(tensor), data(const_cast<std::byte*>(bytes.data()), bytes.size()) {}

  logitless_tensor_id id;
  std::span<std::byte> data;
};
using RunTensors = std::vector<RunTensor>;

const char* tensor_name(logitless_tensor_id id);
Buffers buffers_of(const RunTensors& tensors);

// Runs problems whose tensors are in host memory: there, or on a CUDA device through copies.
class Runner {
 public:
  // device: LOGITLESS_HOST_MEMORY or an ordinal, as the context's.
  Runner(const Context& context, int device);

  // Plans for these tensors, whose rows are tight, and runs. Outputs that the run leaves out are full of NaN
  // on a device. Memory is kept for the next run.
  PlanInfo run(const Problem& problem, RunTensors tensors);

  // run() in three steps. A caller may set buffers that place() made to null before prepare().
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
  Memory copies_, workspace_;  // where the run is
  std::unique_ptr<Plan> plan_;
};

}  // namespace logitless::cli
