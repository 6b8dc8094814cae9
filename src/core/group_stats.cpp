#include "core/group_stats.h"

#include <algorithm>
#include <string>

#include "core/group_cut.h"
#include "core/status.h"
#include "core/targets.h"

namespace logitless {
namespace {

constexpr int64_t kTaskRows = 256;

// Calls body(number, index) for each of the row's numbers that ranks exchange in that dtype. argmax is an id
// below 2^40, which a float64 holds. In float32 the weighted sum is of the logits themselves.
template <class Body>
void for_numbers(const Problem& p, DType dtype, RowStats<double>& stats, const Body& body) {
  int64_t index = 0;
  body(stats.max, index++);
  if (p.has.argmax) {
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

int64_t statistics_count(const Problem& p, DType dtype) {
  int64_t count = 0;
  RowStats<double> any;
  for_numbers(p, dtype, any, [&](double&, int64_t) { ++count; });
  return count;
}

// The numbers of all ranks: [ranks, numbers, rows], first the statistics, then the largest logits.
struct Gathered {
  const Problem& p;
  std::span<double> numbers;
  int64_t rows = 0;
  int64_t statistics = statistics_count(p, DType::kF64);
  int64_t rank_numbers = group_numbers(p, DType::kF64);

  double& at(int64_t rank, int64_t number, int64_t row) const {
    return numbers[static_cast<size_t>((rank * rank_numbers + number) * rows + row)];
  }
  double& logit(int64_t rank, int64_t i, int64_t row) const { return at(rank, statistics + 2 * i, row); }
  double& id(int64_t rank, int64_t i, int64_t row) const { return at(rank, statistics + 2 * i + 1, row); }
};

RowStats<double> merged(const Gathered& gathered, int64_t row, int64_t ranks) {
  RowStats<double> all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    RowStats<double> part;
    for_numbers(gathered.p, DType::kF64, part,
                [&](double& number, int64_t index) { number = gathered.at(rank, index, row); });
    all = merge(all, part);
  }
  return all;
}

template <class T>
void merge_top(const Gathered& gathered, int64_t row, int64_t ranks, std::span<TopLogit<T>> best) {
  int64_t count = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t i = 0; i < gathered.p.top_k && gathered.id(rank, i, row) >= 0; ++i) {
      const auto id = static_cast<int64_t>(gathered.id(rank, i, row));
      count = insert_top(best, count, {static_cast<T>(gathered.logit(rank, i, row)), id});
    }
  }
}

template <class T>
void join(const Problem& p, const Communicator& group, const ParallelFor& parallel_for,
          std::span<RowStats<double>> rows, std::span<TopLogit<T>> top, std::span<double> scratch) {
  if (group.size == 1) return;
  const auto count = static_cast<int64_t>(rows.size());
  const Gathered gathered{p, scratch, count};
  const auto top_of = [&](int64_t row) {
    return top.subspan(static_cast<size_t>(row * p.top_k), static_cast<size_t>(p.top_k));
  };
  for (int64_t row = 0; row < count; ++row) {
    for_numbers(p, DType::kF64, rows[static_cast<size_t>(row)],
                [&](double& number, int64_t index) { gathered.at(group.rank, index, row) = number; });
    for (int64_t i = 0; i < p.top_k; ++i) {
      const TopLogit<T>& mine = top_of(row)[static_cast<size_t>(i)];
      gathered.logit(group.rank, i, row) = mine.z;
      gathered.id(group.rank, i, row) = static_cast<double>(mine.id);
    }
  }
  group.gather(scratch.data(), numbers_of_rank(p, DType::kF64, count), DType::kF64, nullptr);
  parallel_for((count + kTaskRows - 1) / kTaskRows, [&](int64_t task, int) {
    const int64_t end = std::min(count, (task + 1) * kTaskRows);
    for (int64_t row = task * kTaskRows; row < end; ++row) {
      rows[static_cast<size_t>(row)] = merged(gathered, row, group.size);
      if (p.top_k > 0) merge_top(gathered, row, group.size, top_of(row));
    }
  });
}

double as_double(uint64_t digest) {
  return static_cast<double>(digest >> 11);
}

RankSummary summary_of(const Problem& p, const void* targets) {
  uint64_t all = 0, rows = 0;
  for (int64_t i = 0; i < p.tokens * p.target_count(); ++i) {
    all += mixed_target(load_as_int64(targets, p.dtype.targets, i), i);
  }
  for (int64_t row = 0; row < p.tokens; ++row) {
    if (target_of_row(p, targets, row) != p.ignore_index) rows += mixed_target(0, row);
  }
  return {static_cast<double>(p.vocab_start), static_cast<double>(p.vocab),
          static_cast<double>(p.vocab_total), as_double(all), as_double(rows)};
}

std::string whole_text(double number) {
  return std::to_string(static_cast<int64_t>(number));
}

// Returns the first rank whose number differs from rank 0's, or 0 if there is none.
size_t other_rank(std::span<const RankSummary> summaries, double RankSummary::*number) {
  for (size_t rank = 1; rank < summaries.size(); ++rank) {
    if (summaries[rank].*number != summaries[0].*number) return rank;
  }
  return 0;
}

void check_total(std::span<const RankSummary> summaries) {
  const size_t other = other_rank(summaries, &RankSummary::total);
  if (other == 0) return;
  throw_invalid("vocab_total", "the same on all ranks of the group",
                whole_text(summaries[other].total) + " on rank " + std::to_string(other) + " and " +
                    whole_text(summaries[0].total) + " on rank 0");
}

void check_digest(std::span<const RankSummary> summaries, double RankSummary::*digest, const char* argument,
                  const char* expected) {
  const size_t other = other_rank(summaries, digest);
  if (other == 0) return;
  throw_invalid(argument, expected, "others on rank " + std::to_string(other) + " than on rank 0");
}

void check_cut(std::span<const RankSummary> summaries) {
  const auto end = [](const RankSummary& rank) { return static_cast<int64_t>(rank.start + rank.vocab); };
  uint64_t columns = 0;
  for (const RankSummary& rank : summaries)
    columns += mixed_columns(static_cast<int64_t>(rank.start), end(rank));
  if (columns == mixed_columns(0, static_cast<int64_t>(summaries[0].total))) return;
  std::string all;
  for (const RankSummary& rank : summaries) {
    all += (all.empty() ? "[" : ", [") + whole_text(rank.start) + ", " + std::to_string(end(rank)) + ")";
  }
  throw_invalid("vocab_start",
                "shards that follow one another from 0 to vocab_total = " + whole_text(summaries[0].total),
                all);
}

}  // namespace

