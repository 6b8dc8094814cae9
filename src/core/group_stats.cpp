#include "core/group_stats.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/group_cut.h"
#include "core/status.h"
#include "core/targets.h"

namespace logitless {
namespace {

constexpr int64_t kTaskRows = 256;

// Calls body(number of the row, its index) for those that are exchanged as that dtype. argmax is an id below
// 2^40: a float64 holds it. In float32 the weighted sum is of the logits themselves.
template <class Body>
void for_numbers(const Problem& p, DType dtype, RowStats<double>& stats, const Body& body) {
  int64_t index = 0;
  body(stats.max, index++);
  if (p.want_argmax) {
    auto id = static_cast<double>(stats.argmax);
    body(id, index++);
    stats.argmax = static_cast<int64_t>(id);
  }
  const WantedSums sums = wanted_sums(p);
#define LOGITLESS_NUMBER(name, part, ...) \
  if (sums.name) body(stats.part, index++);
  LOGITLESS_ROW_SUMS(LOGITLESS_NUMBER)
#undef LOGITLESS_NUMBER
  if (sums.weighted_logit_sum && dtype == DType::kF64) body(stats.weight, index++);
}

int64_t statistics_of(const Problem& p, DType dtype) {
  int64_t count = 0;
  RowStats<double> any;
  for_numbers(p, dtype, any, [&](double&, int64_t) { ++count; });
  return count;
}

// One of kCutNumbers, each exact in a float64.
enum Cut : int64_t { kStart, kVocab, kTotal, kTargets };

double digest_of(const Problem& p, const void* targets) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < p.tokens * p.target_count(); ++i) {
    sum += mixed_target(load_as_int64(targets, p.target_dtype, i), i);
  }
  return static_cast<double>(sum >> 11);
}

// The numbers of all ranks: [ranks, numbers, rows], of the largest logits behind the statistics; and
// behind each rank's its cut.
struct Told {
  const Problem& p;
  std::span<double> numbers;
  int64_t rows = 0;
  int64_t statistics = statistics_of(p, DType::kF64);
  int64_t of_rank = group_numbers(p, DType::kF64);

  double& at(int64_t rank, int64_t number, int64_t row) const {
    return numbers[static_cast<size_t>(rank * (of_rank * rows + kCutNumbers) + number * rows + row)];
  }
  double& cut(int64_t rank, Cut number) const { return at(rank, of_rank, number); }
  double& logit(int64_t rank, int64_t i, int64_t row) const { return at(rank, statistics + 2 * i, row); }
  double& id(int64_t rank, int64_t i, int64_t row) const { return at(rank, statistics + 2 * i + 1, row); }
};

RowStats<double> merged(const Told& told, int64_t row, int64_t ranks) {
  RowStats<double> all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    RowStats<double> part;
    for_numbers(told.p, DType::kF64, part,
                [&](double& number, int64_t index) { number = told.at(rank, index, row); });
    all = merge(all, part);
  }
  return all;
}

template <class T>
void merge_top(const Told& told, int64_t row, int64_t ranks, std::span<TopLogit<T>> best) {
  int64_t count = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t i = 0; i < told.p.top_k && told.id(rank, i, row) >= 0; ++i) {
      const auto id = static_cast<int64_t>(told.id(rank, i, row));
      count = insert_top(best, count, {static_cast<T>(told.logit(rank, i, row)), id});
    }
  }
}

void check_same(const Told& told, int64_t ranks, Cut number, const std::string& argument, bool shows) {
  const auto text = [&](int64_t rank) {
    return std::to_string(static_cast<int64_t>(told.cut(rank, number)));
  };
  for (int64_t rank = 1; rank < ranks; ++rank) {
    if (told.cut(rank, number) == told.cut(0, number)) continue;
    const std::string other = shows ? text(rank) + " on rank " : "others on rank ";
    throw_invalid(
        argument, "the same on all ranks of the group",
        other + std::to_string(rank) + (shows ? " and " + text(0) + " on" : " than on") + " rank 0");
  }
}

