#include "distributed/nccl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <iterator>
#include <string>

#include "core/status.h"

namespace logitless::distributed {
namespace {

// NCCL 2's stable ABI: results, data types and operations are enumerations, streams and communicators are
// pointers.
constexpr int kSuccess = 0;
constexpr int kSumOperation = 0;

int data_type_of(int dtype) {
  static constexpr int kTypes[] = {7, 9, 6, 8, 2, 4};                    // in the order of DType
  return dtype >= 0 && dtype < std::ssize(kTypes) ? kTypes[dtype] : -1;  // which NCCL refuses
}

struct Functions {
  int (*all_gather)(const void*, void*, size_t, int, void*, void*) = nullptr;
  int (*all_reduce)(const void*, void*, size_t, int, int, void*, void*) = nullptr;
  int (*reduce_scatter)(const void*, void*, size_t, int, int, void*, void*) = nullptr;
  int (*user_rank)(void*, int*) = nullptr;
  int (*count)(void*, int*) = nullptr;
};

template <class F>
void load(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  if (*function == nullptr) {
    throw Error(Status::kBackendUnavailable, std::string("NCCL: its library has no function ") + name);
  }
}

// It stays open, because the caller's communicator belongs to this library.
Functions opened() {
  const char* given = std::getenv("LOGITLESS_NCCL_LIBRARY");
  const char* name = given != nullptr ? given : "libnccl.so.2";
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(Status::kBackendUnavailable, std::string("NCCL: cannot open ") + name + ": " + dlerror());
  }
  Functions f;
  load(library, "ncclAllGather", &f.all_gather);
  load(library, "ncclAllReduce", &f.all_reduce);
  load(library, "ncclReduceScatter", &f.reduce_scatter);
  load(library, "ncclCommUserRank", &f.user_rank);
  load(library, "ncclCommCount", &f.count);
  return f;
}

const Functions& functions() {
  static const Functions kFunctions = opened();
  return kFunctions;
}

int all_gather(const void* send, void* receive, int64_t count, int dtype, void* stream, void* comm) {
  return functions().all_gather(send, receive, static_cast<size_t>(count), data_type_of(dtype), comm, stream);
}

int all_reduce(void* data, int64_t count, int dtype, void* stream, void* comm) {
  return functions().all_reduce(data, data, static_cast<size_t>(count), data_type_of(dtype), kSumOperation,
                                comm, stream);
}

int reduce_scatter(const void* send, void* receive, int64_t count, int dtype, void* stream, void* comm) {
  return functions().reduce_scatter(send, receive, static_cast<size_t>(count), data_type_of(dtype),
                                    kSumOperation, comm, stream);
}

void check(int result, const char* function) {
  if (result == kSuccess) return;
  throw Error(Status::kCommunicationFailed,
              std::string(function) + ": expected ncclSuccess, got result " + std::to_string(result));
}

}  // namespace

Communicator nccl_communicator(void* comm) {
  const Functions& f = functions();
  Communicator made;
  check(f.user_rank(comm, &made.rank), "ncclCommUserRank");
  check(f.count(comm, &made.size), "ncclCommCount");
  made.host = comm;
  made.all_gather = all_gather;
  made.all_reduce = all_reduce;
  made.reduce_scatter = reduce_scatter;
  return made;
}

}  // namespace logitless::distributed
