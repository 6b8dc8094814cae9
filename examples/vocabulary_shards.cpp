// A vocabulary cut into shards, as tensor parallelism cuts it: every worker holds some rows of the weight.
//
//   in turn:   Every worker computes the row statistics of its shard. They are merged, and give the loss.
//   Then
//              every worker gets the merged lse, and computes the gradient of its rows and its part of
//              d_hidden. Here the workers are a loop, and their messages are memory.
//   as ranks:  Every worker calls the library once, at the same time, with a communicator, and the library
//              does all of the above. Here ranks are threads, which exchange messages through shared memory.
//              On a cluster the communicator's functions are those of MPI or of a framework; with NCCL,
//              logitless::nccl_communicator() makes it.
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <logitless/distributed.hpp>
#include <span>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kTokens = 6, kVocab = 1000, kHidden = 16;
constexpr int kRanks = 3;
// Shards of any sizes; a rank may also have no rows.
constexpr int64_t kStarts[kRanks + 1] = {0, 700, 750, kVocab};

struct Head {
  std::vector<float> hidden = std::vector<float>(kTokens * kHidden),
                     weight = std::vector<float>(kVocab * kHidden);
  std::vector<int64_t> targets = {7, 450, -100, 999, 0, 333};  // global ids, the same for every worker

  Head() {
    for (size_t i = 0; i < hidden.size(); ++i)
      hidden[i] = static_cast<float>(std::sin(static_cast<double>(i)));
    for (size_t i = 0; i < weight.size(); ++i)
      weight[i] = static_cast<float>(std::cos(1.7 * static_cast<double>(i)));
  }
  logitless::Matrix<const float> e() const { return {hidden.data(), kTokens, kHidden}; }
  logitless::Matrix<const float> rows(int64_t start, int64_t stop) const {
    return {weight.data() + start * kHidden, stop - start, kHidden};
  }
  logitless::Buffers buffers(int64_t start, int64_t stop) const {
    return logitless::make_buffers(e(), rows(start, stop), std::span<const int64_t>(targets));
  }
};

struct Result {
  float loss = 0;
  std::vector<float> d_hidden = std::vector<float>(kTokens * kHidden),
                     d_weight = std::vector<float>(kVocab * kHidden);
};

Result of_the_whole_vocabulary(const Head& head) {
  logitless::Problem problem =
      logitless::make_problem(logitless::Pass::forward_backward, head.e(), head.rows(0, kVocab));
  problem.has.d_hidden = problem.has.d_weight = 1;
  Result result;
  logitless::Buffers buffers = head.buffers(0, kVocab);
  buffers.loss = &result.loss;
  buffers.d_hidden = result.d_hidden.data();
  buffers.d_weight = result.d_weight.data();
  logitless::run_once(logitless::Context(), problem, buffers);
  return result;
}

// The row statistics of one worker.
struct Stats {
  std::vector<float> max = std::vector<float>(kTokens), sum_exp = max, target_logit = max;
  void attach(logitless::Buffers* buffers) {
    buffers->max = max.data();
    buffers->sum_exp = sum_exp.data();
    buffers->target_logit = target_logit.data();
  }
};

// On a cluster two all-reduces replace the merge: one of max, and after logitless::rebase_row_stats to that
// maximum one of the sums.
Result in_turn(const Head& head) {
  const logitless::Context context;
  const auto problem_of = [&](logitless::Pass pass, int rank) {
    logitless::Problem problem =
        logitless::make_problem(pass, head.e(), head.rows(kStarts[rank], kStarts[rank + 1]));
    problem.vocab_start = kStarts[rank];
    problem.vocab_total = kVocab;
    return problem;
  };
  Stats stats[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    logitless::Buffers buffers = head.buffers(kStarts[rank], kStarts[rank + 1]);
    stats[rank].attach(&buffers);
    logitless::run_once(context, problem_of(logitless::Pass::forward, rank), buffers);
  }
  const logitless::Plan any_shard(context, problem_of(logitless::Pass::forward, 0));
  logitless::Buffers merged = head.buffers(kStarts[0], kStarts[1]);
  stats[0].attach(&merged);
  for (int rank = 1; rank < kRanks; ++rank) {
    logitless::Buffers from;
    stats[rank].attach(&from);
    logitless::merge_row_stats(any_shard, from, merged);
  }
  Result result;
  std::vector<float> lse(kTokens), lse_residual(kTokens);  // they add up to the log of the sum of exp logits
  merged.loss = &result.loss;
  merged.lse = lse.data();
  merged.lse_residual = lse_residual.data();
  logitless::loss_from_row_stats(any_shard, merged);

  for (int rank = 0; rank < kRanks; ++rank) {
    logitless::Problem problem = problem_of(logitless::Pass::backward, rank);
    problem.has.d_hidden = problem.has.d_weight = 1;
    problem.accumulate.d_hidden = 1;  // the sum over workers
    logitless::Buffers buffers = head.buffers(kStarts[rank], kStarts[rank + 1]);
    buffers.lse = lse.data();
    buffers.lse_residual = lse_residual.data();
    buffers.d_hidden = result.d_hidden.data();
    buffers.d_weight = result.d_weight.data() + kStarts[rank] * kHidden;  // the worker's own rows
    logitless::run_once(context, problem, buffers);
  }
  return result;
}

