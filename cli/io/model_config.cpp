#include "io/model_config.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "io/files.h"
#include "io/json.h"
#include "io/tensor.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

constexpr int kConfigDepth = 32;

enum class Effect { kSoftcap, kMultiply, kDivide, kShareOfHidden };

// The effect of an entry on the logits, as the models of the transformers library compute them.
struct Rule {
  const char* key;
  Effect effect;
  const char* family;  // beginning of the model types with this rule; other types with the entry are refused
};
constexpr const char* kNone = "-";  // no family: always refused
constexpr std::array<Rule, 17> kRules{{
    {"final_logit_softcapping", Effect::kSoftcap, ""},
    {"logits_soft_cap", Effect::kSoftcap, ""},
    {"output_logit_soft_cap", Effect::kSoftcap, ""},
    {"logit_scale", Effect::kMultiply, "cohere"},
    {"logits_scaling", Effect::kDivide, "granite"},
    {"logits_scaling", Effect::kMultiply, "hyperclovax"},
    {"output_multiplier_scale", Effect::kMultiply, ""},
    {"output_multiplier", Effect::kMultiply, "muse_glimmer"},
    {"lm_head_multiplier", Effect::kMultiply, ""},
    {"logits_mup_width_multiplier", Effect::kDivide, ""},
    {"dim_model_base", Effect::kShareOfHidden, "minicpm"},
    {"logits_scale", Effect::kMultiply, kNone},
    {"logit_multiplier", Effect::kMultiply, kNone},
    {"output_logits_scale", Effect::kMultiply, kNone},
    {"mup_output_alpha", Effect::kMultiply, kNone},
    {"mup_width_scale", Effect::kMultiply, kNone},
    {"mup_width_multiplier", Effect::kDivide, kNone},
}};

// The value of an entry that a model type may leave out.
struct Default {
  const char* model_type;
  const char* key;
  double value;
};
constexpr std::array<Default, 15> kDefaults{{
    {"gemma2", "final_logit_softcapping", 30},
    {"gemma3n", "final_logit_softcapping", 30},
    {"gemma3n_text", "final_logit_softcapping", 30},
    {"t5_gemma_module", "final_logit_softcapping", 30},
    {"vaultgemma", "final_logit_softcapping", 30},
    {"nanochat", "final_logit_softcapping", 15},
    {"muse_glimmer_text", "final_logit_softcapping", 20},
    {"muse_glimmer_text", "output_multiplier", 0.19611613513818404},
    {"recurrent_gemma", "logits_soft_cap", 30},
    {"xlstm", "output_logit_soft_cap", 30},
    {"cohere", "logit_scale", 0.0625},
    {"cohere2", "logit_scale", 0.0625},
    {"cohere2_moe", "logit_scale", 0.0625},
    {"inkling_text", "logits_mup_width_multiplier", 24},
    {"minicpm3", "dim_model_base", 256},
}};

// Hidden states are multiplied by D^-1/2, unless scale_decoder_outputs, or without it tie_word_embeddings, is
// false.
const std::set<std::string> kScaledWhereTied{"t5",        "longt5", "switch_transformers",
                                             "pop2piano", "umt5",   "udop"};
constexpr const char* kTied = "tie_word_embeddings";

// Python's json writes numbers that JSON does not have: Infinity, -Infinity and NaN become null.
std::string without_python_numbers(std::string_view text) {
  std::string out;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\' && i + 1 < text.size()) {
      out += text[i++];
    } else if (text[i] == '"') {
      in_string = !in_string;
    } else if (!in_string) {
      const auto starts = [&](std::string_view word) { return text.substr(i).starts_with(word); };
      const size_t length = starts("-Infinity") ? 9 : starts("Infinity") ? 8 : starts("NaN") ? 3 : 0;
      if (length != 0) {
        out += "null";
        i += length - 1;
        continue;
      }
    }
    out += text[i];
  }
  return out;
}

class Reader {
 public:
  Reader(const std::string& file, const ModelConfigOverrides& overrides)
      : file_(file), overrides_(overrides) {
    const InputFile input(file);
    const std::vector<std::byte> bytes = input.read(0, input.size());
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    whole_ = parse_strict_json(without_python_numbers(text), file, kConfigDepth);
    if (!whole_.is_object()) throw FileError(file, "expected a JSON object");
    find_language_model();
  }

  ModelConfig read() {
    const json* type = find("model_type");
    if (type != nullptr && type->is_string()) model_type_ = type->get<std::string>();
    config_.vocab = size({"vocab_size"});
    config_.hidden = size({"hidden_size", "d_model", "n_embd", "embedding_dim"});
    read_dtype();
    std::set<std::string> keys;
    for (const Rule& rule : kRules) {
      if (keys.insert(rule.key).second) read_transform(rule.key);
    }
    if (!overrides_.scale) read_tied_scale();
    return std::move(config_);
  }

 private:
  void find_language_model() {
    nested_.push_back(&whole_);
    for (bool is_nested = true; is_nested;) {
      is_nested = false;
      for (const char* key : {"text_config", "llm_config", "language_config", "thinker_config", "decoder"}) {
        const auto inner = nested_.back()->find(key);
        if (inner == nested_.back()->end() || !inner->is_object()) continue;
        nested_.push_back(&*inner);
        is_nested = true;
        break;
      }
    }
  }

  // Returns the innermost entry of this name; null if there is none.
  const json* find(const char* key) const {
    for (auto object = nested_.rbegin(); object != nested_.rend(); ++object) {
      const auto entry = (*object)->find(key);
      if (entry != (*object)->end()) return &*entry;
    }
    return nullptr;
  }

