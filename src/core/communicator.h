#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace logitless {

// What the ranks of a group exchange numbers by: a host's functions, as logitless_communicator has them. Each
// throws kCommunicationFailed where the host's function fails.
struct Communicator {
  int rank = 0;
  int size = 1;
  void* host = nullptr;
  int (*all_gather)(const void* send, void* receive, int64_t count, int dtype, void* stream,
                    void* host) = nullptr;
  int (*all_reduce)(void* data, int64_t count, int dtype, void* stream, void* host) = nullptr;
  int (*reduce_scatter)(const void* send, void* receive, int64_t count, int dtype, void* stream,
                        void* host) = nullptr;

  // data: [size, count], of which this rank's part is there.
  void gather(void* data, int64_t count, DType dtype, void* stream) const;
  void sum(void* data, int64_t count, DType dtype, void* stream) const;
  // data: [size, count], of which this rank's part becomes the sum.
  void sum_own(void* data, int64_t count, DType dtype, void* stream) const;

  // A rank's part of [size, count].
  static void* part(void* data, int rank, int64_t count, DType dtype) {
    return static_cast<char*>(data) + int64_t{rank} * count * static_cast<int64_t>(size_of(dtype));
  }
};

}  // namespace logitless
