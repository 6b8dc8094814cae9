#include "commands/loss.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "commands/run.h"
#include "io/files.h"
#include "io/tensor_files.h"
#include "support/format.h"
#include "support/progress.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

// Which gradients are asked for: of hidden, classifier and bias.
std::array<bool, 3> chosen_gradients(const LossRequest& request) {
  const bool has_bias = !request.bias.empty();
  const auto& of = request.gradients_of;
  if (request.gradients.empty()) {
    if (!of.empty()) throw UsageError("--gradients-of: expected --gradients FILE with it");
    if (request.problem.gradient != LOGITLESS_EXACT)
      throw UsageError("--gradient: expected --gradients FILE with thinned ones");
    return {};
  }
  const auto wants = [&](const char* name) { return std::find(of.begin(), of.end(), name) != of.end(); };
  if (wants("bias") && !has_bias) throw UsageError("--gradients-of: expected --bias FILE with bias");
  if (of.empty()) return {true, true, has_bias};
  return {wants("hidden"), wants("classifier"), wants("bias")};
}

void check_request(const LossRequest& request) {
  if (request.reduction == "sum" && request.problem.num_items != 0) {
    throw UsageError("--num-items: expected --reduction mean with it");
  }
  if (!request.per_token.ends_with(".npy")) return;
  const auto first = static_cast<size_t>(std::find(request.stats.begin(), request.stats.end(), true) -
                                         request.stats.begin());
  if (first < kStats || request.problem.top_k > 0) {
    throw UsageError("--per-token: an .npy file holds one array, the nll; with " +
                     (first < kStats ? flag_of(tensor_name(kLossStats[first].id)) : "--top-k") +
                     " use .safetensors");
  }
}

// Refuses combinations with several targets a token. The library refuses them too, but its words name no flags.
void check_several_targets(const LossRequest& request, const LossInputs& in) {
  if (in.targets_per_token == 0) return;
  const std::string several = std::to_string(in.targets_per_token) + " targets a token";
  if (request.problem.gradient != LOGITLESS_EXACT) {
    throw UsageError("--gradient: expected exact with " + several + ", got " +
                     gradient_text(request.problem));
  }
  if (request.stats[kIsTop1]) {
    throw UsageError("--is-top1: expected one target a token, got " + std::to_string(in.targets_per_token) +
                     ", of which none is the right one");
  }
}

// By the file itself where both exist, else by name.
bool same_file(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path canonical = fs::weakly_canonical(fs::absolute(a), error);
  return !error && canonical == fs::weakly_canonical(fs::absolute(b), error) && !error;
}

// Throws UsageError where an output would replace one of the inputs or the other output.
void check_outputs(const LossRequest& request, const std::vector<std::string>& inputs) {
  const auto check = [&](const char* option, const std::string& path) {
    for (const std::string& input : inputs) {
      if (!path.empty() && same_file(path, input))
        throw UsageError(std::string(option) + ": " + path + " is an input of this run");
    }
  };
  check("--per-token", request.per_token);
  check("--gradients", request.gradients);
  if (!request.per_token.empty() && !request.gradients.empty() &&
      same_file(request.gradients, request.per_token)) {
    throw UsageError("--gradients: expected a file other than that of --per-token, got '" +
                     request.gradients + "'");
  }
}

// An output of the run that may go into a file.
struct LossOutput {
  logitless_tensor_id id;
  ElementType type;
  std::vector<int64_t> shape;
  Workspace values;
};

struct LossResult {
  double loss = 0;
  double mean_nll = 0;                      // over valid tokens; NaN without any, as the other means
  int64_t correct_tokens = 0;               // 0 with several targets a token, of which none is the right one
  int64_t top_correct_tokens = 0;           // whose target is one of the top_k
  std::array<double, kStats> stat_means{};  // of those that are asked for
  double seconds = 0;
  PlanInfo plan;             // of the first chunk
  int64_t chunk_tokens = 0;  // tokens that one run took
  size_t workspace_bytes = 0;
  std::vector<LossOutput> rows;  // of each token; ignored tokens hold 0 (argmax and top_ids -1)
  std::vector<LossOutput> gradients;
};

constexpr double kChunkSeconds = 1;
// Each run reads the whole classifier; with this many tokens that costs little beside the arithmetic.
constexpr int64_t kMinChunkTokens = 1024;
constexpr double kAnnouncedSeconds = 3;