int64_t group_numbers(const Problem& p, DType dtype) {
  return statistics_count(p, dtype) + 2 * p.top_k;
}

int64_t numbers_of_rank(const Problem& p, DType dtype, int64_t rows) {
  return group_numbers(p, dtype) * rows + (dtype == DType::kF64 ? 0 : kCutNumbers);
}

int64_t host_numbers(const Problem& p, int64_t rows) {
  return p.group_size * std::max(numbers_of_rank(p, DType::kF64, rows), kSummaryNumbers);
}

void count_gathers(const Problem& p, DType dtype, int64_t token_chunk, Plan* plan) {
  if (p.group_size < 2 || !p.needs_forward()) return;
  const bool on_host = dtype == DType::kF64;
  const int64_t chunks = (p.tokens + token_chunk - 1) / token_chunk;
  plan->gathers = chunks + (on_host ? 1 : 0);
  const int64_t numbers =
      group_numbers(p, dtype) * p.tokens + (on_host ? kSummaryNumbers : chunks * kCutNumbers);
  plan->gathered_bytes = static_cast<uint64_t>(p.group_size * numbers) * size_of(dtype);
}

void join_over_group(const Problem& p, const Communicator& group, const ParallelFor& parallel_for,
                     std::span<RowStats<double>> rows, std::span<TopLogit<float>> top,
                     std::span<double> scratch) {
  join(p, group, parallel_for, rows, top, scratch);
}

void join_over_group(const Problem& p, const Communicator& group, const ParallelFor& parallel_for,
                     std::span<RowStats<double>> rows, std::span<TopLogit<double>> top,
                     std::span<double> scratch) {
  join(p, group, parallel_for, rows, top, scratch);
}

void check_agreement(const Problem& p, const Communicator& group, const void* targets, Workspace workspace) {
  if (group.size == 1 || !p.needs_forward()) return;
  const std::span<RankSummary> summaries = workspace.take<RankSummary>(group.size);
  summaries[static_cast<size_t>(group.rank)] = summary_of(p, targets);
  group.gather(summaries.data(), kSummaryNumbers, DType::kF64, nullptr);
  check_total(summaries);
  check_digest(summaries, &RankSummary::targets, "targets", "the same on all ranks of the group");
  check_digest(summaries, &RankSummary::rows, "ignore_index, shift",
               "the same rows to be ignored on all ranks of the group");
  check_cut(summaries);
}

}  // namespace logitless
