#include "commands/plan.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string_view>
#include <vector>

#include "io/model_config.h"
#include "io/tensor.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

constexpr const char* kDefaultDtype = "bf16";

// The head of a published language model.
struct ModelHead {
  std::string_view name;     // as given to --model
  int64_t vocab;             // V, rows of the head's weight
  int64_t hidden;            // D
  double softcap;            // 0: none
  double scale;              // factor of the logits, 1: none
  std::string_view weights;  // repository on the Hugging Face hub; --model also takes this name
  std::string_view source;   // public file that states these numbers
};

// Public files that state V, D, softcap and scale, at the commit at which they were read.
constexpr std::string_view kLitGpt = "Lightning-AI/litgpt@26857050 litgpt/config.py";
constexpr std::string_view kGpt2 =
    "huggingface/transformers@01ae98ae src/transformers/models/gpt2/configuration_gpt2.py";
constexpr std::string_view kCohere =
    "huggingface/transformers@008e5743 src/transformers/models/cohere/configuration_cohere.py";
constexpr std::string_view kQwen3Next =
    "huggingface/transformers@008e5743 src/transformers/models/qwen3_next/configuration_qwen3_next.py";
constexpr std::string_view kDeepSeek = "deepseek-ai/DeepSeek-V3@9b4e9788 inference/configs/config_671B.json";
constexpr std::string_view kGptOss20 =
    "AI-Hypercomputer/maxtext@67103427 src/MaxText/configs/models/gpt-oss-20b.yml";
constexpr std::string_view kGptOss120 = "openai/gpt-oss@0568dfc9 gpt_oss/torch/model.py";
constexpr std::string_view kOwnConfig = "config.json of the weights";

// V is the number of rows of the weight, padding included.
constexpr std::array<ModelHead, 25> kModels{{
    {"gpt2", 50257, 768, 0, 1, "openai-community/gpt2", kGpt2},
    {"llama-3-8b", 128256, 4096, 0, 1, "meta-llama/Meta-Llama-3-8B", kLitGpt},
    {"llama-3-70b", 128256, 8192, 0, 1, "meta-llama/Meta-Llama-3-70B", kLitGpt},
    {"llama-3.1-8b", 128256, 4096, 0, 1, "meta-llama/Llama-3.1-8B", kLitGpt},
    {"llama-3.1-405b", 128256, 16384, 0, 1, "meta-llama/Llama-3.1-405B", kLitGpt},
    {"llama-3.2-1b", 128256, 2048, 0, 1, "meta-llama/Llama-3.2-1B", kLitGpt},
    {"gemma-2-2b", 256000, 2304, 30, 1, "google/gemma-2-2b", kLitGpt},
    {"gemma-2-9b", 256000, 3584, 30, 1, "google/gemma-2-9b", kLitGpt},
    {"gemma-2-27b", 256000, 4608, 30, 1, "google/gemma-2-27b", kLitGpt},
    {"gemma-3-1b", 262144, 1152, 0, 1, "google/gemma-3-1b-pt", kLitGpt},
    {"gemma-3-4b", 262208, 2560, 0, 1, "google/gemma-3-4b-pt", kOwnConfig},
    {"qwen2.5-0.5b", 151936, 896, 0, 1, "Qwen/Qwen2.5-0.5B", kLitGpt},
    {"qwen2.5-7b", 152064, 3584, 0, 1, "Qwen/Qwen2.5-7B", kLitGpt},
    {"qwen3-0.6b", 151936, 1024, 0, 1, "Qwen/Qwen3-0.6B", kLitGpt},
    {"qwen3-8b", 151936, 4096, 0, 1, "Qwen/Qwen3-8B", kLitGpt},
    {"qwen3-next-80b", 151936, 2048, 0, 1, "Qwen/Qwen3-Next-80B-A3B-Instruct", kQwen3Next},
    {"mistral-nemo-12b", 131072, 5120, 0, 1, "mistralai/Mistral-Nemo-Base-2407", kOwnConfig},
    {"phi-4", 100352, 5120, 0, 1, "microsoft/phi-4", kLitGpt},
    {"deepseek-v3", 129280, 7168, 0, 1, "deepseek-ai/DeepSeek-V3", kDeepSeek},
    {"olmo-2-7b", 100352, 4096, 0, 1, "allenai/OLMo-2-1124-7B", kLitGpt},
    {"smollm2-1.7b", 49152, 2048, 0, 1, "HuggingFaceTB/SmolLM2-1.7B", kLitGpt},
    {"gpt-oss-20b", 201088, 2880, 0, 1, "openai/gpt-oss-20b", kGptOss20},
    {"gpt-oss-120b", 201088, 2880, 0, 1, "openai/gpt-oss-120b", kGptOss120},
    {"granite-3.3-8b", 49159, 4096, 0, 1.0 / 16, "ibm-granite/granite-3.3-8b-instruct", kOwnConfig},
    {"command-r", 256000, 8192, 0, 0.0625, "CohereForAI/c4ai-command-r-v01", kCohere},
}};

