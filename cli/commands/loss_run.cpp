#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "commands/loss.h"
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
  problem.dtype.hidden = dtype_from_element(in.hidden.dtype);
  problem.dtype.classifier = dtype_from_element(in.classifier.dtype);
  problem.has.bias = in.bias.owner != nullptr;
  if (problem.has.bias) problem.dtype.bias = dtype_from_element(in.bias.dtype);
  problem.has.class_weight = !in.class_weight.empty();
  problem.has.token_weight = !in.token_weight.empty();
  problem.has.temperature = !in.token_temperature.empty();
  problem.ignore_index = request.ignore_index;
  problem.reduction = LOGITLESS_REDUCTION_NONE;
  problem.has.argmax = 1;
  for (size_t i = 0; i < kStats; ++i) {
    if (request.stats[i] && kLossStats[i].want != nullptr) problem.has.*kLossStats[i].want = true;
  }
  problem.top_k = request.top_k;
  problem.targets_per_row = in.targets_per_token;
  apply(request.loss, problem);
  return problem;
}

void add_output(std::vector<LossOutput>& outputs, const char* name, ElementType type,
                const std::vector<int64_t>& shape, RunTensor::SetPointer set) {
  outputs.push_back({name, type, shape, set, Workspace(static_cast<size_t>(bytes_of(shape, type).value()))});
}

std::vector<LossOutput> make_row_outputs(const LossInputs& in, const LossRequest& request,
                                         bool has_gradients) {
  const ElementType stats = element_from_dtype(in.stats_dtype);
  const auto with = [&](int64_t last) {
    std::vector<int64_t> shape = in.batch_shape;
    shape.push_back(last);
    return shape;
  };
  std::vector<LossOutput> rows;
  add_output(rows, "nll", stats, in.batch_shape, set_pointer<&logitless::Buffers::nll>);
  add_output(rows, "argmax", ElementType::kI64, in.batch_shape, set_pointer<&logitless::Buffers::argmax>);
  if (!has_gradients) add_output(rows, "loss", stats, in.batch_shape, set_pointer<&logitless::Buffers::loss>);
  if (in.targets_per_token > 0) {
    add_output(rows, "target_log_probs", stats, with(in.targets_per_token),
               set_pointer<&logitless::Buffers::target_log_probs>);
  }
  for (size_t i = 0; i < kStats; ++i) {
    if (!request.stats[i]) continue;
    add_output(rows, kLossStats[i].name, i == kIsTop1 ? ElementType::kBool : stats, in.batch_shape,
               kLossStats[i].set);
  }
  if (request.top_k > 0) {
    add_output(rows, "top_ids", ElementType::kI64, with(request.top_k),
               set_pointer<&logitless::Buffers::top_ids>);
    add_output(rows, "top_log_probs", stats, with(request.top_k),
               set_pointer<&logitless::Buffers::top_log_probs>);
  }
  return rows;
}

// Inputs and outputs of the tokens from `first` to `last`.
RunTensors make_tensors(const LossInputs& in, const LossResult& out, int64_t first, int64_t last,
                        int64_t& correct) {
  const auto part = [&](auto bytes) {  // of a tensor of all tokens
    const size_t row = in.tokens == 0 ? 0 : bytes.size() / static_cast<size_t>(in.tokens);
    return bytes.subspan(static_cast<size_t>(first) * row, static_cast<size_t>(last - first) * row);
  };
  const auto bytes_in = [](const auto& values) { return std::as_bytes(std::span(values)); };
  RunTensors tensors;
  tensors.add_input<&logitless::Buffers::hidden>(part(in.hidden.data));
  tensors.add_input<&logitless::Buffers::classifier>(in.classifier.data);
  tensors.add_input<&logitless::Buffers::bias>(in.bias.data);
  tensors.add_input<&logitless::Buffers::targets>(part(bytes_in(in.targets)));
  tensors.add_input<&logitless::Buffers::target_weight>(part(bytes_in(in.target_weight)));
  tensors.add_input<&logitless::Buffers::class_weight>(bytes_in(in.class_weight));
  tensors.add_input<&logitless::Buffers::token_weight>(part(bytes_in(in.token_weight)));
  tensors.add_input<&logitless::Buffers::temperature>(part(bytes_in(in.token_temperature)));
  for (const LossOutput& output : out.rows) tensors.add_output(output.set, part(output.values.bytes()));
  if (in.targets_per_token == 0) {
    tensors.add_output(set_pointer<&logitless::Buffers::correct_count>,
                       std::as_writable_bytes(std::span(&correct, 1)));
  }
  return tensors;
}

