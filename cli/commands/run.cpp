#include "commands/run.h"

#include <dlfcn.h>

#include <array>
#include <bit>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace logitless::cli {
namespace {

// The driver's types and the numbers that matter here, as in cuda.h.
using Address = unsigned long long;
using Handle = void*;
constexpr int kOutOfMemory = 2;
constexpr unsigned kNonBlocking = 1;

// Calls a function of the driver; the arguments have exactly its parameters' types. Returns its CUresult.
template <class... Arguments>
int call(const char* name, Arguments... arguments) {
  static void* const kLibrary = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (kLibrary == nullptr) throw std::runtime_error("there is no CUDA driver (libcuda.so.1) here");
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(kLibrary, name));
  if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver lacks ") + name);
  return function(arguments...);
}

// Calls a function of the driver and throws if it fails.
template <class... Arguments>
void must(const char* name, Arguments... arguments) {
  const int result = call(name, arguments...);
  if (result == 0) return;
  if (result == kOutOfMemory) throw std::bad_alloc();
  const char* text = nullptr;
  call("cuGetErrorString", result, &text);
  throw std::runtime_error(std::string("CUDA: ") + name + ": " +
                           (text != nullptr ? std::string(text) : "error " + std::to_string(result)));
}

Address address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

constexpr unsigned char kNan = 0xff;

size_t round_up(size_t bytes) {
  constexpr size_t kBoundary = 256;
  return (bytes + kBoundary - 1) / kBoundary * kBoundary;
}

struct TensorLine {
  const char* name;
  std::string_view role;
};
constexpr std::array<TensorLine, LOGITLESS_TENSOR_COUNT> kTensors{{
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, ...) {#name, #role},
#include <logitless/tensors.def>
}};

bool is_input(logitless_tensor_id id) {
  return kTensors[id].role == "INPUT" || kTensors[id].role == "UPSTREAM";
}

void set(Buffers& buffers, logitless_tensor_id id, void* data) {
  switch (id) {
#define LOGITLESS_TENSOR(name, NAME, element, ...) \
  case LOGITLESS_TENSOR_##NAME:                    \
    buffers.name = static_cast<element*>(data);    \
    break;
#include <logitless/tensors.def>
    case LOGITLESS_TENSOR_COUNT:
      break;
  }
}

}  // namespace

// The library's runtime works in the device's primary context, so this uses the same one.
CudaDevice::CudaDevice(int ordinal) {
  must("cuInit", 0U);
  must("cuDeviceGet", &device_, ordinal);
  Handle context = nullptr;
  must("cuDevicePrimaryCtxRetain", &context, device_);
  try {
    must("cuCtxSetCurrent", context);
    must("cuStreamCreate", &stream_, kNonBlocking);
  } catch (...) {
    call("cuDevicePrimaryCtxRelease_v2", device_);
    throw;
  }
}

CudaDevice::~CudaDevice() {
  call("cuStreamSynchronize", stream_);
  call("cuStreamDestroy_v2", stream_);
  call("cuDevicePrimaryCtxRelease_v2", device_);
}

std::shared_ptr<std::byte> CudaDevice::allocate(size_t bytes) const {
  if (bytes == 0) return nullptr;
  Address address = 0;
  must("cuMemAlloc_v2", &address, bytes);
  return {std::bit_cast<std::byte*>(address), [stream = stream_](std::byte* data) {
            call("cuStreamSynchronize", stream);
            call("cuMemFree_v2", address_of(data));
          }};
}

void CudaDevice::upload(void* to, std::span<const std::byte> from) const {
  if (from.empty()) return;
  must("cuMemcpyHtoDAsync_v2", address_of(to), static_cast<const void*>(from.data()), from.size(), stream_);
  must("cuStreamSynchronize", stream_);
}

void CudaDevice::download(std::span<std::byte> to, const void* from) const {
  if (to.empty()) return;
  must("cuMemcpyDtoHAsync_v2", static_cast<void*>(to.data()), address_of(from), to.size(), stream_);
  must("cuStreamSynchronize", stream_);
}

void CudaDevice::fill(void* to, size_t bytes, unsigned char value) const {
  if (bytes > 0) must("cuMemsetD8Async", address_of(to), value, bytes, stream_);
}

double CudaDevice::seconds_of(const std::function<void()>& launch) const {
  struct Event {
    Event() { must("cuEventCreate", &handle, 0U); }
    ~Event() { call("cuEventDestroy_v2", handle); }
    Handle handle = nullptr;
  } const start, stop;
  must("cuEventRecord", start.handle, stream_);
  launch();
  must("cuEventRecord", stop.handle, stream_);
  must("cuEventSynchronize", stop.handle);
  float milliseconds = 0;
  must("cuEventElapsedTime", &milliseconds, start.handle, stop.handle);
  return static_cast<double>(milliseconds) * 1e-3;
}

const char* tensor_name(logitless_tensor_id id) {
  return kTensors[id].name;
}

Buffers buffers_of(const RunTensors& tensors) {
  Buffers buffers;
  for (const RunTensor& tensor : tensors) set(buffers, tensor.id, tensor.data.data());
  return buffers;
}

Runner::Runner(const Context& context, int device) : context_(context) {
  if (device != LOGITLESS_HOST_MEMORY) device_ = std::make_unique<CudaDevice>(device);
}

PlanInfo Runner::run(const Problem& problem, RunTensors tensors) {
  place(std::move(tensors));
  PlanInfo info = prepare(problem);
  launch();
  fetch();
  return info;
}

// Makes room for at least so many bytes. Memory that is too small is freed before.
void Runner::reserve(Memory& memory, size_t bytes) const {
  if (memory.bytes >= bytes) return;
  memory = {};
  if (device_) {
    memory.data = device_->allocate(bytes);
  } else {
    const auto host = std::make_shared<Workspace>(bytes);
    memory.data = {host, host->bytes().data()};
  }
  memory.bytes = bytes;
}

Buffers& Runner::place(RunTensors tensors) {
  tensors_ = std::move(tensors);
  buffers_ = buffers_of(tensors_);
  if (!device_) return buffers_;
  size_t bytes = 0;
  for (const RunTensor& tensor : tensors_) bytes += round_up(tensor.data.size());
  reserve(copies_, bytes);
  std::byte* at = copies_.data.get();
  for (const RunTensor& tensor : tensors_) {
    if (tensor.data.data() == nullptr) continue;
    set(buffers_, tensor.id, at);
    if (is_input(tensor.id)) {
      device_->upload(at, tensor.data);
    } else {
      device_->fill(at, tensor.data.size(), kNan);
    }
    at += round_up(tensor.data.size());
  }
  return buffers_;
}

PlanInfo Runner::prepare(const Problem& problem) {
  plan_ = std::make_unique<Plan>(context_, problem, buffers_);
  PlanInfo info = plan_->info();
  reserve(workspace_, static_cast<size_t>(info.workspace_bytes));
  return info;
}

void Runner::launch() {
  plan_->run(buffers_, {workspace_.data.get(), workspace_.bytes}, device_ ? device_->stream() : nullptr);
}

void Runner::fetch() {
  if (!device_) return;
  const std::byte* at = copies_.data.get();
  for (const RunTensor& tensor : tensors_) {
    if (tensor.data.data() == nullptr) continue;
    if (!is_input(tensor.id)) device_->download(tensor.data, at);
    at += round_up(tensor.data.size());
  }
}

}  // namespace logitless::cli
