#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>

#include "commands/commands.h"
#include "commands/context.h"
#include "commands/device_option.h"
#include "commands/head_config.h"
#include "commands/loss_inputs.h"
#include "commands/loss_run.h"
#include "commands/number_checks.h"
#include "commands/output_files.h"
#include "commands/units.h"
#include "io/mapped_file.h"
#include "io/npy.h"
#include "io/safetensors_writer.h"
#include "io/tensor_source.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

struct Options {
  LossFiles files;
  LossRequest request;
  std::string device = "cpu";
  std::string reduction = "mean";
  std::string per_token;  // file
  std::string gradients;  // file
  std::string gradients_of;
  std::string gradients_dtype = "same";
  std::optional<ModelConfig> config;  // of the classifier's checkpoint
};

void choose_gradients(Options& options) {
  if (options.gradients.empty()) {
    if (!options.gradients_of.empty()) throw UsageError("--gradients-of: expected --gradients FILE with it");
    if (options.request.thinning.gradient != "exact") {
      throw UsageError("--gradient: expected --gradients FILE with thinned ones");
    }
    return;
  }
  if (!options.gradients.ends_with(".safetensors")) {
    throw UsageError("--gradients: expected a name that ends in .safetensors, got '" + options.gradients +
                     "'");
  }
  const bool has_bias = !options.files.bias.empty();
  LossRequest& request = options.request;
  if (options.gradients_of.empty()) {
    request.grad_hidden = request.grad_classifier = true;
    request.grad_bias = has_bias;
  } else {
    for (const std::string& name : split(options.gradients_of, ',')) {
      if (name == "hidden") {
        request.grad_hidden = true;
      } else if (name == "classifier") {
        request.grad_classifier = true;
      } else if (name == "bias" && has_bias) {
        request.grad_bias = true;
      } else {
        throw UsageError(std::string("--gradients-of: expected a list of hidden, classifier") +
                         (has_bias ? ", bias" : " (and bias, with --bias)") + ", got '" + name + "'");
      }
    }
  }
  request.grads_in_f32 = options.gradients_dtype == "f32";
}

void prepare(Options& options) {
  options.request.sum = options.reduction == "sum";
  options.request.ignore_index = options.files.ignore_index;
  if (options.request.sum && options.request.num_items != 0) {
    throw UsageError("--num-items: expected --reduction mean with it");
  }
  choose_gradients(options);
  if (options.request.top_k > 0 && options.request.has_gradients()) {
    throw UsageError("--top-k: expected no --gradients with it, got both: it is an option of losses alone");
  }
  const bool npy = options.per_token.ends_with(".npy");
  if (!options.per_token.empty() && !npy && !options.per_token.ends_with(".safetensors")) {
    throw UsageError("--per-token: expected a name that ends in .npy or .safetensors, got '" +
                     options.per_token + "'");
  }
  const LossStatFlags& asked = options.request.stats;
  const auto first = std::find(asked.begin(), asked.end(), true);
  const bool any = first != asked.end();
  if (npy && (any || options.request.top_k > 0)) {
    throw UsageError(std::string("--per-token: an .npy file holds one array, the nll; with ") +
                     (any ? kLossStats[static_cast<size_t>(first - asked.begin())].option : "--top-k") +
                     " use .safetensors");
  }
}

// What the library refuses beside several targets a token.
void check_several_targets(const Options& options, const LossInputs& in) {
  if (in.targets_per_token == 0) return;
  const std::string several = std::to_string(in.targets_per_token) + " targets a token";
  if (!options.files.class_weight.empty()) {
    throw UsageError("--class-weight: expected none with " + several +
                     ": multiply --target-weight by the weights of their classes");
  }
  if (options.request.thinning.gradient != "exact") {
    throw UsageError("--gradient: expected exact with " + several + ", got " +
                     options.request.thinning.gradient);
  }
  for_each_stat(options.request.stats, [&](const LossStat& stat, size_t) {
    if (stat.flag == &logitless_buffers::is_top1) {
      throw UsageError(std::string(stat.option) + ": expected one target a token, got " +
                       std::to_string(in.targets_per_token) + ", of which none is the right one");
    }
  });
}

// A checkpoint's config.json has a say in what its logits are.
void read_config(Options& options, const CLI::App& command) {
  const std::string file = find_model_config(parse_tensor_reference(options.files.classifier).file);
  if (file.empty()) return;
  options.config = read_head_config(file, command);
  options.files.tied = options.config->tied;
  apply(*options.config, command, options.request.loss);
}

