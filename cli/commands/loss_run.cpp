#include "commands/loss_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "commands/context.h"
#include "commands/device_run.h"
#include "support/format.h"
#include "support/progress.h"

namespace logitless::cli {
namespace {

constexpr double kChunkSeconds = 1;
// Each run reads the whole classifier; with this many tokens that costs little beside the arithmetic.
constexpr int64_t kMinChunkTokens = 1024;
constexpr double kAnnouncedSeconds = 3;

Problem make_problem(const LossInputs& in, const LossRequest& request, int64_t tokens) {
  Problem problem;
  problem.tokens = tokens;
  problem.vocab = in.vocab;
  problem.hidden = in.dim;
  problem.hidden_dtype = dtype_from_element(in.hidden.dtype);
  problem.classifier_dtype = dtype_from_element(in.classifier.dtype);
  problem.has_bias = in.bias.owner != nullptr;
  if (problem.has_bias) problem.bias_dtype = dtype_from_element(in.bias.dtype);
  problem.has_class_weight = !in.class_weight.empty();
  problem.has_token_weight = !in.token_weight.empty();
  problem.has_temperature = !in.token_temperature.empty();
  problem.ignore_index = request.ignore_index;
  problem.reduction = LOGITLESS_REDUCTION_NONE;
  problem.want_argmax = 1;
  for_each_stat(request.stats, [&](const LossStat& stat, size_t) {
    if (stat.want != nullptr) problem.*stat.want = 1;
  });
  problem.top_k = request.top_k;
  problem.targets_per_row = in.targets_per_token;
  apply(request.loss, problem);
  apply(request.thinning, problem);
  return problem;
}

template <class T>
T* at(std::vector<T>& values, int64_t offset) {
  return values.empty() ? nullptr : values.data() + offset;
}
template <class T>
const T* at(const std::vector<T>& values, int64_t offset) {
  return values.empty() ? nullptr : values.data() + offset;
}

// Inputs and outputs of the tokens from `first` on.
Buffers make_buffers(const LossInputs& in, LossResult& out, int64_t top_k, int64_t first, int64_t* correct) {
  const int64_t stats = dtype_bytes(in.stats_dtype);
  Buffers buffers;
  buffers.hidden = in.hidden.data.data() + first * in.dim * (bits_of(in.hidden.dtype) / 8);
  buffers.classifier = in.classifier.data.data();
  buffers.bias = in.bias.data.data();
  buffers.targets = at(in.targets, first * in.target_count());
  buffers.target_weight = at(in.target_weight, first * in.targets_per_token * stats);
  buffers.class_weight = at(in.class_weight, 0);
  buffers.token_weight = at(in.token_weight, first * stats);
  buffers.temperature = at(in.token_temperature, first * stats);
  buffers.loss = at(out.token_loss, first * stats);
  buffers.nll = at(out.nll, first * stats);
  for (size_t i = 0; i < kLossStats.size(); ++i) {
    const LossStat& stat = kLossStats[i];
    std::byte* values = at(out.stats[i].values, first * bits_of(element_of(stat, in.stats_dtype)) / 8);
    if (stat.field != nullptr) {
      buffers.*stat.field = values;
    } else {
      buffers.*stat.flag = reinterpret_cast<uint8_t*>(values);
    }
  }
  buffers.argmax = at(out.argmax, first);
  buffers.top_ids = at(out.top_ids, first * top_k);
  buffers.top_log_probs = at(out.top_log_probs, first * top_k * stats);
  buffers.target_log_probs = at(out.target_log_probs, first * in.targets_per_token * stats);
  if (in.targets_per_token == 0) buffers.correct_count = correct;
  return buffers;
}

// Tokens of one run: all, or as many as take about a second.
int64_t chunk_size(const Context& context, const LossInputs& in, const LossRequest& request) {
  const double seconds = Plan(context, make_problem(in, request, in.tokens)).info().predicted_seconds;
  const double chunks = std::max(1.0, std::ceil(seconds / kChunkSeconds));
  const auto tokens = static_cast<int64_t>(std::ceil(static_cast<double>(in.tokens) / chunks));
  return std::clamp<int64_t>(tokens, std::min(kMinChunkTokens, in.tokens), in.tokens);
}

double sum_of(const LossInputs& in, const std::vector<std::byte>& values, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += stats_at(values, in.stats_dtype, i);
  return sum;
}

void run_chunks(const Context& context, Runner& runner, const GlobalOptions& globals, const LossInputs& in,
                const LossRequest& request, LossResult& out) {
  out.token_loss.resize(static_cast<size_t>(in.tokens * dtype_bytes(in.stats_dtype)));
  out.chunk_tokens = chunk_size(context, in, request);
  Progress progress(globals.quiet, "loss", in.tokens);
  double sum = 0;
  for (int64_t first = 0; first < in.tokens || first == 0; first += std::max<int64_t>(out.chunk_tokens, 1)) {
    const int64_t last = std::min(in.tokens, first + out.chunk_tokens);
    int64_t correct = 0;
    const PlanInfo info = runner.run(make_problem(in, request, last - first),
                                     make_buffers(in, out, request.top_k, first, &correct));
    if (first == 0) out.plan = info;
    out.workspace_bytes = std::max(out.workspace_bytes, info.workspace_bytes);
    out.correct_tokens += correct;
    sum += sum_of(in, out.token_loss, first, last);
    progress.update(last, "sum of the losses " + format_number(sum));
  }
  const double divisor = request.num_items != 0 ? request.num_items : in.weight_sum;
  out.loss = request.sum ? sum : sum / divisor;
}

void allocate(Gradient& gradient, const TensorView& of, bool f32) {
  const logitless_dtype own = dtype_from_element(of.dtype);
  gradient.dtype = f32 && own != LOGITLESS_F64 ? LOGITLESS_F32 : own;
  gradient.data =
      std::make_unique<Workspace>(static_cast<size_t>(of.elements() * dtype_bytes(gradient.dtype)));
}

void run_with_gradients(const Context& context, Runner& runner, const GlobalOptions& globals,
                        const LossInputs& in, const LossRequest& request, LossResult& out) {
  Problem problem = make_problem(in, request, in.tokens);
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.reduction = request.sum ? LOGITLESS_REDUCTION_SUM : LOGITLESS_REDUCTION_MEAN;
  problem.num_items = request.sum ? 0 : request.num_items;
  problem.want_d_hidden = request.grad_hidden;
  problem.want_d_classifier = request.grad_classifier;
  problem.want_d_bias = request.grad_bias;
  if (request.grad_hidden) allocate(out.d_hidden, in.hidden, request.grads_in_f32);
  if (request.grad_classifier) allocate(out.d_classifier, in.classifier, request.grads_in_f32);
  if (request.grad_bias) allocate(out.d_bias, in.bias, request.grads_in_f32);
  problem.d_hidden_dtype = out.d_hidden.data ? out.d_hidden.dtype : problem.hidden_dtype;
  problem.d_classifier_dtype = out.d_classifier.data ? out.d_classifier.dtype : problem.classifier_dtype;
  problem.d_bias_dtype = out.d_bias.data ? out.d_bias.dtype : problem.bias_dtype;

  out.plan = Plan(context, problem).info();
  out.chunk_tokens = in.tokens;
  out.workspace_bytes = out.plan.workspace_bytes;
  if (!globals.quiet && out.plan.predicted_seconds > kAnnouncedSeconds) {
    std::fprintf(stderr, "loss and gradients of %s tokens, about %s\n", format_count(in.tokens).c_str(),
                 format_duration(out.plan.predicted_seconds).c_str());
  }
  double loss64 = 0;
  float loss32 = 0;
  Buffers buffers = make_buffers(in, out, 0, 0, &out.correct_tokens);
  buffers.loss = in.stats_dtype == LOGITLESS_F64 ? static_cast<void*>(&loss64) : &loss32;
  if (out.d_hidden.data) buffers.d_hidden = out.d_hidden.data->bytes().data();
  if (out.d_classifier.data) buffers.d_classifier = out.d_classifier.data->bytes().data();
  if (out.d_bias.data) buffers.d_bias = out.d_bias.data->bytes().data();
  runner.run(problem, buffers);
  out.loss = in.stats_dtype == LOGITLESS_F64 ? loss64 : static_cast<double>(loss32);
}

}  // namespace

LossResult run_loss(const GlobalOptions& globals, const LossInputs& in, const LossRequest& request) {
  const Context context = make_context(globals, {}, request.device);
  Runner runner(context, request.device.ordinal);
  const auto bytes = static_cast<size_t>(in.tokens * dtype_bytes(in.stats_dtype));
  LossResult out;
  out.nll.resize(bytes);
  for_each_stat(request.stats, [&](const LossStat& stat, size_t i) {
    out.stats[i].values.resize(
        static_cast<size_t>(in.tokens * bits_of(element_of(stat, in.stats_dtype)) / 8));
  });
  out.argmax.resize(static_cast<size_t>(in.tokens));
  out.top_ids.resize(static_cast<size_t>(in.tokens * request.top_k));
  out.top_log_probs.resize(bytes * static_cast<size_t>(request.top_k));
  out.target_log_probs.resize(bytes * static_cast<size_t>(in.targets_per_token));

  const auto start = std::chrono::steady_clock::now();
  if (request.has_gradients()) {
    run_with_gradients(context, runner, globals, in, request, out);
  } else {
    run_chunks(context, runner, globals, in, request, out);
  }
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const auto valid = static_cast<double>(in.valid_tokens);
  out.mean_nll = sum_of(in, out.nll, 0, in.tokens) / valid;
  for_each_stat(request.stats, [&](const LossStat& stat, size_t i) {
    const std::vector<std::byte>& values = out.stats[i].values;
    const double sum = stat.flag != nullptr
                           ? static_cast<double>(std::count(values.begin(), values.end(), std::byte{1}))
                           : sum_of(in, values, 0, in.tokens);
    out.stats[i].mean = sum / valid;
  });
  const bool counts_top = request.top_k > 0 && in.targets_per_token == 0;
  for (int64_t token = 0; token < in.tokens && counts_top; ++token) {
    const auto first = out.top_ids.begin() + token * request.top_k;
    const int64_t target = in.targets[static_cast<size_t>(token)];
    const bool valid_target = target != request.ignore_index;
    if (valid_target && std::find(first, first + request.top_k, target) != first + request.top_k) {
      ++out.top_correct_tokens;
    }
  }
  return out;
}

}  // namespace logitless::cli
