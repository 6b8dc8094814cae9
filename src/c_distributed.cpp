// The entry points of distributed.h.
#include "c_guard.h"
#include "c_structs.h"
#include "distributed/nccl.h"
#include "headroom/distributed.h"
#include "run.h"

using namespace headroom;

extern "C" {

void headroom_communicator_init_sized(headroom_communicator* communicator, size_t struct_size) {
  headroom_communicator defaults{};
  defaults.size = 1;
  init_struct(communicator, struct_size, defaults);
}

headroom_status headroom_run_group(const headroom_plan* plan, const headroom_buffers* buffers,
                                   void* workspace, size_t workspace_bytes, void* stream,
                                   const headroom_communicator* communicator) {
  return guarded([&] {
    const PlannedProblem& planned = required(plan, "plan")->planned;
    const Communicator group = to_communicator(complete(communicator));
    run(planned, to_buffers(complete(buffers)), workspace, workspace_bytes, stream, &group);
  });
}

headroom_status headroom_communicator_from_nccl(void* nccl_comm, headroom_communicator* communicator) {
  return guarded([&] {
    const headroom_communicator given = complete(communicator);
    const Communicator made = distributed::nccl_communicator(required(nccl_comm, "nccl_comm"));
    headroom_communicator out = given;
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
