// Handlers through which XLA runs plans; python/logitless/jax.py makes the calls.
//
// A call's attributes are arrays of int64. "problem" is the plan's: 1 for CUDA, else 0; the number of
// threads; the number of options, then id, integer and bits of the real number of each; the number of tensor
// descriptors, then id, dtype and accumulate of each. "tensors" has the ids of the arguments, then those of
// the results, and -1 for a result that is one of the arguments. The workspace is one more result, the last.
#include "api/xla_ffi.h"

#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/c_structs.h"
#include "api/run.h"
#include "core/status.h"
#include "logitless/xla.h"

namespace logitless::xla {
namespace {

using Numbers = std::span<const int64_t>;

XLA_FFI_Error* failed(const Api& api, Code code, const char* message) {
  ErrorArgs args{sizeof args, nullptr, message, code};
  return api.XLA_FFI_Error_Create(&args);
}

Code code_of(Status status) {
  switch (status) {
    case Status::kInvalidArgument:
    case Status::kInvalidTarget:
      return Code::kInvalidArgument;
    case Status::kBudgetTooSmall:
    case Status::kOutOfMemory:
      return Code::kResourceExhausted;
    case Status::kUnsupported:
      return Code::kUnimplemented;
    case Status::kBackendUnavailable:
      return Code::kFailedPrecondition;
    default:
      return Code::kInternal;
  }
}

// Returns the version of the layouts in xla_ffi.h: XLA's own where it is among those compared. Older XLAs
// take no other, and newer ones say which they still take.
Version version_for(const Version& theirs) {
  const bool known = theirs.major_version == kMajorVersion && theirs.minor_version >= kOldestMinorVersion &&
                     theirs.minor_version <= kNewestMinorVersion;
  return {sizeof(Version), nullptr, kMajorVersion, known ? theirs.minor_version : kNewestMinorVersion};
}

Numbers numbers(const Attrs& attrs, std::string_view name) {
  for (int64_t i = 0; i < attrs.size; ++i) {
    if (std::string_view(attrs.names[i]->ptr, attrs.names[i]->len) != name) continue;
    const auto& array = *static_cast<const Array*>(attrs.attrs[i]);
    if (attrs.types[i] != kArrayAttribute || array.dtype != kInt64) break;
    return {static_cast<const int64_t*>(array.data), array.size};
  }
  throw_invalid(std::string(name), "an attribute that is an array of int64, as logitless.jax gives", "none");
}

// Reads the numbers of a problem in their order.
class Reader {
 public:
  explicit Reader(Numbers numbers) : numbers_(numbers) {}
  int64_t next() {
    expect(place_ < numbers_.size(), "problem", "more numbers", std::to_string(numbers_.size()));
    return numbers_[place_++];
  }
  size_t count() {
    const int64_t count = next();
    expect(count >= 0 && static_cast<uint64_t>(count) <= numbers_.size() - place_, "problem",
           "a number of elements", std::to_string(count));
    return static_cast<size_t>(count);
  }