ordered_json make_report(const Options& options, const LossInputs& in, const LossResult& result) {
  const auto valid = static_cast<double>(in.valid_tokens);
  ordered_json report{{"loss", result.loss}, {"reduction", options.reduction}, {"nll", result.mean_nll}};
  const bool one_target = in.targets_per_token == 0;
  if (one_target) {
    report["perplexity"] = std::exp(result.mean_nll);
    report["token_accuracy"] = static_cast<double>(result.correct_tokens) / valid;
  }
  report["tokens"] = in.tokens;
  report["valid_tokens"] = in.valid_tokens;
  if (one_target) report["correct_tokens"] = result.correct_tokens;
  if (!one_target) report["targets_per_token"] = in.targets_per_token;
  for_each_stat(options.request.stats,
                [&](const LossStat& stat, size_t i) { report[stat.name] = result.stats[i].mean; });
  if (options.request.top_k > 0) {
    report["top_k"] = options.request.top_k;
    if (one_target) report["top_k_accuracy"] = static_cast<double>(result.top_correct_tokens) / valid;
  }
  report["vocab"] = in.vocab;
  report["hidden"] = in.dim;
  report["inputs"] = {
      {"hidden",
       {{"tensor", in.hidden.name}, {"dtype", name_of(in.hidden.dtype)}, {"shape", in.hidden.shape}}},
      {"classifier",
       {{"tensor", in.classifier.name},
        {"dtype", name_of(in.classifier.dtype)},
        {"shape", in.classifier.shape}}}};
  report["scale"] = options.request.loss.scale;
  report["softcap"] = options.request.loss.softcap;
  report["temperature"] = options.request.loss.temperature;
  report["model_config"] = options.config ? applied_json(*options.config) : ordered_json(nullptr);
  report["device"] = options.device;
  report["seconds"] = result.seconds;
  report["tokens_per_second"] = static_cast<double>(in.tokens) / result.seconds;
  report["workspace_bytes"] = result.workspace_bytes;
  report["tokens_per_run"] = result.chunk_tokens;
  report["plan"] = plan_json(result.plan);
  if (!options.per_token.empty()) report["per_token_file"] = options.per_token;
  if (!options.gradients.empty()) report["gradients_file"] = options.gradients;
  return report;
}

void print_text(const Options& options, const ordered_json& report) {
  const auto number = [&](const char* key, int digits) { return format_number(report[key], digits); };
  Table table({"loss (" + options.reduction + ")", number("loss", 9)});
  table.add({"negative log likelihood", number("nll", 9)});
  if (report.contains("perplexity")) table.add({"perplexity", number("perplexity", 7)});
  const auto add_share = [&](const std::string& label, const char* key) {
    if (report.contains(key)) table.add({label, format_number(report[key].get<double>() * 100, 4) + " %"});
  };
  add_share("token accuracy", "token_accuracy");
  add_share("top " + std::to_string(options.request.top_k) + " accuracy", "top_k_accuracy");
  for_each_stat(options.request.stats, [&](const LossStat& stat, size_t) {
    table.add({stat.label, number(stat.name, 9)});
  });
  table.add({"tokens", format_count(report["valid_tokens"]) + " of " + format_count(report["tokens"])});
  table.add(
      {"time", format_seconds(report["seconds"]) + ", " + number("tokens_per_second", 4) + " tokens/s"});
  table.add({"workspace", format_budget(report["workspace_bytes"].get<double>())});
  std::cout << table.text();
  const auto& inputs = report["inputs"];
  for (const char* name : {"hidden", "classifier"}) {
    std::cout << name << ": " << inputs[name]["tensor"].get<std::string>() << " "
              << shape_text(inputs[name]["shape"].get<std::vector<int64_t>>()) << " "
              << inputs[name]["dtype"].get<std::string>() << "\n";
  }
  const std::string applied = options.config ? applied_text(*options.config) : "";
  if (!applied.empty()) std::cout << "logits: " << applied << "\n";
  if (!options.per_token.empty()) std::cout << "each token's values: " << options.per_token << "\n";
  if (!options.gradients.empty()) std::cout << "gradients: " << options.gradients << "\n";
}

