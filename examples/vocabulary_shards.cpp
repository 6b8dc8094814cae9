// A vocabulary cut into shards, as tensor parallelism cuts it: each worker holds some rows of the classifier.
//
//   forward:  every worker computes the row statistics of its shard; they are merged; the loss follows from
//   them. backward: every worker gets the lse of all and computes its rows' gradient and its part of
//   d_hidden.
//
// Here the workers are a loop and their messages are memory. In a cluster the merge is an all-reduce: of max,
// then (after logitless::rebase_row_stats to that maximum) of the sums. parallel_heads.cpp has ranks that run
// at the same time, where the library does all that.
#include <cmath>
#include <cstdio>
#include <logitless/logitless.hpp>
#include <span>
#include <vector>

namespace {

constexpr int64_t kTokens = 6, kVocab = 1000, kHidden = 16, kWorkers = 3;

// The row statistics of one worker.
struct Stats {
  std::vector<float> max = std::vector<float>(kTokens), sum_exp = max, target_logit = max;
  void attach(logitless::Buffers* buffers) {
    buffers->max = max.data();
    buffers->sum_exp = sum_exp.data();
    buffers->target_logit = target_logit.data();
  }
};

// The rows [start, stop) of the vocabulary that a worker holds.
struct Shard {
  int64_t start, stop;
};
Shard shard_of(int64_t worker) {
  return {worker * kVocab / kWorkers, (worker + 1) * kVocab / kWorkers};
}

}  // namespace

int main() try {
  std::vector<float> hidden(kTokens * kHidden), classifier(kVocab * kHidden);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>(std::sin(static_cast<double>(i)));
  for (size_t i = 0; i < classifier.size(); ++i)
    classifier[i] = static_cast<float>(std::cos(1.7 * static_cast<double>(i)));
  const std::vector<int64_t> targets = {7, 450, -100, 999, 0, 333};  // global ids, for every worker the same

  const logitless::Context context;
  const logitless::Matrix<const float> e{hidden.data(), kTokens, kHidden};
  const auto rows_of = [&](Shard shard) {
    return logitless::Matrix<const float>{classifier.data() + shard.start * kHidden, shard.stop - shard.start,
                                          kHidden};
  };
  const auto problem_of = [&](logitless::Pass pass, Shard shard) {
    logitless::Problem problem = logitless::make_problem(pass, e, rows_of(shard));
    problem.vocab_start = shard.start;
    problem.vocab_total = kVocab;
    return problem;
  };
  const auto buffers_of = [&](Shard shard) {
    return logitless::make_buffers(e, rows_of(shard), std::span<const int64_t>(targets));
  };

  // Forward: statistics of each shard, merged into the first worker's.
  std::vector<Stats> stats(kWorkers);
  for (int64_t worker = 0; worker < kWorkers; ++worker) {
    const Shard shard = shard_of(worker);
    logitless::Buffers buffers = buffers_of(shard);
    stats[static_cast<size_t>(worker)].attach(&buffers);
    logitless::run_once(context, problem_of(logitless::Pass::forward, shard), buffers);
  }
  const logitless::Plan any_shard(context, problem_of(logitless::Pass::forward, shard_of(0)));
  logitless::Buffers merged = buffers_of(shard_of(0));
  stats[0].attach(&merged);
  for (size_t worker = 1; worker < kWorkers; ++worker) {
    logitless::Buffers from;
    stats[worker].attach(&from);
    logitless::merge_row_stats(any_shard, from, merged);
  }
  float loss = 0;
  std::vector<float> lse(kTokens), lse_low(kTokens);  // together the log of the sum of exps
  merged.loss = &loss;
  merged.lse = lse.data();
  merged.lse_low = lse_low.data();
  logitless::loss_from_row_stats(any_shard, merged);

  // Backward: each worker its own rows of d_classifier; d_hidden is a sum over workers.
  std::vector<float> d_classifier(classifier.size()), d_hidden(hidden.size());
  for (int64_t worker = 0; worker < kWorkers; ++worker) {
    const Shard shard = shard_of(worker);
    logitless::Problem problem = problem_of(logitless::Pass::backward, shard);
    problem.has.d_hidden = problem.has.d_classifier = 1;
    problem.accumulate.d_hidden = 1;  // the sum
    logitless::Buffers buffers = buffers_of(shard);
    buffers.lse = lse.data();
    buffers.lse_low = lse_low.data();
    buffers.d_hidden = d_hidden.data();
    buffers.d_classifier = d_classifier.data() + shard.start * kHidden;
    logitless::run_once(context, problem, buffers);
  }

  // The same with the whole vocabulary at once.
  const Shard whole{0, kVocab};
  logitless::Problem problem = problem_of(logitless::Pass::forward_backward, whole);
  problem.has.d_hidden = problem.has.d_classifier = 1;
  float whole_loss = 0;
  std::vector<float> whole_d_classifier(classifier.size()), whole_d_hidden(hidden.size());
  logitless::Buffers buffers = buffers_of(whole);
  buffers.loss = &whole_loss;
  buffers.d_hidden = whole_d_hidden.data();
  buffers.d_classifier = whole_d_classifier.data();
  logitless::run_once(context, problem, buffers);

  float difference = 0;
  for (size_t i = 0; i < d_hidden.size(); ++i)
    difference = std::fmax(difference, std::fabs(d_hidden[i] - whole_d_hidden[i]));
  for (size_t i = 0; i < d_classifier.size(); ++i) {
    difference = std::fmax(difference, std::fabs(d_classifier[i] - whole_d_classifier[i]));
  }
  std::printf("loss of %d shards %.6f, of the whole vocabulary %.6f\n", static_cast<int>(kWorkers),
              static_cast<double>(loss), static_cast<double>(whole_loss));
  std::printf("largest difference of a gradient: %.1e\n", static_cast<double>(difference));
  return std::fabs(loss - whole_loss) < 1e-5F && difference < 1e-6F ? 0 : 1;
} catch (const logitless::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
