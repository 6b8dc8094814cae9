#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace logitless {

// How ranks of a group exchange numbers: a host's functions, as in logitless_communicator. Each method throws
// kCommunicationFailed if the host's function fails.
struct Communicator {
  int rank = 0;
  int size = 1;
  void* host = nullptr;
  int (*all_gather)(const void* send, void* receive, int64_t count, int dtype, void* stream,
                    void* host) = nullptr;
  int (*all_reduce)(void* data, int64_t count, int dtype, void* stream, void* host) = nullptr;
  int (*reduce_scatter)(const void* send, void* receive, int64_t count, int dtype, void* stream,
                        void* host) = nullptr;

  // Gathers data [size, count], in which this rank has filled its own part.
  void gather(void* data, int64_t count, DType dtype, void* stream) const;
  void sum(void* data, int64_t count, DType dtype, void* stream) const;
  // Sums data [size, count] over ranks; only this rank's part becomes the sum.
  void sum_own(void* data, int64_t count, DType dtype, void* stream) const;

  // Returns a rank's part of [size, count].
  static void* part(void* data, int rank, int64_t count, DType dtype) {
    return static_cast<char*>(data) + int64_t{rank} * count * static_cast<int64_t>(size_of(dtype));
  }
};

}  // namespace logitless