// Tokens of one run: all, or as many as take about a second.
int64_t chunk_size(const Context& context, const LossInputs& in, const LossRequest& request) {
  const double seconds = Plan(context, make_problem(in, request, in.tokens)).info().predicted_seconds;
  const double chunks = std::max(1.0, std::ceil(seconds / kChunkSeconds));
  const auto tokens = static_cast<int64_t>(std::ceil(static_cast<double>(in.tokens) / chunks));
  return std::clamp<int64_t>(tokens, std::min(kMinChunkTokens, in.tokens), in.tokens);
}

const std::byte* values_of(const LossResult& result, std::string_view name) {
  for (const LossOutput& output : result.rows) {
    if (output.name == name) return output.values.bytes().data();
  }
  return nullptr;
}

double sum_of(const LossInputs& in, const std::byte* values, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += in.stats_at(values, i);
  return sum;
}

void run_chunks(const Context& context, Runner& runner, const GlobalOptions& globals, const LossInputs& in,
                const LossRequest& request, LossResult& out) {
  out.chunk_tokens = chunk_size(context, in, request);
  Progress progress(globals.quiet, "loss", in.tokens);
  double sum = 0;
  for (int64_t first = 0; first < in.tokens || first == 0; first += std::max<int64_t>(out.chunk_tokens, 1)) {
    const int64_t last = std::min(in.tokens, first + out.chunk_tokens);
    int64_t correct = 0;
    const PlanInfo info =
        runner.run(make_problem(in, request, last - first), make_tensors(in, out, first, last, correct));
    if (first == 0) out.plan = info;
    out.workspace_bytes = std::max(out.workspace_bytes, static_cast<size_t>(info.workspace_bytes));
    out.correct_tokens += correct;
    sum += sum_of(in, values_of(out, "loss"), first, last);
    progress.update(last, "sum of the losses " + format_number(sum));
  }
  const double divisor = request.num_items != 0 ? request.num_items : in.weight_sum;
  out.loss = request.reduction == "sum" ? sum : sum / divisor;
}

void run_with_gradients(const Context& context, Runner& runner, const GlobalOptions& globals,
                        const LossInputs& in, const LossRequest& request, const std::array<bool, 3>& wants,
                        LossResult& out) {
  Problem problem = make_problem(in, request, in.tokens);
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.reduction = request.reduction == "sum" ? LOGITLESS_REDUCTION_SUM : LOGITLESS_REDUCTION_MEAN;
  problem.num_items = request.num_items;
  const auto add = [&](size_t i, const char* name, const TensorView& of, RunTensor::SetPointer set,
                       bool& want, int32_t& dtype, int32_t own) {
    want = wants[i];
    dtype = wants[i] && request.gradients_dtype == "f32" && own != LOGITLESS_F64 ? LOGITLESS_F32 : own;
    if (wants[i]) add_output(out.gradients, name, element_from_dtype(dtype), of.shape, set);
  };
  add(0, "d_hidden", in.hidden, set_pointer<&logitless::Buffers::d_hidden>, problem.has.d_hidden,
      problem.dtype.d_hidden, problem.dtype.hidden);
  add(1, "d_classifier", in.classifier, set_pointer<&logitless::Buffers::d_classifier>,
      problem.has.d_classifier, problem.dtype.d_classifier, problem.dtype.classifier);
  add(2, "d_bias", in.bias, set_pointer<&logitless::Buffers::d_bias>, problem.has.d_bias,
      problem.dtype.d_bias, problem.dtype.bias);

  out.plan = Plan(context, problem).info();
  out.chunk_tokens = in.tokens;
  out.workspace_bytes = static_cast<size_t>(out.plan.workspace_bytes);
  if (!globals.quiet && out.plan.predicted_seconds > kAnnouncedSeconds) {
    std::fprintf(stderr, "loss and gradients of %s tokens, about %s\n", format_count(in.tokens).c_str(),
                 format_duration(out.plan.predicted_seconds).c_str());
  }
  std::vector<std::byte> loss(static_cast<size_t>(dtype_bytes(in.stats_dtype)));
  RunTensors tensors = make_tensors(in, out, 0, in.tokens, out.correct_tokens);
  tensors.add_output(set_pointer<&logitless::Buffers::loss>, loss);
  for (const LossOutput& output : out.gradients) tensors.add_output(output.set, output.values.bytes());
  runner.run(problem, tensors);
  out.loss = in.stats_at(loss.data(), 0);
}

}  // namespace

