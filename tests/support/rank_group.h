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

// Ranks that are threads of this process, with a communicator whose functions copy memory: the host's, or
// that of one device, which they wait for.
class RankGroup {
 public:
  RankGroup(int size, bool on_device);

  // body(rank, its communicator) in a thread for each rank. What one throws, this throws. Collectives that
  // a rank whose body has ended does not join fail.
  void run(const std::function<void(int, const logitless::Communicator&)>& body);
  int64_t calls() const { return calls_; }  // of collectives by rank 0

 private:
  struct Member {
    RankGroup* group;
    int rank;
  };
  using Sent = std::vector<std::vector<std::byte>>;  // of each rank
  // Once every rank has come, writes to `receive` what result_of() makes of all that was sent; returns when
  // all ranks have. host: the rank's Member.
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
  std::atomic<bool> ended_{false};  // some rank's body has
  std::atomic<int64_t> calls_{0};
};

}  // namespace logitless_test
