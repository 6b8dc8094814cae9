#include "core/group_stats.h"

#include <algorithm>

namespace headroom {
namespace {

constexpr int64_t kTaskRows = 256;

// Calls body(number of the row, its index) for those that are exchanged. argmax is an id below 2^40: a
// float64 holds it.
template <class Body>
void for_numbers(const Problem& p, RowStats<double>& stats, const Body& body) {
  int64_t index = 0;
  body(stats.max, index++);
  if (p.want_argmax) {
    auto id = static_cast<double>(stats.argmax);
    body(id, index++);
    stats.argmax = static_cast<int64_t>(id);
  }
  const WantedSums sums = wanted_sums(p);
#define HEADROOM_NUMBER(name, ...) \
  if (sums.name) body(stats.name, index++);
  HEADROOM_ROW_SUMS(HEADROOM_NUMBER)
#undef HEADROOM_NUMBER
}

}  // namespace

int64_t group_numbers(const Problem& p) {
  int64_t count = 0;
  RowStats<double> any;
  for_numbers(p, any, [&](double&, int64_t) { ++count; });
  return count;
}

void count_gathers(const Problem& p, DType dtype, int64_t token_chunk, Plan* plan) {
  if (!p.in_group() || !p.needs_forward()) return;
  plan->gathers = (p.tokens + token_chunk - 1) / token_chunk;
  plan->gathered_bytes = static_cast<uint64_t>(p.group_size * group_numbers(p) * p.tokens) * size_of(dtype);
}

void join_over_group(const Problem& p, const Communicator& group, const ParallelFor& parallel_for,
                     std::span<RowStats<double>> rows, std::span<double> scratch) {
  if (group.size == 1) return;
  const auto count = static_cast<int64_t>(rows.size());
  const int64_t numbers = group_numbers(p);
  const auto at = [&](int64_t rank, int64_t index, int64_t row) -> double& {
    return scratch[static_cast<size_t>((rank * numbers + index) * count + row)];
  };
  for (int64_t row = 0; row < count; ++row) {
    for_numbers(p, rows[static_cast<size_t>(row)],
                [&](double& number, int64_t index) { at(group.rank, index, row) = number; });
  }
  group.gather(scratch.data(), numbers * count, DType::kF64, nullptr);
  parallel_for((count + kTaskRows - 1) / kTaskRows, [&](int64_t task, int) {
    const int64_t end = std::min(count, (task + 1) * kTaskRows);
    for (int64_t row = task * kTaskRows; row < end; ++row) {
      RowStats<double> all;
      for (int64_t rank = 0; rank < group.size; ++rank) {
        RowStats<double> part;
        for_numbers(p, part, [&](double& number, int64_t index) { number = at(rank, index, row); });
        all = merge(all, part);
      }
      rows[static_cast<size_t>(row)] = all;
    }
  });
}

}  // namespace headroom
