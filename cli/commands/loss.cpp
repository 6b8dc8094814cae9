#include "commands/loss.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "commands/run.h"
#include "support/format.h"
#include "support/progress.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

// Returns the requested gradients: of hidden, weight and bias.
std::array<bool, 3> chosen_gradients(const LossRequest& request) {
  const bool has_bias = !request.bias.empty();
  const auto& of = request.gradients_of;
  if (request.gradients.empty()) {
    if (!of.empty()) throw UsageError("--gradients-of: expected --gradients FILE with it");
    if (request.problem.gradient != LOGITLESS_EXACT)
      throw UsageError("--gradient: expected exact without --gradients FILE, got sparsified gradients");
    return {};
  }
  const auto wants = [&](const char* name) { return std::find(of.begin(), of.end(), name) != of.end(); };
  if (wants("bias") && !has_bias) throw UsageError("--gradients-of: expected --bias FILE with bias");
  if (of.empty()) return {true, true, has_bias};
  return {wants("hidden"), wants("weight"), wants("bias")};
}

void check_request(const LossRequest& request) {
  if (request.reduction == "sum" && request.problem.num_items != 0) {
    throw UsageError("--num-items: expected --reduction mean with it");
  }
  if (!request.per_token.ends_with(".npy")) return;
  const auto first = static_cast<size_t>(std::find(request.stats.begin(), request.stats.end(), true) -
                                         request.stats.begin());
  std::string other = first < kStats ? flag_of(tensor_name(kLossStats[first].id)) : "";
  if (request.problem.top_k > 0) other = "--top-k";
  if (request.problem.num_samples > 0) other = "--num-samples";
  if (other.empty()) return;
  throw UsageError("--per-token: an .npy file holds one array, the nll; with " + other + " use .safetensors");
}

// Refuses options that need one target a token. The library would as well, but its message names no flags.
void check_several_targets(const LossRequest& request, const LossInputs& in) {
  if (in.targets_per_token == 0) return;
  const std::string count = std::to_string(in.targets_per_token);
  if (request.problem.gradient != LOGITLESS_EXACT) {
    throw UsageError("--gradient: expected exact with " + count + " targets a token, got " +
                     gradient_text(request.problem));
  }
  if (request.stats[kIsTop1]) {
    throw UsageError("--is-top1: expected one target a token, got " + count +
                     ", of which none is the right one");
  }
}

// Compares the files themselves if both exist, else their names.
bool same_file(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const fs::path canonical = fs::weakly_canonical(fs::absolute(a), error);
  return !error && canonical == fs::weakly_canonical(fs::absolute(b), error) && !error;
}

// Throws UsageError if an output would replace an input or the other output.
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

// An output of the run that may be written to a file.
struct LossOutput {
  logitless_tensor_id id;
  ElementType type;
  std::vector<int64_t> shape;
  Workspace values;

  // Leaves out the byte that gives an empty output its memory.
  std::span<std::byte> bytes() const { return values.bytes().first(bytes_of(shape, type).value()); }
};

struct LossResult {
  double loss = 0;
  double mean_nll = 0;                      // mean over valid tokens; NaN without any, as the other means
  int64_t correct_tokens = 0;               // 0 with several targets a token, as no single one is right
  int64_t top_correct_tokens = 0;           // number of tokens whose target is one of the top_k
  std::array<double, kStats> stat_means{};  // for requested statistics
  double seconds = 0;
  PlanInfo plan;             // plan of the first chunk
  int64_t chunk_tokens = 0;  // tokens of one run
  size_t workspace_bytes = 0;
  std::vector<LossOutput> rows;       // outputs of each token; ignored tokens hold 0 (argmax and top_ids -1)
  std::vector<LossOutput> gradients;  // outputs of one run
  std::vector<LossOutput> reduced;    // loss of a run with gradients
};

constexpr double kChunkSeconds = 1;
// Each run reads the whole weight. With this many tokens that costs little beside the arithmetic.
constexpr int64_t kMinChunkTokens = 1024;
constexpr double kAnnouncedSeconds = 3;

Problem make_problem(const LossInputs& in, const LossRequest& request) {
  Problem problem = request.problem;
  problem.tokens = in.tokens;
  problem.vocab = in.vocab;
  problem.hidden = in.dim;
  auto& dtype = problem.dtype;
  dtype.hidden = dtype.d_hidden = dtype_from_element(in.hidden.dtype);
  dtype.weight = dtype.d_weight = dtype_from_element(in.weight.dtype);
  if (in.bias.file) dtype.bias = dtype.d_bias = dtype_from_element(in.bias.dtype);
  problem.reduction = LOGITLESS_REDUCTION_NONE;
  problem.num_items = 0;
  problem.shift = problem.sequence_length = 0;  // targets are already shifted
  problem.targets_per_row = in.targets_per_token;
  return problem;
}

