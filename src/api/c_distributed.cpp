// The entry points of distributed.h.
#include "api/c_guard.h"
#include "api/c_structs.h"
#include "api/run.h"
#include "distributed/nccl.h"
#include "logitless/distributed.h"

using namespace logitless;

extern "C" {

logitless_status logitless_run_group(const logitless_plan* plan, const logitless_tensor* tensors,
                                     size_t tensor_count, void* workspace, size_t workspace_bytes,
                                     void* stream, const logitless_communicator* communicator) {
  return guarded([&] {
    const PlannedProblem& planned = required(plan, "plan")->planned;
    const Communicator group = to_communicator(communicator);
    run(planned, to_buffers(tensors, tensor_count), workspace, workspace_bytes, stream, &group);
  });
}

logitless_status logitless_communicator_from_nccl(void* nccl_comm, logitless_communicator* communicator) {
  return guarded([&] {
    required(communicator, "communicator");
    const Communicator made = distributed::nccl_communicator(required(nccl_comm, "nccl_comm"));
    *communicator = {.rank = made.rank,
                     .size = made.size,
                     .host = made.host,
                     .all_gather = made.all_gather,
                     .all_reduce = made.all_reduce,
                     .reduce_scatter = made.reduce_scatter};
  });
}

}  // extern "C"