Problem make_problem(const LossInputs& in, const LossRequest& request, int64_t tokens) {
  Problem problem = request.problem;
  problem.tokens = tokens;
  problem.vocab = in.vocab;
  problem.hidden = in.dim;
  problem.dtype.hidden = dtype_from_element(in.hidden.dtype);
  problem.dtype.classifier = dtype_from_element(in.classifier.dtype);
  if (in.bias.owner != nullptr) problem.dtype.bias = dtype_from_element(in.bias.dtype);
  problem.reduction = LOGITLESS_REDUCTION_NONE;
  problem.num_items = 0;
  problem.shift = problem.sequence_length = 0;  // targets are where they belong
  problem.targets_per_row = in.targets_per_token;
  return problem;
}

void add_output(std::vector<LossOutput>& outputs, logitless_tensor_id id, ElementType type,
                const std::vector<int64_t>& shape) {
  const uint64_t bytes = bytes_of(shape, type).value();
  outputs.push_back({id, type, shape, Workspace(std::max<size_t>(bytes, 1))});
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
  add_output(rows, LOGITLESS_TENSOR_NLL, stats, in.batch_shape);
  add_output(rows, LOGITLESS_TENSOR_ARGMAX, ElementType::kI64, in.batch_shape);
  if (!has_gradients) add_output(rows, LOGITLESS_TENSOR_LOSS, stats, in.batch_shape);
  if (in.targets_per_token > 0)
    add_output(rows, LOGITLESS_TENSOR_TARGET_LOG_PROBS, stats, with(in.targets_per_token));
  for (size_t i = 0; i < kStats; ++i) {
    if (request.stats[i])
      add_output(rows, kLossStats[i].id, i == kIsTop1 ? ElementType::kBool : stats, in.batch_shape);
  }
  if (request.problem.top_k > 0) {
    add_output(rows, LOGITLESS_TENSOR_TOP_IDS, ElementType::kI64, with(request.problem.top_k));
    add_output(rows, LOGITLESS_TENSOR_TOP_LOG_PROBS, stats, with(request.problem.top_k));
  }
  return rows;
}

// Inputs and outputs of the tokens from `first` to `last`.
RunTensors make_tensors(const LossInputs& in, const LossResult& out, int64_t first, int64_t last,
                        int64_t& correct) {
  const auto part = [&](std::span<const std::byte> bytes) {  // of a tensor of all tokens
    const size_t row = in.tokens == 0 ? 0 : bytes.size() / static_cast<size_t>(in.tokens);
    return bytes.subspan(static_cast<size_t>(first) * row, static_cast<size_t>(last - first) * row);
  };
  RunTensors tensors{{LOGITLESS_TENSOR_HIDDEN, part(in.hidden.data)},
                     {LOGITLESS_TENSOR_CLASSIFIER, in.classifier.data},
                     {LOGITLESS_TENSOR_BIAS, in.bias.data},
                     {LOGITLESS_TENSOR_TARGETS, part(std::as_bytes(std::span(in.targets)))},
                     {LOGITLESS_TENSOR_TARGET_WEIGHT, part(in.target_weight)},
                     {LOGITLESS_TENSOR_CLASS_WEIGHT, in.class_weight},
                     {LOGITLESS_TENSOR_TOKEN_WEIGHT, part(in.token_weight)},
                     {LOGITLESS_TENSOR_TEMPERATURE, part(in.token_temperature)}};
  for (const LossOutput& output : out.rows) tensors.emplace_back(output.id, part(output.values.bytes()));
  if (in.targets_per_token == 0)
    tensors.emplace_back(LOGITLESS_TENSOR_CORRECT_COUNT, std::as_bytes(std::span(&correct, 1)));
  return tensors;
}

// Tokens of one run: all, or as many as take about a second.
int64_t chunk_size(const Context& context, const LossInputs& in, const LossRequest& request,
                   LossResult& out) {
  const Buffers all = buffers_of(make_tensors(in, out, 0, in.tokens, out.correct_tokens));
  const double seconds = Plan(context, make_problem(in, request, in.tokens), all).info().predicted_seconds;
  const double chunks = std::max(1.0, std::ceil(seconds / kChunkSeconds));
  const auto tokens = static_cast<int64_t>(std::ceil(static_cast<double>(in.tokens) / chunks));
  return std::clamp<int64_t>(tokens, std::min(kMinChunkTokens, in.tokens), in.tokens);
}

