#include "core/communicator.h"

#include <string>

#include "core/status.h"

namespace logitless {
namespace {

void check(int status, const char* function) {
  if (status == 0) return;
  throw Error(Status::kCommunicationFailed, std::string("communicator.") + function +
                                                ": expected it to return 0, got " + std::to_string(status));
}

}  // namespace

void Communicator::gather(void* data, int64_t count, DType dtype, void* stream) const {
  if (size == 1 || count == 0) return;
  check(all_gather(part(data, rank, count, dtype), data, count, static_cast<int>(dtype), stream, host),
        "all_gather");
}

void Communicator::sum(void* data, int64_t count, DType dtype, void* stream) const {
  if (size == 1 || count == 0) return;
  check(all_reduce(data, count, static_cast<int>(dtype), stream, host), "all_reduce");
}

void Communicator::sum_own(void* data, int64_t count, DType dtype, void* stream) const {
  if (size == 1 || count == 0) return;
  check(reduce_scatter(data, part(data, rank, count, dtype), count, static_cast<int>(dtype), stream, host),
        "reduce_scatter");
}

}  // namespace logitless
