#include "rank_group.h"

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

int32_t RankGroup::meet(int rank, const void* send, size_t bytes, void* stream,
                        const std::function<void(const std::vector<std::vector<std::byte>>&)>& use) {
  if (rank == 0) ++calls_;
  std::vector<std::byte>& mine = sent_[static_cast<size_t>(rank)];
  mine.resize(bytes);
  if (on_device_) {
    copy_from_device(mine.data(), send, bytes, stream);
  } else {
    std::memcpy(mine.data(), send, bytes);
  }
  barrier_->arrive_and_wait();
  bool alike = !ended_;
  for (const auto& each : sent_) alike = alike && each.size() == bytes;
  if (alike) use(sent_);
  barrier_->arrive_and_wait();
  return alike ? 0 : 1;
}

void RankGroup::write(void* to, const void* from, size_t bytes, void* stream) const {
  if (on_device_) {
    copy_to_device(to, from, bytes, stream);
  } else {
    std::memcpy(to, from, bytes);
  }
}

int32_t RankGroup::all_gather(const void* send, void* receive, int64_t count, int32_t dtype, void* stream,
                              void* host) {
  const auto& member = *static_cast<Member*>(host);
  const size_t bytes = static_cast<size_t>(count) * size_of(static_cast<logitless_dtype>(dtype));
  return member.group->meet(member.rank, send, bytes, stream, [&](const auto& sent) {
    for (size_t rank = 0; rank < sent.size(); ++rank) {
      member.group->write(static_cast<std::byte*>(receive) + rank * bytes, sent[rank].data(), bytes, stream);
    }
  });
}

int32_t RankGroup::all_reduce(void* data, int64_t count, int32_t dtype, void* stream, void* host) {
  const auto& member = *static_cast<Member*>(host);
  const auto type = static_cast<logitless_dtype>(dtype);
  const size_t bytes = static_cast<size_t>(count) * size_of(type);
  return member.group->meet(member.rank, data, bytes, stream, [&](const auto& sent) {
    member.group->write(data, sum_of(sent, 0, count, type).data(), bytes, stream);
  });
}

int32_t RankGroup::reduce_scatter(const void* send, void* receive, int64_t count, int32_t dtype, void* stream,
                                  void* host) {
  const auto& member = *static_cast<Member*>(host);
  const auto type = static_cast<logitless_dtype>(dtype);
  const size_t bytes = static_cast<size_t>(count) * size_of(type);
  return member.group->meet(member.rank, send, bytes * member.group->sent_.size(), stream,
                            [&](const auto& sent) {
                              const auto sum = sum_of(sent, member.rank * count, count, type);
                              member.group->write(receive, sum.data(), bytes, stream);
                            });
}

}  // namespace logitless_test