const std::byte* values_of(const LossResult& result, logitless_tensor_id id) {
  for (const LossOutput& output : result.rows) {
    if (output.id == id) return output.values.bytes().data();
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
  out.chunk_tokens = chunk_size(context, in, request, out);
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
    sum += sum_of(in, values_of(out, LOGITLESS_TENSOR_LOSS), first, last);
    progress.update(last, "sum of the losses " + format_number(sum));
  }
  const double items = request.problem.num_items;
  out.loss = request.reduction == "sum" ? sum : sum / (items != 0 ? items : in.weight_sum);
}

void run_with_gradients(Runner& runner, const GlobalOptions& globals, const LossInputs& in,
                        const LossRequest& request, const std::array<bool, 3>& wants, LossResult& out) {
  Problem problem = make_problem(in, request, in.tokens);
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.reduction = request.reduction == "sum" ? LOGITLESS_REDUCTION_SUM : LOGITLESS_REDUCTION_MEAN;
  problem.num_items = request.problem.num_items;
  const auto add = [&](bool wanted, logitless_tensor_id id, const TensorView& of, int32_t& dtype,
                       int32_t own) {
    const bool widens = request.gradients_dtype == "f32" && own != LOGITLESS_F64;
    dtype = wanted && widens ? static_cast<int32_t>(LOGITLESS_F32) : own;
    if (wanted) add_output(out.gradients, id, element_from_dtype(dtype), of.shape);
  };
  auto& dtype = problem.dtype;
  add(wants[0], LOGITLESS_TENSOR_D_HIDDEN, in.hidden, dtype.d_hidden, dtype.hidden);
  add(wants[1], LOGITLESS_TENSOR_D_CLASSIFIER, in.classifier, dtype.d_classifier, dtype.classifier);
  add(wants[2], LOGITLESS_TENSOR_D_BIAS, in.bias, dtype.d_bias, dtype.bias);

  std::vector<std::byte> loss(static_cast<size_t>(dtype_bytes(in.stats_dtype)));
  RunTensors tensors = make_tensors(in, out, 0, in.tokens, out.correct_tokens);
  tensors.emplace_back(LOGITLESS_TENSOR_LOSS, loss);
  for (const LossOutput& output : out.gradients) tensors.emplace_back(output.id, output.values.bytes());
  runner.place(std::move(tensors));
  out.plan = runner.prepare(problem);
  out.chunk_tokens = in.tokens;
  out.workspace_bytes = static_cast<size_t>(out.plan.workspace_bytes);
  if (!globals.quiet && out.plan.predicted_seconds > kAnnouncedSeconds) {
    std::fprintf(stderr, "loss and gradients of %s tokens, about %s\n", format_count(in.tokens).c_str(),
                 format_duration(out.plan.predicted_seconds).c_str());
  }
  runner.launch();
  runner.fetch();
  out.loss = in.stats_at(loss.data(), 0);
}

// Without gradients the tokens run in chunks of about a second, so that progress can be shown; the chunks'
// sums are joined in double precision. With gradients it is one run. wants_gradient: of hidden, classifier
// and bias.
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
    run_with_gradients(runner, globals, in, request, wants_gradient, out);
  } else {
    run_chunks(context, runner, globals, in, request, out);
  }
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const auto valid = static_cast<double>(in.valid_tokens);
  out.mean_nll = sum_of(in, values_of(out, LOGITLESS_TENSOR_NLL), 0, in.tokens) / valid;
  for (size_t i = 0; i < kStats; ++i) {
    const std::byte* values = values_of(out, kLossStats[i].id);
    if (values == nullptr) continue;
    const double sum = i == kIsTop1
                           ? static_cast<double>(std::count(values, values + in.tokens, std::byte{1}))
                           : sum_of(in, values, 0, in.tokens);
    out.stat_means[i] = sum / valid;
  }
  const int64_t k = request.problem.top_k;
  const auto* top_ids = reinterpret_cast<const int64_t*>(values_of(out, LOGITLESS_TENSOR_TOP_IDS));
  for (int64_t token = 0; token < in.tokens && top_ids != nullptr && in.targets_per_token == 0; ++token) {
    const int64_t* first = top_ids + token * k;
    const int64_t target = in.targets[static_cast<size_t>(token)];
    const bool is_there = std::find(first, first + k, target) != first + k;
    if (target != request.problem.ignore_index && is_there) ++out.top_correct_tokens;
  }
  return out;
}

