// Parallel heads for C++20 over logitless/distributed.h, which has the contract. Header-only.
#pragma once

#include <logitless/distributed.h>

#include <logitless/logitless.hpp>
#include <span>

namespace logitless {
inline namespace v0_1 {

enum class GroupDHidden : int32_t {
  part = LOGITLESS_D_HIDDEN_PART,
  sum = LOGITLESS_D_HIDDEN_SUM,
  sum_of_own = LOGITLESS_D_HIDDEN_SUM_OF_OWN
};

struct Communicator : logitless_communicator {
  Communicator() noexcept { logitless_communicator_init(this); }
};

// Makes a communicator of NCCL. nccl_comm: an ncclComm_t, which the caller keeps.
inline Communicator nccl_communicator(void* nccl_comm) {
  Communicator made;
  check(logitless_communicator_from_nccl(nccl_comm, &made));
  return made;
}

// Makes the problem that of a rank's shard: the rows [start, start + problem.vocab) of `total`. `largest` is
// the number of rows of the group's largest shard.
inline void set_group(Problem& problem, int32_t size, int64_t start, int64_t total, int64_t largest,
                      GroupDHidden d_hidden = GroupDHidden::sum) {
  problem.group_size = size;
  problem.vocab_start = start;
  problem.vocab_total = total;
  problem.group_vocab = largest;
  problem.group_d_hidden = problem.has.d_hidden ? static_cast<int32_t>(d_hidden) : LOGITLESS_D_HIDDEN_PART;
}

// Runs the plan; every rank calls it at the same time. The workspace holds at least
// plan.info().workspace_bytes.
inline void run_group(const Plan& plan, const Buffers& buffers, std::span<std::byte> workspace,
                      const Communicator& communicator, void* stream = nullptr) {
  const auto tensors = buffers.tensors();
  check(logitless_run_group(plan.handle(), tensors.data(), tensors.size(), workspace.data(), workspace.size(),
                            stream, &communicator));
}

}  // namespace v0_1
}  // namespace logitless