void add_output(std::vector<LossOutput>& outputs, logitless_tensor_id id, ElementType type,
                const std::vector<int64_t>& shape) {
  const uint64_t bytes = bytes_of(shape, type).value();
  outputs.push_back({id, type, shape, Workspace(std::max<size_t>(bytes, 1))});
}

void add_row_outputs(const LossInputs& in, const LossRequest& request, LossResult& out) {
  const auto add = [&](logitless_tensor_id id, ElementType type, int64_t last = 0) {
    std::vector<int64_t> shape = in.batch_shape;
    if (last > 0) shape.push_back(last);
    add_output(out.rows, id, type, shape);
  };
  add(LOGITLESS_TENSOR_NLL, in.stats);
  add(LOGITLESS_TENSOR_ARGMAX, ElementType::kI64);
  if (out.gradients.empty()) add(LOGITLESS_TENSOR_LOSS, in.stats);
  if (in.targets_per_token > 0) add(LOGITLESS_TENSOR_TARGET_LOG_PROBS, in.stats, in.targets_per_token);
  for (size_t i = 0; i < kStats; ++i) {
    if (request.stats[i]) add(kLossStats[i].id, i == kIsTop1 ? ElementType::kBool : in.stats);
  }
  if (request.problem.top_k > 0) {
    add(LOGITLESS_TENSOR_TOP_IDS, ElementType::kI64, request.problem.top_k);
    add(LOGITLESS_TENSOR_TOP_LOG_PROBS, in.stats, request.problem.top_k);
  }
  if (request.problem.num_samples > 0) {
    add(LOGITLESS_TENSOR_SAMPLED_IDS, ElementType::kI64, request.problem.num_samples);
    add(LOGITLESS_TENSOR_SAMPLED_LOG_PROBS, in.stats, request.problem.num_samples);
  }
}

// Makes the problem one of a loss with gradients. wanted: those of hidden, weight and bias.
void add_gradients(const LossInputs& in, const LossRequest& request, const std::array<bool, 3>& wanted,
                   Problem& problem, LossResult& out) {
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.reduction = request.reduction == "sum" ? LOGITLESS_REDUCTION_SUM : LOGITLESS_REDUCTION_MEAN;
  problem.num_items = request.problem.num_items;
  const auto add = [&](bool is_wanted, logitless_tensor_id id, const StoredTensor& of, int32_t& dtype) {
    if (!is_wanted) return;
    if (request.gradients_dtype == "f32" && dtype != LOGITLESS_F64) dtype = LOGITLESS_F32;
    add_output(out.gradients, id, element_from_dtype(dtype), of.shape);
  };
  add(wanted[0], LOGITLESS_TENSOR_D_HIDDEN, in.hidden, problem.dtype.d_hidden);
  add(wanted[1], LOGITLESS_TENSOR_D_WEIGHT, in.weight, problem.dtype.d_weight);
  add(wanted[2], LOGITLESS_TENSOR_D_BIAS, in.bias, problem.dtype.d_bias);
  add_output(out.reduced, LOGITLESS_TENSOR_LOSS, in.stats, {});
}

// Returns inputs and outputs of the tokens from `first` to `last`; `hidden` holds just their hidden states.
RunTensors make_tensors(const LossInputs& in, const LossResult& out, int64_t first, int64_t last,
                        const std::vector<std::byte>& hidden, int64_t& correct) {
  const auto part = [&](std::span<const std::byte> bytes) {  // these tokens' part of a tensor
    const size_t row = in.tokens == 0 ? 0 : bytes.size() / static_cast<size_t>(in.tokens);
    return bytes.subspan(static_cast<size_t>(first) * row, static_cast<size_t>(last - first) * row);
  };
  RunTensors tensors{{LOGITLESS_TENSOR_HIDDEN, hidden},
                     {LOGITLESS_TENSOR_WEIGHT, in.weight_data},
                     {LOGITLESS_TENSOR_BIAS, in.bias_data},
                     {LOGITLESS_TENSOR_TARGETS, part(std::as_bytes(std::span(in.targets)))},
                     {LOGITLESS_TENSOR_TARGET_WEIGHT, part(in.target_weight)},
                     {LOGITLESS_TENSOR_CLASS_WEIGHT, in.class_weight},
                     {LOGITLESS_TENSOR_TOKEN_WEIGHT, part(in.token_weight)},
                     {LOGITLESS_TENSOR_TEMPERATURE, part(in.token_temperature)}};
  for (const LossOutput& output : out.rows) tensors.emplace_back(output.id, part(output.values.bytes()));
  for (const auto* whole : {&out.gradients, &out.reduced}) {
    for (const LossOutput& output : *whole) tensors.emplace_back(output.id, output.values.bytes());
  }
  if (in.targets_per_token == 0)
    tensors.emplace_back(LOGITLESS_TENSOR_CORRECT_COUNT, std::as_bytes(std::span(&correct, 1)));
  return tensors;
}

