#include "rank_group.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "device_memory.h"
#include "formats.h"

namespace logitless_test {
namespace {

// The sum over ranks of elements [first, first + count), in the order of ranks, rounded after each.
std::vector<std::byte> sum_of(const std::vector<std::vector<std::byte>>& sent, int64_t first, int64_t count,
                              logitless_dtype dtype) {
  std::vector<std::byte> sum(static_cast<size_t>(count) * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    double total = load(sent[0].data(), dtype, first + i);
    for (size_t rank = 1; rank < sent.size(); ++rank) {
      total = rounded(total + load(sent[rank].data(), dtype, first + i), dtype);
    }
    store(sum.data(), dtype, i, total);
  }
  return sum;
}

}  // namespace

RankGroup::RankGroup(int size, bool on_device)
    : size_(size), on_device_(on_device), sent_(static_cast<size_t>(size)) {
  for (int rank = 0; rank < size; ++rank) members_.push_back({this, rank});
}

void RankGroup::run(const std::function<void(int, const logitless::Communicator&)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size_));
  std::vector<std::thread> threads;
  barrier_.emplace(size_);
  ended_ = false;
  for (Member& member : members_) {
    threads.emplace_back([&, this] {
      logitless::Communicator communicator;
      communicator.rank = member.rank;
      communicator.size = size_;
      communicator.host = &member;
      communicator.all_gather = all_gather;
      communicator.all_reduce = all_reduce;
      communicator.reduce_scatter = reduce_scatter;
      try {
        body(member.rank, communicator);
      } catch (...) {
        errors[static_cast<size_t>(member.rank)] = std::current_exception();
      }
      ended_ = true;
      barrier_->arrive_and_drop();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

int32_t RankGroup::meet(void* host, const void* send, size_t bytes, void* receive, void* stream,
                        const std::function<std::vector<std::byte>(const Sent&, int rank)>& result_of) {
  const auto& [group, rank] = *static_cast<Member*>(host);
  const auto copy = [&, on_device = group->on_device_](void* to, const void* from, size_t size) {
    on_device ? copy_by_device(to, from, size, stream) : void(std::memcpy(to, from, size));
  };
  if (rank == 0) ++group->calls_;
  std::vector<std::byte>& mine = group->sent_[static_cast<size_t>(rank)];
  mine.resize(bytes);
  copy(mine.data(), send, bytes);
  group->barrier_->arrive_and_wait();
  const bool alike = !group->ended_ && std::ranges::all_of(group->sent_, [&](const auto& each) {
    return each.size() == bytes;
  });
  if (alike) {
    const std::vector<std::byte> result = result_of(group->sent_, rank);
    copy(receive, result.data(), result.size());
  }
  group->barrier_->arrive_and_wait();
  return alike ? 0 : 1;
}

int32_t RankGroup::all_gather(const void* send, void* receive, int64_t count, int32_t dtype, void* stream,
                              void* host) {
  const size_t bytes = static_cast<size_t>(count) * size_of(static_cast<logitless_dtype>(dtype));
  return meet(host, send, bytes, receive, stream, [](const Sent& sent, int) {
    std::vector<std::byte> all;
    for (const auto& each : sent) all.insert(all.end(), each.begin(), each.end());
    return all;
  });
}

int32_t RankGroup::all_reduce(void* data, int64_t count, int32_t dtype, void* stream, void* host) {
  const auto type = static_cast<logitless_dtype>(dtype);
  return meet(host, data, static_cast<size_t>(count) * size_of(type), data, stream,
              [&](const Sent& sent, int) { return sum_of(sent, 0, count, type); });
}

int32_t RankGroup::reduce_scatter(const void* send, void* receive, int64_t count, int32_t dtype, void* stream,
                                  void* host) {
  const auto type = static_cast<logitless_dtype>(dtype);
  const auto ranks = static_cast<Member*>(host)->group->sent_.size();
  return meet(host, send, static_cast<size_t>(count) * size_of(type) * ranks, receive, stream,
              [&](const Sent& sent, int rank) { return sum_of(sent, rank * count, count, type); });
}

}  // namespace logitless_test
