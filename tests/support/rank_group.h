#pragma once
#include <atomic>
#include <barrier>
#include <cstddef>
#include <deque>
#include <functional>
#include <logitless/distributed.hpp>
#include <optional>
#include <vector>

namespace logitless_test {

// Ranks that are threads of this process. Their communicator's functions copy memory: the host's, or one
// device's after waiting for it.
class RankGroup {
 public:
  RankGroup(int size, bool on_device);

  // Calls body(rank, its communicator) in a thread for each rank. Throws what one of them throws. A
  // collective fails where a rank whose body has ended does not join it.
  void run(const std::function<void(int, const logitless::Communicator&)>& body);
  int64_t calls() const { return calls_; }  // number of collectives by rank 0

 private:
  struct Member {
    RankGroup* group;
    int rank;
  };
  using Sent = std::vector<std::vector<std::byte>>;  // one for each rank
  // Waits until every rank has come, then writes to `receive` what result_of() makes of all that was sent.
  // Returns when all ranks have written. `host` is the rank's Member.
  static int32_t meet(void* host, const void* send, size_t bytes, void* receive, void* stream,
                      const std::function<std::vector<std::byte>(const Sent&, int rank)>& result_of);
  static int32_t all_gather(const void* send, void* receive, int64_t count, int32_t dtype, void* stream,
                            void* host);
  static int32_t all_reduce(void* data, int64_t count, int32_t dtype, void* stream, void* host);
  static int32_t reduce_scatter(const void* send, void* receive, int64_t count, int32_t dtype, void* stream,
                                void* host);

  const int size_;
  const bool on_device_;
  std::deque<Member> members_;
  Sent sent_;
  std::optional<std::barrier<>> barrier_;
  std::atomic<bool> ended_{false};  // whether some rank's body has ended
  std::atomic<int64_t> calls_{0};
};

}  // namespace logitless_test