// Sums the elements [first, last) of an output; 0 if there is no such output.
double sum_of(const std::vector<LossOutput>& outputs, logitless_tensor_id id, int64_t first, int64_t last) {
  double sum = 0;
  for (const LossOutput& output : outputs) {
    const std::byte* data = output.values.bytes().data();
    for (int64_t i = first; output.id == id && i < last; ++i) {
      sum += is_real(output.type) ? real_element(data, output.type, i) : static_cast<double>(data[i]);
    }
  }
  return sum;
}

// Runs everything. Without gradients, tokens run in chunks of about a second, so that progress can be shown,
// and the chunks' sums are added in double precision. With gradients or samples there is one run. wanted:
// gradients of hidden, weight and bias.
LossResult run_loss(const GlobalOptions& globals, const DeviceChoice& device, const LossInputs& in,
                    const LossRequest& request, const std::array<bool, 3>& wanted) {
  const Context context = make_context(globals, {}, device);
  Runner runner(context, device.ordinal);
  LossResult out;
  Problem problem = make_problem(in, request);
  const bool has_gradients = !request.gradients.empty();
  if (has_gradients) add_gradients(in, request, wanted, problem, out);
  add_row_outputs(in, request, out);

  const auto start = std::chrono::steady_clock::now();
  const Buffers all = buffers_of(make_tensors(in, out, 0, 0, {}, out.correct_tokens));
  const double seconds = Plan(context, problem, all).info().predicted_seconds;
  out.chunk_tokens = in.tokens;
  if (!has_gradients && problem.num_samples == 0) {  // samples depend on the rows' numbers in the run
    const double chunks = std::max(1.0, std::ceil(seconds / kChunkSeconds));
    const auto tokens = static_cast<int64_t>(std::ceil(static_cast<double>(in.tokens) / chunks));
    out.chunk_tokens = std::clamp<int64_t>(tokens, std::min(kMinChunkTokens, in.tokens), in.tokens);
  } else if (!globals.quiet && seconds > kAnnouncedSeconds) {
    std::fprintf(stderr, "%s of %s tokens, about %s\n",
                 has_gradients ? "loss and gradients" : "loss and samples", format_count(in.tokens).c_str(),
                 format_duration(seconds).c_str());
  }
  Progress progress(globals.quiet, "loss", in.tokens);
  double sum = 0;
  for (int64_t first = 0; first < in.tokens || first == 0; first += std::max<int64_t>(out.chunk_tokens, 1)) {
    const int64_t last = std::min(in.tokens, first + out.chunk_tokens);
    const std::vector<std::byte> hidden = in.hidden.read(first * in.dim, last * in.dim);
    int64_t correct = 0;
    problem.tokens = last - first;
    const PlanInfo info = runner.run(problem, make_tensors(in, out, first, last, hidden, correct));
    if (first == 0) out.plan = info;
    out.workspace_bytes = std::max(out.workspace_bytes, static_cast<size_t>(info.workspace_bytes));
    out.correct_tokens += correct;
    sum += has_gradients ? sum_of(out.reduced, LOGITLESS_TENSOR_LOSS, 0, 1)
                         : sum_of(out.rows, LOGITLESS_TENSOR_LOSS, first, last);
    if (last < in.tokens) progress.update(last, "sum of the losses " + format_number(sum));
  }
  const double items = request.problem.num_items;
  out.loss = has_gradients || request.reduction == "sum" ? sum : sum / (items != 0 ? items : in.weight_sum);
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const auto mean_of = [&](logitless_tensor_id id) {
    return sum_of(out.rows, id, 0, in.tokens) / static_cast<double>(in.valid_tokens);
  };
  out.mean_nll = mean_of(LOGITLESS_TENSOR_NLL);
  for (size_t i = 0; i < kStats; ++i) out.stat_means[i] = mean_of(kLossStats[i].id);
  const int64_t k = request.problem.top_k;
  for (const LossOutput& output : out.rows) {
    if (output.id != LOGITLESS_TENSOR_TOP_IDS || in.targets_per_token > 0) continue;
    const auto* ids = reinterpret_cast<const int64_t*>(output.values.bytes().data());
    for (const int64_t target : in.targets) {
      if (target != request.problem.ignore_index) out.top_correct_tokens += std::count(ids, ids + k, target);
      ids += k;
    }
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
  const auto described = [](const StoredTensor& tensor) -> ordered_json {
    return {{"tensor", tensor.name}, {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}};
  };
  report["inputs"] = {{"hidden", described(in.hidden)}, {"weight", described(in.weight)}};
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

void write_outputs(const std::string& path, const std::vector<LossOutput>& outputs,
                   std::vector<TensorToWrite> others, const std::map<std::string, std::string>& metadata) {
  for (const LossOutput& output : outputs)
    others.push_back({tensor_name(output.id), output.type, output.shape, output.bytes()});
  write_safetensors(path, others, metadata);
}

void write_files(const LossRequest& request, const LossInputs& in, const LossResult& result) {
  if (request.per_token.ends_with(".npy")) {
    const LossOutput& nll = result.rows.front();
    write_npy(request.per_token, {"nll", nll.type, nll.shape, nll.bytes()});
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
  write_files(request, inputs, result);
  print_report(make_report(request, inputs, result), globals.json);
}

}  // namespace

void add_loss_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("loss", "Compute loss, perplexity, accuracy and gradients of tensors in files");
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
  add(kInputs, "--weight", request->weight, "Head weight [V, D]")->required();
  add(kInputs, "--targets", request->targets,
      "Token ids, in hidden's leading shape or flat. One more dimension, of up to 64, gives several a token")
      ->required();
  add(kInputs, "--target-weight", request->target_weight,
      "Weights of several targets a token, in the shape of --targets. Default: all 1");
  add(kInputs, "--bias", request->bias, "Bias of the head [V]");
  add(kInputs, "--class-weight", request->class_weight, "Weight of each vocabulary entry [V]");
  add(kInputs, "--token-weight", request->token_weight, "Weight of each token");
  CLI::Option* temperature =
      add(kInputs, "--token-temperature", request->token_temperature, "Temperature of each token");

  add("The loss", "--reduction", request->reduction, "mean or sum over the tokens")
      ->check(CLI::IsMember({"mean", "sum"}))
      ->capture_default_str();
  add_problem_options(*command, request->problem, true);
  temperature->excludes(command->get_option("--temperature"));
  command
      ->add_option("--device", request->device,
                   "Device to compute on: cpu, or cuda:N, to which tensors are copied; see 'logitless info'")
      ->capture_default_str();

  constexpr const char* kOutputs = "Outputs";
  for (size_t i = 0; i < kStats; ++i) {
    command->add_flag(flag_of(tensor_name(kLossStats[i].id)), request->stats[i], kLossStats[i].help)
        ->group(kOutputs);
  }
  add(kOutputs, "--per-token", request->per_token,
      "Write each token's nll to FILE.npy; or nll, loss, argmax, targets, target_log_probs of several "
      "targets, and all requested outputs (statistics, top_ids, sampled_ids and their log_probs) to "
      "FILE.safetensors")
      ->check(ending(".safetensors", ".npy"));
  add(kOutputs, "--gradients", request->gradients, "Write d_hidden, d_weight and d_bias to FILE.safetensors")
      ->check(ending(".safetensors", ""));
  add(kOutputs, "--gradients-of", request->gradients_of,
      "Gradients to write, such as hidden,weight. Default: of all operands")
      ->delimiter(',')
      ->check(CLI::IsMember({"hidden", "weight", "bias"}));
  add(kOutputs, "--gradients-dtype", request->gradients_dtype,
      "Dtype of the gradients: same (as the operand) or f32")
      ->check(CLI::IsMember({"same", "f32"}))
      ->capture_default_str();
  command->footer(
      "\nFiles are .safetensors (F32, BF16, F16, F64) or .npy (F32, F16, F64). TENSOR may be left out if the "
      "file\n"
      "has only one. If a checkpoint has several files, name the one that has the tensor. Without "
      "gradients,\n"
      "hidden states are read in parts. If the model scales or caps its logits, give --scale and "
      "--softcap.\n"
      "\n"
      "Examples:\n"
      "  logitless loss --hidden h.npy --weight w.npy --targets y.npy\n"
      "  logitless loss --hidden acts.safetensors:hidden --weight "
      "model.safetensors:model.embed_tokens.weight \\\n"
      "      --targets acts.safetensors:input_ids --shift 1 --softcap 30 --budget 256MiB\n"
      "  logitless loss --hidden h.npy --weight w.npy --targets y.npy \\\n"
      "      --gradients g.safetensors --gradients-of hidden\n"
      "  logitless loss --hidden h.npy --weight w.npy --targets ids.npy --target-weight probs.npy\n"
      "  logitless loss --device cuda:0 --hidden h.npy --weight w.npy --targets y.npy\n"
      "  logitless --json loss --hidden h.npy --weight w.npy --targets y.npy --per-token nll.npy\n");
  command->callback([request, &globals] { run(*request, globals); });
}

}  // namespace logitless::cli