void write_per_token(const Options& options, const LossInputs& in, const LossResult& result) {
  const ElementType stats = element_from_dtype(in.stats_dtype);
  if (options.per_token.ends_with(".npy"))
    return write_npy(options.per_token, stats, in.batch_shape, result.nll);
  const auto with = [&](int64_t last) {
    std::vector<int64_t> shape = in.batch_shape;
    shape.push_back(last);
    return shape;
  };
  const bool one_target = in.targets_per_token == 0;
  const std::vector<int64_t> target_shape = one_target ? in.batch_shape : with(in.targets_per_token);
  std::vector<TensorToWrite> tensors{
      {"nll", stats, in.batch_shape, result.nll},
      {"argmax", ElementType::kI64, in.batch_shape, std::as_bytes(std::span(result.argmax))},
      {"targets", ElementType::kI64, target_shape, std::as_bytes(std::span(in.targets))}};
  if (!one_target) tensors.push_back({"target_log_probs", stats, target_shape, result.target_log_probs});
  if (!result.token_loss.empty()) tensors.push_back({"loss", stats, in.batch_shape, result.token_loss});
  for_each_stat(options.request.stats, [&](const LossStat& stat, size_t i) {
    tensors.push_back({stat.name, element_of(stat, in.stats_dtype), in.batch_shape, result.stats[i].values});
  });
  if (options.request.top_k > 0) {
    const std::vector<int64_t> top_shape = with(options.request.top_k);
    tensors.push_back({"top_ids", ElementType::kI64, top_shape, std::as_bytes(std::span(result.top_ids))});
    tensors.push_back({"top_log_probs", stats, top_shape, result.top_log_probs});
  }
  write_safetensors(options.per_token, tensors,
                    {{"ignore_index", std::to_string(options.files.ignore_index)}});
}

void write_gradients(const Options& options, const LossInputs& in, const LossResult& result) {
  std::vector<TensorToWrite> tensors;
  const auto add = [&](const char* name, const Gradient& gradient, const TensorView& of) {
    if (gradient.data)
      tensors.push_back({name, element_from_dtype(gradient.dtype), of.shape, gradient.data->bytes()});
  };
  add("d_hidden", result.d_hidden, in.hidden);
  add("d_classifier", result.d_classifier, in.classifier);
  add("d_bias", result.d_bias, in.bias);
  write_safetensors(options.gradients, tensors,
                    {{"loss", format_number(result.loss, 17)}, {"reduction", options.reduction}});
}

void run(Options options, const GlobalOptions& globals, const CLI::App& command) {
  prepare(options);
  options.request.device = parse_device(globals, options.device);
  read_config(options, command);
  const LossInputs inputs = open_loss_inputs(options.files);
  check_several_targets(options, inputs);
  check_outputs({{"--per-token", options.per_token}, {"--gradients", options.gradients}}, inputs.files);
  const LossResult result = run_loss(globals, inputs, options.request);
  require_whole_mapped_files();
  if (!options.per_token.empty()) write_per_token(options, inputs, result);
  if (!options.gradients.empty()) write_gradients(options, inputs, result);
  const ordered_json report = make_report(options, inputs, result);
  if (globals.json) {
    print_json(report);
  } else {
    print_text(options, report);
  }
}

}  // namespace

