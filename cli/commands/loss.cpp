#include "commands/loss.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>

#include "io/mapped_file.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

// Which gradients are asked for: of hidden, classifier and bias.
std::array<bool, 3> chosen_gradients(const LossRequest& request) {
  const bool has_bias = !request.bias.empty();
  if (request.gradients.empty()) {
    if (!request.gradients_of.empty()) throw UsageError("--gradients-of: expected --gradients FILE with it");
    if (request.loss.gradient != "exact")
      throw UsageError("--gradient: expected --gradients FILE with thinned ones");
    return {};
  }
  if (!request.gradients.ends_with(".safetensors")) {
    throw UsageError("--gradients: expected a name that ends in .safetensors, got '" + request.gradients +
                     "'");
  }
  if (request.gradients_of.empty()) return {true, true, has_bias};
  const std::array<std::string, 3> names{"hidden", "classifier", "bias"};
  std::array<bool, 3> wants{};
  for (const std::string& name : split(request.gradients_of, ',')) {
    const auto place = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    if (place >= (has_bias ? 3 : 2)) {
      throw UsageError(std::string("--gradients-of: expected a list of hidden, classifier") +
                       (has_bias ? ", bias" : " (and bias, with --bias)") + ", got '" + name + "'");
    }
    wants[place] = true;
  }
  return wants;
}

void check_request(const LossRequest& request) {
  if (request.reduction == "sum" && request.num_items != 0) {
    throw UsageError("--num-items: expected --reduction mean with it");
  }
  if (request.top_k > 0 && !request.gradients.empty()) {
    throw UsageError("--top-k: expected no --gradients with it, got both: it is an option of losses alone");
  }
  const bool npy = request.per_token.ends_with(".npy");
  if (!request.per_token.empty() && !npy && !request.per_token.ends_with(".safetensors")) {
    throw UsageError("--per-token: expected a name that ends in .npy or .safetensors, got '" +
                     request.per_token + "'");
  }
  const auto first = static_cast<size_t>(std::find(request.stats.begin(), request.stats.end(), true) -
                                         request.stats.begin());
  if (npy && (first < kStats || request.top_k > 0)) {
    throw UsageError(std::string("--per-token: an .npy file holds one array, the nll; with ") +
                     (first < kStats ? kLossStats[first].option : "--top-k") + " use .safetensors");
  }
}