// By the same error on every rank.
void check_cuts(const Told& told, int64_t ranks) {
  check_same(told, ranks, kTotal, "vocab_total", true);
  check_same(told, ranks, kTargets, "targets", false);
  std::vector<std::pair<int64_t, int64_t>> shards;
  std::string all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto start = static_cast<int64_t>(told.cut(rank, kStart));
    const auto end = start + static_cast<int64_t>(told.cut(rank, kVocab));
    if (end > start) shards.emplace_back(start, end);
    all += (rank > 0 ? ", [" : "[") + std::to_string(start) + ", " + std::to_string(end) + ")";
  }
  std::sort(shards.begin(), shards.end());
  int64_t reached = 0;
  bool follow = true;
  for (const auto& [start, end] : shards) {
    follow = follow && start == reached;
    reached = end;
  }
  const auto total = static_cast<int64_t>(told.cut(0, kTotal));
  if (follow && reached == total) return;
  throw_invalid("vocab_start",
                "shards that follow one another from 0 to vocab_total = " + std::to_string(total), all);
}

template <class T>
void join(const Problem& p, const Communicator& group, const ParallelFor& parallel_for, const void* targets,
          std::span<RowStats<double>> rows, std::span<TopLogit<T>> top, std::span<double> scratch) {
  if (group.size == 1) return;
  const auto count = static_cast<int64_t>(rows.size());
  const Told told{p, scratch, count};
  const auto top_of = [&](int64_t row) {
    return top.subspan(static_cast<size_t>(row * p.top_k), static_cast<size_t>(p.top_k));
  };
  for (int64_t row = 0; row < count; ++row) {
    for_numbers(p, DType::kF64, rows[static_cast<size_t>(row)],
                [&](double& number, int64_t index) { told.at(group.rank, index, row) = number; });
    for (int64_t i = 0; i < p.top_k; ++i) {
      const TopLogit<T>& mine = top_of(row)[static_cast<size_t>(i)];
      told.logit(group.rank, i, row) = mine.z;
      told.id(group.rank, i, row) = static_cast<double>(mine.id);
    }
  }
  told.cut(group.rank, kStart) = static_cast<double>(p.vocab_start);
  told.cut(group.rank, kVocab) = static_cast<double>(p.vocab);
  told.cut(group.rank, kTotal) = static_cast<double>(p.vocab_total);
  told.cut(group.rank, kTargets) = digest_of(p, targets);
  group.gather(scratch.data(), numbers_of_rank(p, DType::kF64, count), DType::kF64, nullptr);
  check_cuts(told, group.size);
  parallel_for((count + kTaskRows - 1) / kTaskRows, [&](int64_t task, int) {
    const int64_t end = std::min(count, (task + 1) * kTaskRows);
    for (int64_t row = task * kTaskRows; row < end; ++row) {
      rows[static_cast<size_t>(row)] = merged(told, row, group.size);
      if (p.top_k > 0) merge_top(told, row, group.size, top_of(row));
    }
  });
}

}  // namespace

int64_t group_numbers(const Problem& p, DType dtype) {
  return statistics_of(p, dtype) + 2 * p.top_k;
}

int64_t numbers_of_rank(const Problem& p, DType dtype, int64_t rows) {
  return group_numbers(p, dtype) * rows + kCutNumbers;
}

void count_gathers(const Problem& p, DType dtype, int64_t token_chunk, Plan* plan) {
  if (p.group_size < 2 || !p.needs_forward()) return;
  plan->gathers = (p.tokens + token_chunk - 1) / token_chunk;
  const int64_t numbers = group_numbers(p, dtype) * p.tokens + plan->gathers * kCutNumbers;
  plan->gathered_bytes = static_cast<uint64_t>(p.group_size * numbers) * size_of(dtype);
}

void join_over_group(const Problem& p, const Communicator& group, const ParallelFor& parallel_for,
                     const void* targets, std::span<RowStats<double>> rows, std::span<TopLogit<float>> top,
                     std::span<double> scratch) {
  join(p, group, parallel_for, targets, rows, top, scratch);
}

void join_over_group(const Problem& p, const Communicator& group, const ParallelFor& parallel_for,
                     const void* targets, std::span<RowStats<double>> rows, std::span<TopLogit<double>> top,
                     std::span<double> scratch) {
  join(p, group, parallel_for, targets, rows, top, scratch);
}

}  // namespace logitless