void add_loss_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("loss", "Loss, perplexity and accuracy of tensors in files; gradients too");
  const auto options = std::make_shared<Options>();
  LossFiles& files = options->files;
  const std::string inputs = "Inputs";
  command->add_option("--hidden", files.hidden, "Hidden states [..., tokens, D]: FILE[:TENSOR]")
      ->required()
      ->group(inputs);
  command->add_option("--classifier", files.classifier, "Head weight [V, D]: FILE[:TENSOR]")
      ->required()
      ->group(inputs);
  command
      ->add_option(
          "--targets", files.targets,
          "Token ids, of hidden's leading shape or flat; with one more dimension, of 64 at most, several "
          "a token: FILE[:TENSOR]")
      ->required()
      ->group(inputs);
  command
      ->add_option("--target-weight", files.target_weight,
                   "Weight of each of several targets, of their shape; without it all are 1: FILE[:TENSOR]")
      ->group(inputs);
  command->add_option("--bias", files.bias, "Bias of the head [V]: FILE[:TENSOR]")->group(inputs);
  command
      ->add_option("--class-weight", files.class_weight, "Weight of each vocabulary entry [V]: FILE[:TENSOR]")
      ->group(inputs);
  command->add_option("--token-weight", files.token_weight, "Weight of each token: FILE[:TENSOR]")
      ->group(inputs);
  command
      ->add_option("--token-temperature", files.token_temperature, "Temperature of each token: FILE[:TENSOR]")
      ->group(inputs);

  const std::string loss = "The loss";
  command->add_option("--reduction", options->reduction, "mean or sum")
      ->check(CLI::IsMember({"mean", "sum"}))
      ->group(loss)
      ->capture_default_str();
  command
      ->add_option("--num-items", options->request.num_items,
                   "Divisor of the mean; 0: the weights of the tokens that count")
      ->check(non_negative())
      ->group(loss)
      ->capture_default_str();
  command->add_option("--ignore-index", files.ignore_index, "Target of tokens that do not count")
      ->group(loss)
      ->capture_default_str();
  command
      ->add_option("--shift", files.shift,
                   "Each token predicts the target this many places later in its sequence")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->group(loss)
      ->capture_default_str();
  command
      ->add_option("--sequence-length", files.sequence_length,
                   "Tokens of a sequence, for --shift; 0: hidden's second to last dimension")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->group(loss)
      ->capture_default_str();
  add_loss_options(*command, options->request.loss);
  command->get_option("--token-temperature")->excludes(command->get_option("--temperature"));
  add_device_option(*command, options->device,
                    "Where to compute: cpu, or cuda:N with copies there and back; see 'logitless info'");
  add_thinning_options(*command, options->request.thinning, true);

  const std::string outputs = "Outputs";
  for (size_t i = 0; i < kLossStats.size(); ++i) {
    command->add_flag(kLossStats[i].option, options->request.stats[i], kLossStats[i].help)->group(outputs);
  }
  command
      ->add_option(
          "--top-k", options->request.top_k,
          "The largest logits of each token too, so many: how often its target is one of them, and in "
          "--per-token their ids and log-probabilities. 0: none")
      ->check(CLI::Range(0, 64))
      ->group(outputs)
      ->capture_default_str();
  command
      ->add_option(
          "--per-token", options->per_token,
          "Write each token's nll to FILE.npy, or nll, loss, argmax, targets and what else is asked for (the "
          "statistics, top_ids and top_log_probs), and target_log_probs of several targets, to "
          "FILE.safetensors")
      ->group(outputs);
  command
      ->add_option("--gradients", options->gradients,
                   "Write d_hidden, d_classifier and d_bias to FILE.safetensors")
      ->group(outputs);
  command
      ->add_option("--gradients-of", options->gradients_of,
                   "Which of them, such as hidden,classifier. Default: of all operands")
      ->group(outputs);
  command->add_option("--gradients-dtype", options->gradients_dtype, "same (as the operand) or f32")
      ->check(CLI::IsMember({"same", "f32"}))
      ->group(outputs)
      ->capture_default_str();
  command->footer(
      "\nFiles are .safetensors (F32, BF16, F16, F64), a sharded checkpoint's model.safetensors.index.json, "
      "a\n"
      "checkpoint's folder, or .npy (F32, F16, F64). They are mapped, not loaded. TENSOR may be left out "
      "when the\n"
      "file has only one tensor or one of a usual name: hidden; lm_head.weight or else the embedding; "
      "targets.\n"
      "\n"
      "A config.json beside the classifier says what its model does to the logits (final_logit_softcapping,\n"
      "logit_scale, logits_scaling, ...): it is applied, and printed, unless --scale and --softcap are "
      "given.\n"
      "\n"
      "Examples:\n"
      "  logitless loss --hidden h.npy --classifier w.npy --targets y.npy\n"
      "  logitless loss --hidden acts.safetensors:hidden --classifier gemma-2-2b/:model.embed_tokens.weight "
      "\\\n"
      "      --targets acts.safetensors:input_ids --shift 1 --softcap 30 --budget 256MiB\n"
      "  logitless loss --hidden h.safetensors --classifier model.safetensors.index.json:lm_head.weight \\\n"
      "      --targets y.npy --gradients g.safetensors --gradients-of hidden\n"
      "  logitless loss --hidden h.npy --classifier w.npy --targets ids.npy --target-weight probs.npy\n"
      "  logitless loss --device cuda:0 --hidden h.npy --classifier w.npy --targets y.npy\n"
      "  logitless --json loss --hidden h.npy --classifier w.npy --targets y.npy --per-token nll.npy\n");
  command->callback([options, &globals, command] { run(*options, globals, *command); });
}

}  // namespace logitless::cli