  // Reads the dtype as the transformers library does: "dtype" comes before "torch_dtype", and null says
  // nothing.
  void read_dtype() {
    for (auto object = nested_.rbegin(); object != nested_.rend(); ++object) {
      for (const char* key : {"dtype", "torch_dtype"}) {
        const auto entry = (*object)->find(key);
        if (entry == (*object)->end() || entry->is_null()) continue;
        config_.dtype_key = key;
        config_.dtype = entry->is_string() ? entry->get<std::string>() : entry->dump(-1, ' ', true);
        constexpr std::string_view kModule = "torch.";
        if (config_.dtype.starts_with(kModule)) config_.dtype.erase(0, kModule.size());
        return;
      }
    }
  }

  std::optional<int64_t> size(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      const json* entry = find(key);
      if (entry == nullptr || entry->is_null()) continue;
      if (!entry->is_number_integer() || entry->get<double>() < 1 || entry->get<double>() > 0x1p53) {
        throw FileError(file_,
                        in_quotes(key) + ": expected a whole number of at least 1, got " + json_text(*entry));
      }
      return entry->get<int64_t>();
    }
    return std::nullopt;
  }

  void read_transform(const std::string& key) {
    const Rule* rule = nullptr;
    bool is_softcap = false;
    for (const Rule& other : kRules) {
      if (key != other.key) continue;
      is_softcap = other.effect == Effect::kSoftcap;
      if (model_type_.starts_with(other.family)) rule = &other;
    }
    if (is_softcap ? overrides_.softcap : overrides_.scale) return;
    const json* entry = find(key.c_str());
    if (entry == nullptr) return apply_default(key, rule);
    if (entry->is_null() || *entry == false) return;
    if (rule == nullptr) return refuse_unless_neutral(key, *entry);
    if (!entry->is_number()) refuse(key, "a number", *entry);
    apply(*rule, entry->get<double>());
  }

  void apply_default(const std::string& key, const Rule* rule) {
    for (const Default& known : kDefaults) {
      if (key == known.key && model_type_ == known.model_type) apply(*rule, known.value);
    }
  }

  void apply(const Rule& rule, double value) {
    const bool is_softcap = rule.effect == Effect::kSoftcap;
    if (is_softcap && value == 0) return;
    if (!(value > 0) || !std::isfinite(value)) refuse(rule.key, "a positive number", value);
    if (is_softcap) {
      LogitNumber& softcap = config_.softcap;
      if (!softcap.from.empty() && value != softcap.value) {
        refuse(rule.key, "the " + json(softcap.value).dump() + " of " + in_quotes(softcap.from[0].first),
               value);
      }
      softcap.value = value;
      softcap.from.emplace_back(rule.key, value);
      return;
    }
    double factor = rule.effect == Effect::kDivide ? 1 / value : value;
    if (rule.effect == Effect::kShareOfHidden) {
      if (!config_.hidden) {
        throw FileError(file_, in_quotes(rule.key) + " is a share of 'hidden_size', which is not there");
      }
      factor = value / static_cast<double>(*config_.hidden);
    }
    if (factor == 1) return;
    multiply(factor, rule.key, value);
  }

  void multiply(double factor, const char* key, double value) {
    config_.scale.value *= factor;
    config_.scale.from.emplace_back(key, value);
  }

  void refuse_unless_neutral(const std::string& key, const json& entry) const {
    if (entry == 1 || (key == "dim_model_base" && config_.hidden && entry == *config_.hidden)) return;
    throw FileError(file_, in_quotes(key) + " is " + json_text(entry) + ", and what model type " +
                               in_quotes(model_type_) +
                               " does with it is not known here: give --scale (1: it does nothing)");
  }

  void read_tied_scale() {
    if (!kScaledWhereTied.contains(model_type_)) return;
    const json* decides = find("scale_decoder_outputs");
    const bool decided = decides != nullptr && decides->is_boolean();
    if (decided && *decides == false) return;
    const json* tied = whole_.contains(kTied) ? &whole_.at(kTied) : find(kTied);
    if (!decided && tied != nullptr && *tied == false) {
      if (model_type_ != "umt5" && model_type_ != "udop") return;
      throw FileError(file_, in_quotes(kTied) + " is false, and whether model type " +
                                 in_quotes(model_type_) +
                                 " then scales its hidden states differs: give --scale");
    }
    if (!config_.hidden) throw FileError(file_, "has no 'd_model', by which the logits are scaled");
    const auto width = static_cast<double>(*config_.hidden);
    multiply(1 / std::sqrt(width), "d_model", width);
  }

  static std::string json_text(const json& value) { return in_quotes(value.dump(-1, ' ', true)); }

  [[noreturn]] void refuse(const std::string& key, const std::string& expected, const json& got) const {
    throw FileError(file_, in_quotes(key) + ": expected " + expected + ", got " + json_text(got) +
                               "; --scale or --softcap, given, takes its place");
  }

  std::string file_, model_type_;  // the language model's type; empty if unknown
  ModelConfigOverrides overrides_;
  json whole_;
  std::vector<const json*> nested_;  // objects around the language model's entries, outermost first
  ModelConfig config_;
};

}  // namespace

ModelConfig read_model_config(const std::string& file, const ModelConfigOverrides& overrides) {
  return Reader(file, overrides).read();
}

}  // namespace logitless::cli
