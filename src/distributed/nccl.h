#pragma once
#include "core/communicator.h"

namespace logitless::distributed {

// The functions of libnccl.so.2 for the caller's ncclComm_t. The first call opens the library. Throws
// kBackendUnavailable if that fails, and kCommunicationFailed if the communicator is invalid.
Communicator nccl_communicator(void* comm);

}  // namespace logitless::distributed