const std::array<LossStat, kStats> kLossStats{{
    {"lse", "--lse", "mean lse", "Log of the sum of the exponentials too", nullptr,
     set_pointer<&logitless::Buffers::lse>},
    {"entropy", "--entropy", "mean entropy", "Entropy of the prediction too",
     &logitless::Problem::Has::entropy, set_pointer<&logitless::Buffers::entropy>},
    {"target_logit", "--target-logit", "mean target logit", "Logit of the target too", nullptr,
     set_pointer<&logitless::Buffers::target_logit>},
    {"mean_logit", "--mean-logit", "mean logit", "Mean of the logits too",
     &logitless::Problem::Has::mean_logit, set_pointer<&logitless::Buffers::mean_logit>},
    {"log_sum_sq_probs", "--log-sum-sq-probs", "mean log sum p^2",
     "Log of the sum of the squared probabilities too", &logitless::Problem::Has::log_sum_sq_probs,
     set_pointer<&logitless::Buffers::log_sum_sq_probs>},
    {"max_logit", "--max-logit", "mean largest logit", "Largest logit too", nullptr,
     set_pointer<&logitless::Buffers::max_logit>},
    {"is_top1", "--is-top1", "share of top 1", "Whether the target has the largest logit, too",
     &logitless::Problem::Has::argmax, set_pointer<&logitless::Buffers::is_top1>},
}};

LossResult run_loss(const GlobalOptions& globals, const DeviceChoice& device, const LossInputs& in,
                    const LossRequest& request, const std::array<bool, 3>& wants_gradient) {
  const Context context = make_context(globals, {}, device);
  Runner runner(context, device.ordinal);
  const bool has_gradients =
      std::find(wants_gradient.begin(), wants_gradient.end(), true) != wants_gradient.end();
  LossResult out;
  out.rows = make_row_outputs(in, request, has_gradients);

  const auto start = std::chrono::steady_clock::now();
  if (has_gradients) {
    run_with_gradients(context, runner, globals, in, request, wants_gradient, out);
  } else {
    run_chunks(context, runner, globals, in, request, out);
  }
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const auto valid = static_cast<double>(in.valid_tokens);
  out.mean_nll = sum_of(in, values_of(out, "nll"), 0, in.tokens) / valid;
  for (size_t i = 0; i < kStats; ++i) {
    const std::byte* values = values_of(out, kLossStats[i].name);
    if (values == nullptr) continue;
    const double sum = i == kIsTop1
                           ? static_cast<double>(std::count(values, values + in.tokens, std::byte{1}))
                           : sum_of(in, values, 0, in.tokens);
    out.stat_means[i] = sum / valid;
  }
  const auto* top_ids = reinterpret_cast<const int64_t*>(values_of(out, "top_ids"));
  for (int64_t token = 0; token < in.tokens && top_ids != nullptr && in.targets_per_token == 0; ++token) {
    const int64_t* first = top_ids + token * request.top_k;
    const int64_t target = in.targets[static_cast<size_t>(token)];
    const bool is_there = std::find(first, first + request.top_k, target) != first + request.top_k;
    if (target != request.ignore_index && is_there) ++out.top_correct_tokens;
  }
  return out;
}

}  // namespace logitless::cli