// What the library refuses beside several targets a token.
void check_several_targets(const LossRequest& request, const LossInputs& in) {
  if (in.targets_per_token == 0) return;
  const std::string several = std::to_string(in.targets_per_token) + " targets a token";
  if (!request.class_weight.empty()) {
    throw UsageError("--class-weight: expected none with " + several +
                     ": multiply --target-weight by the weights of their classes");
  }
  if (request.loss.gradient != "exact") {
    throw UsageError("--gradient: expected exact with " + several + ", got " + request.loss.gradient);
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
    if (request.stats[i]) report[kLossStats[i].name] = result.stat_means[i];
  }
  if (request.top_k > 0) {
    report["top_k"] = request.top_k;
    if (one_target) report["top_k_accuracy"] = static_cast<double>(result.top_correct_tokens) / valid;
  }
  report["vocab"] = in.vocab;
  report["hidden"] = in.dim;
  const auto described = [](const TensorView& tensor) -> ordered_json {
    return {{"tensor", tensor.name}, {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}};
  };
  report["inputs"] = {{"hidden", described(in.hidden)}, {"classifier", described(in.classifier)}};
  report["scale"] = request.loss.scale;
  report["softcap"] = request.loss.softcap;
  report["temperature"] = request.loss.temperature;
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

void print_text(const LossRequest& request, const ordered_json& report) {
  const auto number = [&](const char* key, int digits) { return format_number(report[key], digits); };
  Table table({"loss (" + request.reduction + ")", number("loss", 9)});
  table.add({"negative log likelihood", number("nll", 9)});
  if (report.contains("perplexity")) table.add({"perplexity", number("perplexity", 7)});
  const auto add_share = [&](const std::string& label, const char* key) {
    if (report.contains(key)) table.add({label, format_number(report[key].get<double>() * 100, 4) + " %"});
  };
  add_share("token accuracy", "token_accuracy");
  add_share("top " + std::to_string(request.top_k) + " accuracy", "top_k_accuracy");
  for (size_t i = 0; i < kStats; ++i) {
    if (request.stats[i]) table.add({kLossStats[i].label, number(kLossStats[i].name, 9)});
  }
  table.add({"tokens", format_count(report["valid_tokens"]) + " of " + format_count(report["tokens"])});
  table.add(
      {"time", format_seconds(report["seconds"]) + ", " + number("tokens_per_second", 4) + " tokens/s"});
  table.add({"workspace", format_budget(report["workspace_bytes"].get<double>())});
  std::cout << table.text();
  for (const char* name : {"hidden", "classifier"}) {
    const auto& input = report["inputs"][name];
    std::cout << name << ": " << input["tensor"].get<std::string>() << " "
              << shape_text(input["shape"].get<std::vector<int64_t>>()) << " "
              << input["dtype"].get<std::string>() << "\n";
  }
  if (!request.per_token.empty()) std::cout << "each token's values: " << request.per_token << "\n";
  if (!request.gradients.empty()) std::cout << "gradients: " << request.gradients << "\n";
}

void write_outputs(const std::string& path, const std::vector<LossOutput>& outputs,
                   std::vector<TensorToWrite> others, const std::map<std::string, std::string>& metadata) {
  for (const LossOutput& output : outputs)
    others.push_back({output.name, output.type, output.shape, output.values.bytes()});
  write_safetensors(path, others, metadata);
}

void write_files(const LossRequest& request, const LossInputs& in, const LossResult& result) {
  if (request.per_token.ends_with(".npy")) {
    const LossOutput& nll = result.rows.front();
    write_npy(request.per_token, nll.type, nll.shape, nll.values.bytes());
  } else if (!request.per_token.empty()) {
    std::vector<int64_t> shape = in.batch_shape;
    if (in.targets_per_token > 0) shape.push_back(in.targets_per_token);
    write_outputs(request.per_token, result.rows,
                  {{"targets", ElementType::kI64, shape, std::as_bytes(std::span(in.targets))}},
                  {{"ignore_index", std::to_string(request.ignore_index)}});
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
  const ordered_json report = make_report(request, inputs, result);
  if (globals.json) {
    print_json(report);
  } else {
    print_text(request, report);
  }
}

}  // namespace

void add_loss_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("loss", "Loss, perplexity and accuracy of tensors in files; gradients too");
  const auto request = std::make_shared<LossRequest>();
  const auto add = [&](const char* group, const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->group(group);
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

  constexpr const char* kLoss = "The loss";
  add(kLoss, "--reduction", request->reduction, "mean or sum")
      ->check(CLI::IsMember({"mean", "sum"}))
      ->capture_default_str();
  add(kLoss, "--num-items", request->num_items,
      "Divisor of the mean; 0: the weights of the tokens that count")
      ->check(non_negative())
      ->capture_default_str();
  add(kLoss, "--ignore-index", request->ignore_index, "Target of tokens that do not count")
      ->capture_default_str();
  const CLI::Range count(int64_t{0}, int64_t{1} << 40);
  add(kLoss, "--shift", request->shift,
      "Each token predicts the target this many places later in its sequence")
      ->check(count)
      ->capture_default_str();
  add(kLoss, "--sequence-length", request->sequence_length,
      "Tokens of a sequence, for --shift; 0: hidden's second to last dimension")
      ->check(count)
      ->capture_default_str();
  add_loss_options(*command, request->loss, true);
  temperature->excludes(command->get_option("--temperature"));
  command
      ->add_option("--device", request->device,
                   "Where to compute: cpu, or cuda:N with copies there and back; see 'logitless info'")
      ->capture_default_str();

  constexpr const char* kOutputs = "Outputs";
  for (size_t i = 0; i < kStats; ++i) {
    command->add_flag(kLossStats[i].option, request->stats[i], kLossStats[i].help)->group(kOutputs);
  }
  add(kOutputs, "--top-k", request->top_k,
      "The largest logits of each token too, so many: how often its target is one of them, and in "
      "--per-token "
      "their ids and log-probabilities. 0: none")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  add(kOutputs, "--per-token", request->per_token,
      "Write each token's nll to FILE.npy, or nll, loss, argmax, targets and what else is asked for (the "
      "statistics, top_ids and top_log_probs), and target_log_probs of several targets, to FILE.safetensors");
  add(kOutputs, "--gradients", request->gradients,
      "Write d_hidden, d_classifier and d_bias to FILE.safetensors");
  add(kOutputs, "--gradients-of", request->gradients_of,
      "Which of them, such as hidden,classifier. Default: of all operands");
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
