#include "models.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "application.h"

namespace logitless::cli {
namespace {

// Public files that state V, D, softcap and scale, at the commit that they were read at.
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

}  // namespace

std::span<const ModelHead> known_models() {
  return kModels;
}

const ModelHead& find_model(const std::string& name) {
  const std::string wanted = normalized(name);
  for (const ModelHead& model : kModels) {
    if (normalized(model.name) == wanted || normalized(model.weights) == wanted) return model;
  }
  std::string similar;
  const std::string family = wanted.substr(0, wanted.find_first_of("-.0123456789"));
  for (const ModelHead& model : kModels) {
    if (family.empty() || !normalized(model.name).starts_with(family)) continue;
    similar += similar.empty() ? "; similar: " : ", ";
    similar += model.name;
  }
  throw UsageError(
      "--model: no model '" + name + "' in the table, nor a folder with a config.json or such a file" +
      similar +
      ". 'logitless plan --list-models' shows the table; any head can be given as --vocab and --hidden");
}

}  // namespace logitless::cli