// The place where ranks leave their messages until all have read them.
struct Table {
  std::barrier<> everybody{kRanks};
  const void* sent[kRanks] = {};
};

struct Rank {
  Table* table;
  int rank;
};

int32_t all_gather(const void* send, void* receive, int64_t count, int32_t dtype, void*, void* host) {
  const auto& self = *static_cast<const Rank*>(host);
  const size_t bytes = static_cast<size_t>(count) * (dtype == LOGITLESS_F64 ? 8 : 4);
  self.table->sent[self.rank] = send;
  self.table->everybody.arrive_and_wait();
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == self.rank) continue;  // its own part is already there
    std::memcpy(static_cast<char*>(receive) + static_cast<size_t>(rank) * bytes, self.table->sent[rank],
                bytes);
  }
  self.table->everybody.arrive_and_wait();
  return 0;
}

// Adds float32 numbers in the order of ranks, so that all ranks get the same bits.
int32_t all_reduce(void* data, int64_t count, int32_t dtype, void*, void* host) {
  if (dtype != LOGITLESS_F32) return 1;
  const auto& self = *static_cast<const Rank*>(host);
  self.table->sent[self.rank] = data;
  self.table->everybody.arrive_and_wait();
  std::vector<float> sum(static_cast<size_t>(count), 0.0F);
  for (const void* part : self.table->sent) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<const float*>(part)[i];
  }
  self.table->everybody.arrive_and_wait();
  std::memcpy(data, sum.data(), sum.size() * sizeof(float));
  return 0;
}

// Returns the result of each rank: its own rows of d_weight, and all of the loss and d_hidden.
std::vector<Result> as_ranks(const Head& head) {
  std::vector<Result> results(kRanks);
  Table table;
  const auto work = [&](int rank) {
    const int64_t start = kStarts[rank], stop = kStarts[rank + 1];
    logitless::Problem problem =
        logitless::make_problem(logitless::Pass::forward_backward, head.e(), head.rows(start, stop));
    problem.has.d_hidden = problem.has.d_weight = 1;
    logitless::set_group(problem, kRanks, start, kVocab, /*largest=*/700);
    const logitless::Context context;
    const logitless::Plan plan(context, problem);
    const logitless::Workspace workspace(plan.info().workspace_bytes);

    Rank self{&table, rank};
    logitless::Communicator communicator;
    communicator.rank = rank;
    communicator.size = kRanks;
    communicator.host = &self;
    communicator.all_gather = all_gather;
    communicator.all_reduce = all_reduce;

    Result& mine = results[static_cast<size_t>(rank)];
    logitless::Buffers buffers = head.buffers(start, stop);
    buffers.loss = &mine.loss;
    buffers.d_hidden = mine.d_hidden.data();  // the sum over ranks, on each
    buffers.d_weight = mine.d_weight.data() + start * kHidden;
    logitless::run_group(plan, buffers, workspace.bytes(), communicator);
  };
  std::vector<std::thread> ranks;
  ranks.reserve(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(work, rank);
  for (std::thread& rank : ranks) rank.join();
  return results;
}

float difference(std::span<const float> a, std::span<const float> b) {
  float most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::fmax(most, std::fabs(a[i] - b[i]));
  return most;
}

}  // namespace

int main() try {
  const Head head;
  const Result whole = of_the_whole_vocabulary(head), turns = in_turn(head);
  const std::vector<Result> ranks = as_ranks(head);
  float most =
      std::fmax(difference(turns.d_hidden, whole.d_hidden), difference(turns.d_weight, whole.d_weight));
  bool same = true;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Result& result = ranks[static_cast<size_t>(rank)];
    const size_t start = static_cast<size_t>(kStarts[rank]) * kHidden;
    const size_t count = static_cast<size_t>(kStarts[rank + 1]) * kHidden - start;
    same = same && result.loss == ranks[0].loss;
    most = std::fmax(most, difference(result.d_hidden, whole.d_hidden));
    most = std::fmax(most, difference(std::span(result.d_weight).subspan(start, count),
                                      std::span(whole.d_weight).subspan(start, count)));
  }
  std::printf("loss of %d shards in turn %.6f, as ranks %.6f (%s on all), of the whole vocabulary %.6f\n",
              kRanks, static_cast<double>(turns.loss), static_cast<double>(ranks[0].loss),
              same ? "the same bits" : "not the same", static_cast<double>(whole.loss));
  std::printf("largest difference of a gradient: %.1e\n", static_cast<double>(most));
  const bool right =
      std::fabs(turns.loss - whole.loss) < 1e-5F && std::fabs(ranks[0].loss - whole.loss) < 1e-5F;
  return same && right && most < 1e-6F ? 0 : 1;
} catch (const logitless::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