 private:
  Numbers numbers_;
  size_t place_ = 0;
};

PlannedProblem make_plan(Numbers problem, int device) {
  Reader reader(problem);
  const bool for_cuda = reader.next() != 0, on_cuda = device != LOGITLESS_HOST_MEMORY;
  expect(for_cuda == on_cuda, "platform",
         std::string(for_cuda ? "cuda" : "cpu") +
             ", which the call was traced for (logitless.jax has an argument)",
         on_cuda ? "cuda" : "cpu");
  logitless_context_options place;
  logitless_context_options_init(&place);
  place.threads = static_cast<int32_t>(reader.next());
  place.device = device;
  std::vector<logitless_option> options(reader.count());
  for (logitless_option& option : options) {
    option.id = static_cast<int32_t>(reader.next());
    option.integer = reader.next();
    option.real = std::bit_cast<double>(reader.next());
  }
  std::vector<logitless_tensor_desc> tensors(reader.count());
  for (logitless_tensor_desc& tensor : tensors) {
    tensor.id = static_cast<int32_t>(reader.next());
    tensor.dtype = static_cast<int32_t>(reader.next());
    tensor.accumulate = static_cast<int32_t>(reader.next());
  }
  return logitless::make_plan(to_context(place),
                              to_problem(options.data(), options.size(), tensors.data(), tensors.size()));
}

// Returns the plan of a problem on a device, which is made at the first call.
std::shared_ptr<const PlannedProblem> find_plan(Numbers problem, int device) {
  constexpr size_t kMostPlans = 1024;
  static std::mutex mutex;
  static std::map<std::vector<int64_t>, std::shared_ptr<const PlannedProblem>> plans;
  std::vector<int64_t> key(problem.begin(), problem.end());
  key.push_back(device);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = plans.find(key); found != plans.end()) return found->second;
  }
  auto made = std::make_shared<const PlannedProblem>(make_plan(problem, device));
  const std::lock_guard lock(mutex);
  if (plans.size() >= kMostPlans) plans.clear();
  return plans.emplace(std::move(key), std::move(made)).first->second;
}

void run(const CallFrame& frame, int device, void* stream) {
  const Numbers ids = numbers(frame.attrs, "tensors");
  const int64_t arguments = frame.args.size, results = frame.rets.size - 1;
  expect(results >= 0 && ids.size() == static_cast<size_t>(arguments + results), "tensors",
         std::to_string(arguments + results) + " ids", std::to_string(ids.size()));
  std::vector<logitless_tensor> tensors;
  for (int64_t i = 0; i < arguments + results; ++i) {
    const Buffer& buffer = i < arguments ? *frame.args.args[i] : *frame.rets.rets[i - arguments];
    const auto id = static_cast<int32_t>(ids[static_cast<size_t>(i)]);
    if (id >= 0) tensors.push_back({id, buffer.data, 0});
  }
  const Buffer& workspace = *frame.rets.rets[results];
  const auto plan = find_plan(numbers(frame.attrs, "problem"), device);
  logitless::run(*plan, to_buffers(tensors.data(), tensors.size()), workspace.data,
                 static_cast<size_t>(workspace.dims[0]), stream);
}

XLA_FFI_Error* handle(const CallFrame& frame, bool on_cuda) noexcept {
  const Api& api = *frame.api;
  if (frame.extension_start != nullptr && frame.extension_start->type == kMetadataExtension) {
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame.extension_start)->metadata;
    metadata.api_version = version_for(api.api_version);
    metadata.traits = 0;
    return nullptr;
  }
  if (frame.stage != kExecuteStage)
    return failed(api, Code::kInternal, "stage: expected execute, got another");
  OrdinalArgs ordinal{sizeof ordinal, nullptr, frame.ctx, LOGITLESS_HOST_MEMORY};
  StreamArgs stream{sizeof stream, nullptr, frame.ctx, nullptr};
  if (on_cuda) {
    if (XLA_FFI_Error* error = api.XLA_FFI_DeviceOrdinal_Get(&ordinal)) return error;
    if (XLA_FFI_Error* error = api.XLA_FFI_Stream_Get(&stream)) return error;
  }
  try {
    run(frame, ordinal.device_ordinal, stream.stream);
    return nullptr;
  } catch (const Error& error) {
    return failed(api, code_of(error.status()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(api, Code::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    return failed(api, Code::kInternal, error.what());
  }
}

}  // namespace
}  // namespace logitless::xla

XLA_FFI_Error* logitless_xla_cpu(XLA_FFI_CallFrame* call_frame) {
  return logitless::xla::handle(*reinterpret_cast<const logitless::xla::CallFrame*>(call_frame), false);
}

XLA_FFI_Error* logitless_xla_cuda(XLA_FFI_CallFrame* call_frame) {
  return logitless::xla::handle(*reinterpret_cast<const logitless::xla::CallFrame*>(call_frame), true);
}
