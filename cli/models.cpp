#include "models.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "options.h"

namespace headroom::cli {
namespace {

// vocab_size, hidden_size, final_logit_softcapping and logit_scale (or 1 / logits_scaling) of config.json in
// the named repository on the Hugging Face hub.
constexpr std::array<ModelHead, 24> kModels{{
    {"gpt2", 50257, 768, 0, 1, true, "openai-community/gpt2"},
    {"llama-3-8b", 128256, 4096, 0, 1, false, "meta-llama/Meta-Llama-3-8B"},
    {"llama-3-70b", 128256, 8192, 0, 1, false, "meta-llama/Meta-Llama-3-70B"},
    {"llama-3.2-1b", 128256, 2048, 0, 1, true, "meta-llama/Llama-3.2-1B"},
    {"gemma-2-2b", 256000, 2304, 30, 1, true, "google/gemma-2-2b"},
    {"gemma-2-9b", 256000, 3584, 30, 1, true, "google/gemma-2-9b"},
    {"gemma-3-1b", 262144, 1152, 0, 1, true, "google/gemma-3-1b-pt"},
    {"gemma-3-4b", 262208, 2560, 0, 1, true, "google/gemma-3-4b-pt"},
    {"qwen2.5-0.5b", 151936, 896, 0, 1, true, "Qwen/Qwen2.5-0.5B"},
    {"qwen2.5-7b", 152064, 3584, 0, 1, false, "Qwen/Qwen2.5-7B"},
    {"qwen3-0.6b", 151936, 1024, 0, 1, true, "Qwen/Qwen3-0.6B"},
    {"qwen3-8b", 151936, 4096, 0, 1, false, "Qwen/Qwen3-8B"},
    {"qwen3-next-80b", 151936, 2048, 0, 1, false, "Qwen/Qwen3-Next-80B-A3B-Instruct"},
    {"mistral-nemo-12b", 131072, 5120, 0, 1, false, "mistralai/Mistral-Nemo-Base-2407"},
    {"phi-4", 100352, 5120, 0, 1, false, "microsoft/phi-4"},
    {"deepseek-v3", 129280, 7168, 0, 1, false, "deepseek-ai/DeepSeek-V3"},
    {"olmo-2-7b", 100352, 4096, 0, 1, false, "allenai/OLMo-2-1124-7B"},
    {"smollm2-1.7b", 49152, 2048, 0, 1, true, "HuggingFaceTB/SmolLM2-1.7B"},
    {"gpt-oss-20b", 201088, 2880, 0, 1, false, "openai/gpt-oss-20b"},
    {"granite-3.3-8b", 49159, 4096, 0, 1.0 / 16, true, "ibm-granite/granite-3.3-8b-instruct"},
    {"command-r", 256000, 8192, 0, 0.0625, true, "CohereForAI/c4ai-command-r-v01"},
    {"rwkv7-2.9b", 65536, 2560, 0, 1, false, "fla-hub/rwkv7-2.9B-world"},
    {"mamba2-2.7b", 50288, 2560, 0, 1, true, "state-spaces/mamba2-2.7b"},  // 50277, padded to 16
    {"kimi-linear-48b", 163840, 2304, 0, 1, false, "moonshotai/Kimi-Linear-48B-A3B-Base"},
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
    if (normalized(model.name) == wanted || normalized(model.source) == wanted) return model;
  }
  std::string similar;
  const std::string family = wanted.substr(0, wanted.find_first_of("-.0123456789"));
  for (const ModelHead& model : kModels) {
    if (family.empty() || !normalized(model.name).starts_with(family)) continue;
    similar += similar.empty() ? "; similar: " : ", ";
    similar += model.name;
  }
  throw UsageError("--model: no model '" + name + "' in the table" + similar +
                   ". 'headroom plan --list-models' shows it; any head can be given as --vocab and --hidden");
}

}  // namespace headroom::cli