ordered_json make_report(const LossRequest& request, const LossInputs& in, const LossResult& result) {
  const auto valid = static_cast<double>(in.valid_tokens);
  ordered_json report{{"loss", result.loss}, {"reduction", request.reduction}, {"nll", result.mean_nll}};
  const bool one_target = in.targets_per_token == 0;
  if (one_target) {
    report["perplexity"] = std::exp(result.mean_nll);
    report["token_accuracy"] = static_cast<double>(result.correct_tokens) / valid;
  }
  report["tokens"] = in.tokens;
  report["valid_tokens"] = in.valid_tokens;
  if (one_target) report["correct_tokens"] = result.correct_tokens;
  if (!one_target) report["targets_per_token"] = in.targets_per_token;
  for (size_t i = 0; i < kStats; ++i) {
    if (request.stats[i]) report[tensor_name(kLossStats[i].id)] = result.stat_means[i];
  }
  if (request.problem.top_k > 0) {
    report["top_k"] = request.problem.top_k;
    if (one_target) report["top_k_accuracy"] = static_cast<double>(result.top_correct_tokens) / valid;
  }
  report["vocab"] = in.vocab;
  report["hidden"] = in.dim;
  const auto described = [](const TensorView& tensor) -> ordered_json {
    return {{"tensor", tensor.name}, {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}};
  };
  report["inputs"] = {{"hidden", described(in.hidden)}, {"classifier", described(in.classifier)}};
  report.update(options_json(request.problem));
  report["device"] = request.device;
  report["seconds"] = result.seconds;
  report["tokens_per_second"] = static_cast<double>(in.tokens) / result.seconds;
  report["workspace_bytes"] = result.workspace_bytes;
  report["tokens_per_run"] = result.chunk_tokens;
  report["plan"] = plan_json(result.plan);
  if (!request.per_token.empty()) report["per_token_file"] = request.per_token;
  if (!request.gradients.empty()) report["gradients_file"] = request.gradients;
  return report;
}

// Without what stands in for an empty output's memory.
std::span<const std::byte> bytes_in(const LossOutput& output) {
  return output.values.bytes().first(bytes_of(output.shape, output.type).value());
}

void write_outputs(const std::string& path, const std::vector<LossOutput>& outputs,
                   std::vector<TensorToWrite> others, const std::map<std::string, std::string>& metadata) {
  for (const LossOutput& output : outputs)
    others.push_back({tensor_name(output.id), output.type, output.shape, bytes_in(output)});
  write_safetensors(path, others, metadata);
}

void write_files(const LossRequest& request, const LossInputs& in, const LossResult& result) {
  if (request.per_token.ends_with(".npy")) {
    const LossOutput& nll = result.rows.front();
    write_npy(request.per_token, {"nll", nll.type, nll.shape, bytes_in(nll)});
  } else if (!request.per_token.empty()) {
    std::vector<int64_t> shape = in.batch_shape;
    if (in.targets_per_token > 0) shape.push_back(in.targets_per_token);
    write_outputs(request.per_token, result.rows,
                  {{"targets", ElementType::kI64, shape, std::as_bytes(std::span(in.targets))}},
                  {{"ignore_index", std::to_string(request.problem.ignore_index)}});
  }
  if (!request.gradients.empty()) {
    write_outputs(request.gradients, result.gradients, {},
                  {{"loss", format_number(result.loss, 17)}, {"reduction", request.reduction}});
  }
}

void run(const LossRequest& request, const GlobalOptions& globals) {
  const std::array<bool, 3> gradients = chosen_gradients(request);
  check_request(request);
  const DeviceChoice device = parse_device(globals, request.device);
  const LossInputs inputs = open_loss_inputs(request);
  check_several_targets(request, inputs);
  check_outputs(request, inputs.files);
  const LossResult result = run_loss(globals, device, inputs, request, gradients);
  require_whole_mapped_files();
  write_files(request, inputs, result);
  print_report(make_report(request, inputs, result), globals.json);
}

}  // namespace