std::string normalized(std::string_view name) {
  std::string out(name.substr(name.find_last_of('/') + 1));  // without an organisation
  for (char& c : out) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// Finds a model by its name; case does not matter, and '_' is like '-'. Throws UsageError, which names
// similar models, if there is none.
const ModelHead& find_model(const std::string& name) {
  const std::string wanted = normalized(name);
  for (const ModelHead& model : kModels) {
    if (normalized(model.name) == wanted || normalized(model.weights) == wanted) return model;
  }
  std::string similar;
  const std::string family = wanted.substr(0, wanted.find_first_of("-.0123456789"));
  for (const ModelHead& model : kModels) {
    if (family.empty() || !normalized(model.name).starts_with(family)) continue;
    similar += (similar.empty() ? "; similar: " : ", ") + std::string(model.name);
  }
  throw UsageError(
      "--model: no model '" + name + "' in the table, nor a folder with a config.json or such a file" +
      similar +
      ". 'logitless plan --list-models' shows the table; any head can be given as --vocab and --hidden");
}

// Returns the config.json that --model names, itself or by its folder; empty if --model is a name.
std::string find_config(const std::string& model) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_regular_file(model, error)) return model;
  const fs::path file = fs::path(model) / "config.json";
  return fs::exists(file, error) ? file.string() : "";
}

void add_to(std::string& list, const std::string& text) {
  list += (list.empty() ? "" : ", ") + text;
}

// Adds a note that the model's entries set an option, which the reader finds at `where`: "softcap 30
// (final_logit_softcapping 30 in config.json)".
void add_taken(PlanModel& model, const std::string& option, const std::string& value,
               const std::string& where) {
  add_to(model.taken, option + " " + value + " (" + where + ")");
}

void take_dtype(const ModelConfig& config, const std::string& file, PlanOptions& options, PlanModel& model) {
  if (config.dtype_key.empty()) return;
  try {
    options.dtype = dtype_text(parse_dtype("--dtype", config.dtype));
  } catch (const UsageError&) {
    throw FileError(file, "'" + config.dtype_key +
                              "': expected float32, bfloat16, float16 or float64, got '" + config.dtype +
                              "'; --dtype, given, takes its place");
  }
  add_taken(model, "dtype", options.dtype, config.dtype_key + " " + config.dtype + " in " + file);
  model.facts["applied"].push_back({{"option", "dtype"}, {"key", config.dtype_key}, {"value", config.dtype}});
}

// file: empty for a model of the table.
void take_number(const char* option, const LogitNumber& number, const std::string& file, PlanModel& model,
                 double& to) {
  to = number.value;
  std::string keys;
  for (const auto& [key, value] : number.from) {
    add_to(keys, key + " " + format_number(value));
    model.facts["applied"].push_back({{"option", option}, {"key", key}, {"value", value}});
  }
  if (keys.empty()) return;
  add_taken(model, option, format_number(number.value),
            file.empty() ? "of " + model.name : keys + " in " + file);
}

void take_size(std::string& given, const std::optional<int64_t>& size, const std::string& file,
               const char* key, const char* option) {
  if (!given.empty()) return;
  if (!size) throw FileError(file, std::string("has no '") + key + "'; give " + option);
  given = std::to_string(*size);
}

PlanModel read_model(PlanOptions& options, const CLI::App& command) {
  const bool has_scale = command.count("--scale") != 0, has_softcap = command.count("--softcap") != 0;
  const std::string file = find_config(options.model);
  PlanModel model;
  ModelConfig head;
  if (file.empty()) {
    const ModelHead& known = find_model(options.model);
    model = {std::string(known.name),
             "",
             {{"name", known.name}, {"weights", known.weights}, {"source", known.source}}};
    head.vocab = known.vocab;
    head.hidden = known.hidden;
    if (known.scale != 1) head.scale = {known.scale, {{"scale", known.scale}}};
    if (known.softcap != 0) head.softcap = {known.softcap, {{"softcap", known.softcap}}};
  } else {
    model = {options.model, "", {{"file", file}}};
    head = read_model_config(file, {.scale = has_scale, .softcap = has_softcap});
  }
  model.facts["applied"] = ordered_json::array();
  take_size(options.vocab, head.vocab, file, "vocab_size", "--vocab");
  take_size(options.hidden, head.hidden, file, "hidden_size", "--hidden");
  if (options.dtype.empty()) take_dtype(head, file, options, model);
  if (!has_scale) take_number("scale", head.scale, file, model, options.problem.scale);
  if (!has_softcap) take_number("softcap", head.softcap, file, model, options.problem.softcap);
  return model;
}

}  // namespace

PlanModel read_plan_model(PlanOptions& options, const CLI::App& command) {
  PlanModel model;
  if (!options.model.empty()) model = read_model(options, command);
  if (options.dtype.empty()) {
    options.dtype = kDefaultDtype;
    add_taken(model, "dtype", options.dtype, "the default");
  }
  return model;
}

void list_models(bool json) {
  ordered_json list = ordered_json::array();
  for (const ModelHead& model : kModels) {
    list.push_back({{"name", model.name},
                    {"vocab", model.vocab},
                    {"hidden", model.hidden},
                    {"softcap", model.softcap},
                    {"scale", model.scale},
                    {"weights", model.weights},
                    {"source", model.source}});
  }
  if (json) return print_json(list);
  std::cout << table_text(list, {"name", "vocab", "hidden", "softcap", "scale", "weights", "source"});
}

}  // namespace logitless::cli
