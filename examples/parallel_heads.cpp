// Parallel heads: every rank of a group holds some rows of the classifier, and one run of all ranks gives the
// loss of the whole vocabulary with all gradients.
//
// Here ranks are threads, and what they say to each other goes through memory that they share. On a cluster
// the three functions of the communicator are those of MPI or of a framework; with NCCL,
// logitless::nccl_communicator() makes it.
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

// Where ranks lay down what they send, until all have read it.
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
    if (rank == self.rank) continue;  // its part is in its place
    std::memcpy(static_cast<char*>(receive) + static_cast<size_t>(rank) * bytes, self.table->sent[rank],
                bytes);
  }
  self.table->everybody.arrive_and_wait();
  return 0;
}

// Of float32: the order of ranks is the order of the sum, so that all have the same bits.
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

// What one rank finds.
struct Found {
  float loss = 0;
  std::vector<float> d_hidden = std::vector<float>(kTokens * kHidden);
};

float difference(std::span<const float> a, std::span<const float> b) {
  float most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::fmax(most, std::fabs(a[i] - b[i]));
  return most;
}

}  // namespace

int main() try {
  std::vector<float> hidden(kTokens * kHidden), classifier(kVocab * kHidden);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>(std::sin(static_cast<double>(i)));
  for (size_t i = 0; i < classifier.size(); ++i)
    classifier[i] = static_cast<float>(std::cos(1.7 * static_cast<double>(i)));
  const std::vector<int64_t> targets = {7, 450, -100, 999, 0, 333};  // global ids, the same on every rank
  const logitless::Matrix<const float> e{hidden.data(), kTokens, kHidden};
  const std::span<const int64_t> y(targets);

  // Shards of any sizes: 700, 0 and 300 rows.
  const int64_t starts[kRanks + 1] = {0, 700, 700, kVocab};
  std::vector<float> d_classifier(classifier.size());
  std::vector<Found> found(kRanks);
  Table table;
  const auto work = [&](int rank) {
    const int64_t start = starts[rank], rows = starts[rank + 1] - start;
    const logitless::Matrix<const float> shard{classifier.data() + start * kHidden, rows, kHidden};
    logitless::Problem problem = logitless::make_problem(logitless::Pass::forward_backward, e, shard);
    problem.has.d_hidden = problem.has.d_classifier = 1;
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

    Found& mine = found[static_cast<size_t>(rank)];
    logitless::Buffers buffers = logitless::make_buffers(e, shard, y);
    buffers.loss = &mine.loss;
    buffers.d_hidden = mine.d_hidden.data();                       // the sum over ranks, on each
    buffers.d_classifier = d_classifier.data() + start * kHidden;  // the rank's own rows
    logitless::run_group(plan, buffers, workspace.bytes(), communicator);
  };
  std::vector<std::thread> ranks;
  ranks.reserve(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(work, rank);
  for (std::thread& rank : ranks) rank.join();

  // The same with the whole vocabulary at once.
  const logitless::Matrix<const float> all{classifier.data(), kVocab, kHidden};
  logitless::Problem problem = logitless::make_problem(logitless::Pass::forward_backward, e, all);
  problem.has.d_hidden = problem.has.d_classifier = 1;
  float loss = 0;
  std::vector<float> whole_d_classifier(classifier.size()), whole_d_hidden(hidden.size());
  logitless::Buffers buffers = logitless::make_buffers(e, all, y);
  buffers.loss = &loss;
  buffers.d_hidden = whole_d_hidden.data();
  buffers.d_classifier = whole_d_classifier.data();
  logitless::run_once(logitless::Context(), problem, buffers);

  bool same = true;
  float most = difference(d_classifier, whole_d_classifier);
  for (const Found& rank : found) {
    same = same && rank.loss == found[0].loss;
    most = std::fmax(most, difference(rank.d_hidden, whole_d_hidden));
  }
  std::printf("loss of %d ranks %.6f (%s on all of them), of the whole vocabulary %.6f\n", kRanks,
              static_cast<double>(found[0].loss), same ? "the same bits" : "not the same",
              static_cast<double>(loss));
  std::printf("largest difference of a gradient: %.1e\n", static_cast<double>(most));
  return same && std::fabs(found[0].loss - loss) < 1e-5F && most < 1e-6F ? 0 : 1;
} catch (const logitless::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
