// The entry points of distributed.h.
#include "c_guard.h"
#include "c_structs.h"
#include "distributed/nccl.h"
#include "logitless/distributed.h"
#include "run.h"

using namespace logitless;

extern "C" {

void logitless_communicator_init_sized(logitless_communicator* communicator, size_t struct_size) {
  logitless_communicator defaults{};
  defaults.size = 1;
  init_struct(communicator, struct_size, defaults);
}

logitless_status logitless_run_group(const logitless_plan* plan, const logitless_buffers* buffers,
                                     void* workspace, size_t workspace_bytes, void* stream,
                                     const logitless_communicator* communicator) {
  return guarded([&] {
    const PlannedProblem& planned = required(plan, "plan")->planned;
    const Communicator group = to_communicator(complete(communicator));
    run(planned, to_buffers(complete(buffers)), workspace, workspace_bytes, stream, &group);
  });
}

logitless_status logitless_communicator_from_nccl(void* nccl_comm, logitless_communicator* communicator) {
  return guarded([&] {
    const logitless_communicator given = complete(communicator);
    const Communicator made = distributed::nccl_communicator(required(nccl_comm, "nccl_comm"));
    logitless_communicator out = given;
    out.rank = made.rank;
    out.size = made.size;
    out.host = made.host;
    out.all_gather = made.all_gather;
    out.all_reduce = made.all_reduce;
    out.reduce_scatter = made.reduce_scatter;
    out.struct_size = communicator->struct_size;
    std::memcpy(communicator, &out, out.struct_size);
  });
}

}  // extern "C"
