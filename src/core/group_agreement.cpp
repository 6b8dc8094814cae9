#include "core/group_agreement.h"

#include <span>
#include <string>

#include "core/group_cut.h"
#include "core/status.h"
#include "core/targets.h"

namespace logitless {
namespace {

double as_double(uint64_t digest) {
  return static_cast<double>(digest >> 11);
}

RankTold told_by(const Problem& p, const void* targets) {
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

std::string text(double number) {
  return std::to_string(static_cast<int64_t>(number));
}

// The first rank that tells another number than rank 0, or 0.
size_t other_rank(std::span<const RankTold> told, double RankTold::*number) {
  for (size_t rank = 1; rank < told.size(); ++rank) {
    if (told[rank].*number != told[0].*number) return rank;
  }
  return 0;
}

void check_total(std::span<const RankTold> told) {
  const size_t other = other_rank(told, &RankTold::total);
  if (other == 0) return;
  throw_invalid("vocab_total", "the same on all ranks of the group",
                text(told[other].total) + " on rank " + std::to_string(other) + " and " +
                    text(told[0].total) + " on rank 0");
}

void check_digest(std::span<const RankTold> told, double RankTold::*digest, const char* argument,
                  const char* expected) {
  const size_t other = other_rank(told, digest);
  if (other == 0) return;
  throw_invalid(argument, expected, "others on rank " + std::to_string(other) + " than on rank 0");
}

void check_cut(std::span<const RankTold> told) {
  const auto end = [](const RankTold& rank) { return static_cast<int64_t>(rank.start + rank.vocab); };
  uint64_t columns = 0;
  for (const RankTold& rank : told) columns += mixed_columns(static_cast<int64_t>(rank.start), end(rank));
  if (columns == mixed_columns(0, static_cast<int64_t>(told[0].total))) return;
  std::string all;
  for (const RankTold& rank : told) {
    all += (all.empty() ? "[" : ", [") + text(rank.start) + ", " + std::to_string(end(rank)) + ")";
  }
  throw_invalid("vocab_start",
                "shards that follow one another from 0 to vocab_total = " + text(told[0].total), all);
}

}  // namespace

void check_agreement(const Problem& p, const Communicator& group, const void* targets, Workspace workspace) {
  if (group.size == 1 || !p.needs_forward()) return;
  const std::span<RankTold> told = workspace.take<RankTold>(group.size);
  told[static_cast<size_t>(group.rank)] = told_by(p, targets);
  group.gather(told.data(), kToldNumbers, DType::kF64, nullptr);
  check_total(told);
  check_digest(told, &RankTold::targets, "targets", "the same on all ranks of the group");
  check_digest(told, &RankTold::rows, "ignore_index, shift",
               "the same rows to be ignored on all ranks of the group");
  check_cut(told);
}

}  // namespace logitless