void add_loss_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("loss", "Loss, perplexity and accuracy of tensors in files; gradients too");
  const auto request = std::make_shared<LossRequest>();
  const auto add = [&](const char* group, const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->group(group);
  };
  const auto ending = [](const std::string& safetensors, const std::string& npy) {
    const auto check = [=](const std::string& name) {
      const bool accepted = name.ends_with(safetensors) || (!npy.empty() && name.ends_with(npy));
      return accepted ? ""
                      : "expected a name that ends in " + npy + (npy.empty() ? "" : " or ") + safetensors +
                            ", got '" + name + "'";
    };
    return CLI::Validator(check, "");
  };
  constexpr const char* kInputs = "Inputs, each FILE[:TENSOR]";
  add(kInputs, "--hidden", request->hidden, "Hidden states [..., tokens, D]")->required();
  add(kInputs, "--classifier", request->classifier, "Head weight [V, D]")->required();
  add(kInputs, "--targets", request->targets,
      "Token ids, of hidden's leading shape or flat; with one more dimension, of 64 at most, several a token")
      ->required();
  add(kInputs, "--target-weight", request->target_weight,
      "Weight of each of several targets, of their shape; without it all are 1");
  add(kInputs, "--bias", request->bias, "Bias of the head [V]");
  add(kInputs, "--class-weight", request->class_weight, "Weight of each vocabulary entry [V]");
  add(kInputs, "--token-weight", request->token_weight, "Weight of each token");
  CLI::Option* temperature =
      add(kInputs, "--token-temperature", request->token_temperature, "Temperature of each token");

  add("The loss", "--reduction", request->reduction, "mean or sum")
      ->check(CLI::IsMember({"mean", "sum"}))
      ->capture_default_str();
  add_problem_options(*command, request->problem, true);
  temperature->excludes(command->get_option("--temperature"));
  command
      ->add_option("--device", request->device,
                   "Where to compute: cpu, or cuda:N with copies there and back; see 'logitless info'")
      ->capture_default_str();

  constexpr const char* kOutputs = "Outputs";
  for (size_t i = 0; i < kStats; ++i) {
    command->add_flag(flag_of(tensor_name(kLossStats[i].id)), request->stats[i], kLossStats[i].help)
        ->group(kOutputs);
  }
  add(kOutputs, "--per-token", request->per_token,
      "Write each token's nll to FILE.npy, or nll, loss, argmax, targets and what else is asked for (the "
      "statistics, top_ids and top_log_probs), and target_log_probs of several targets, to FILE.safetensors")
      ->check(ending(".safetensors", ".npy"));
  add(kOutputs, "--gradients", request->gradients,
      "Write d_hidden, d_classifier and d_bias to FILE.safetensors")
      ->check(ending(".safetensors", ""));
  add(kOutputs, "--gradients-of", request->gradients_of,
      "Which of them, such as hidden,classifier. Default: of all operands")
      ->delimiter(',')
      ->check(CLI::IsMember({"hidden", "classifier", "bias"}));
  add(kOutputs, "--gradients-dtype", request->gradients_dtype, "same (as the operand) or f32")
      ->check(CLI::IsMember({"same", "f32"}))
      ->capture_default_str();
  command->footer(
      "\nFiles are .safetensors (F32, BF16, F16, F64) or .npy (F32, F16, F64). They are mapped, not loaded.\n"
      "TENSOR may be left out where the file has only one. Of a checkpoint in several files, name the one\n"
      "that has the tensor. What a model does to its logits, give as --scale and --softcap.\n"
      "\n"
      "Examples:\n"
      "  logitless loss --hidden h.npy --classifier w.npy --targets y.npy\n"
      "  logitless loss --hidden acts.safetensors:hidden --classifier "
      "model.safetensors:model.embed_tokens.weight \\\n"
      "      --targets acts.safetensors:input_ids --shift 1 --softcap 30 --budget 256MiB\n"
      "  logitless loss --hidden h.npy --classifier w.npy --targets y.npy \\\n"
      "      --gradients g.safetensors --gradients-of hidden\n"
      "  logitless loss --hidden h.npy --classifier w.npy --targets ids.npy --target-weight probs.npy\n"
      "  logitless loss --device cuda:0 --hidden h.npy --classifier w.npy --targets y.npy\n"
      "  logitless --json loss --hidden h.npy --classifier w.npy --targets y.npy --per-token nll.npy\n");
  command->callback([request, &globals] { run(*request, globals); });
}

}  // namespace logitless::cli
