#pragma once
#include "core/communicator.h"

namespace logitless::distributed {

// The functions of libnccl.so.2, which is opened by the first call, for an ncclComm_t of the caller. Throws
// kBackendUnavailable where it cannot be opened, and kCommunicationFailed where the communicator is none.
Communicator nccl_communicator(void* comm);

}  // namespace logitless::distributed
