#include "commands/options.h"

#include <array>
#include <cmath>
#include <cstdlib>

namespace logitless::cli {
namespace {

struct DTypeRow {
  ElementType element;
  const char* text;
  const char* long_text;
};
// By logitless_dtype.
constexpr std::array<DTypeRow, 6> kDTypes{{{ElementType::kF32, "f32", "float32"},
                                           {ElementType::kBF16, "bf16", "bfloat16"},
                                           {ElementType::kF16, "f16", "float16"},
                                           {ElementType::kF64, "f64", "float64"},
                                           {ElementType::kI32, "i32", "int32"},
                                           {ElementType::kI64, "i64", "int64"}}};
static_assert(LOGITLESS_F32 == 0 && LOGITLESS_BF16 == 1 && LOGITLESS_F16 == 2 && LOGITLESS_F64 == 3 &&
              LOGITLESS_I32 == 4 && LOGITLESS_I64 == 5);

constexpr std::array<const char*, 3> kGradients{"exact", "thinned", "always-thinned"};
static_assert(LOGITLESS_EXACT == 0 && LOGITLESS_THINNED == 1 && LOGITLESS_ALWAYS_THINNED == 2);

// The decimal number that a text begins with, such as -10 or 1.5 or, with `exponent`, 1e-3, and how many
// characters it has: 0 where there is none, and then it is NaN.
struct LeadingNumber {
  double value;
  size_t length;
};

// Not by std::from_chars, which not every standard library has for floating-point numbers.
LeadingNumber leading_number(std::string_view text, bool exponent) {
  const auto digits = [&](size_t at) {
    while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
    return at;
  };
  const size_t begin = text.starts_with('-') ? 1 : 0;
  size_t end = digits(begin);
  const size_t whole = end - begin;
  if (end < text.size() && text[end] == '.') end = digits(end + 1);
  if (whole == 0 && end - begin < 2) return {NAN, 0};  // no digit, or a point alone
  if (exponent && end < text.size() && (text[end] == 'e' || text[end] == 'E')) {
    const size_t sign = end + 1 < text.size() && (text[end + 1] == '-' || text[end + 1] == '+') ? 1 : 0;
    const size_t after = digits(end + 1 + sign);
    if (after > end + 1 + sign) end = after;
  }
  return {std::strtod(std::string(text.substr(0, end)).c_str(), nullptr), end};
}

// A number with a suffix: k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024. Nothing readable gives NaN.
double parse_scaled(std::string text, bool bytes) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto [value, length] = leading_number(text, false);
  if (length == 0) return NAN;
  std::string_view rest = std::string_view(text).substr(length);
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  if (bytes && rest.ends_with('b')) rest.remove_suffix(1);
  if (rest.empty()) return value;
  const size_t power = std::string_view("kmgt").find(rest.front());
  const bool is_binary = rest.substr(1) == "i";
  if (power == std::string_view::npos || (!is_binary && rest.size() > 1)) return NAN;
  return value * std::pow(is_binary ? 1024 : 1000, static_cast<double>(power + 1));
}

template <class Accepts>
CLI::Validator number_that(const Accepts& accepts, const std::string& expected, const char* name) {
  const auto check = [accepts, expected](const std::string& text) -> std::string {
    double number = NAN;
    const bool known = CLI::detail::lexical_cast(text, number);
    return known && std::isfinite(number) && accepts(number) ? "" : "expected " + expected + ", got " + text;
  };
  return CLI::Validator(check, name);
}

CLI::Validator positive() {
  return number_that([](double x) { return x > 0; }, "a finite number > 0", "POSITIVE");
}

}  // namespace

CLI::Validator non_negative() {
  return number_that([](double x) { return x >= 0; }, "a finite number >= 0", "NONNEGATIVE");
}

void add_loss_options(CLI::App& command, LossOptions& options, bool has_seed) {
  const auto add = [&](const char* group, const char* name, auto& value, const char* help) {
    return command.add_option(name, value, help)->group(group)->capture_default_str();
  };
  constexpr const char* kLoss = "The loss";
  add(kLoss, "--scale", options.scale, "Factor of the logits before bias and softcap: a model's logit scale");
  add(kLoss, "--softcap", options.softcap, "Logits become softcap * tanh(logits / softcap); 0: no cap")
      ->check(non_negative());
  add(kLoss, "--temperature", options.temperature, "Logits are divided by it, after the softcap")
      ->check(positive());
  add(kLoss, "--label-smoothing", options.label_smoothing, "Share of the target spread over the vocabulary")
      ->check(CLI::Range(0.0, 1.0));
  add(kLoss, "--z-loss", options.z_loss, "Factor of lse^2 added to each token's loss")->check(non_negative());
  add(kLoss, "--compute-dtype", options.compute_dtype,
      "bf16 or f16: hidden and classifier are rounded to it for the products, a part at a time");
  command
      .add_flag("--tf32", options.allow_tf32, "CUDA: products of float32 operands may round these to TF32")
      ->group(kLoss);
  command
      .add_flag(
          "--batch-invariant", options.batch_invariant,
          "A row's loss and statistics have the same bits in any batch, under any budget and in any pass")
      ->group(kLoss);
  command.add_option(
      "--budget", options.budget,
      "Most bytes of workspace, such as 256MiB or 1GB; never exceeded. fastest: as the fastest plan wants. "
      "Default: the smallest plan within 3% of the fastest, and no more than a quarter of the float32 logits "
      "+ 64 MiB while that costs at most 6%");

  constexpr const char* kGroup = "Gradients";
  add(kGroup, "--gradient", options.gradient,
      "exact, or thinned: unbiased, from a few elements of each softmax, and exact where that could be "
      "slower; "
      "or always-thinned")
      ->check(CLI::IsMember({kGradients[0], kGradients[1], kGradients[2]}));
  add(kGroup, "--threshold", options.threshold,
      "Thinned: probabilities of at least this are kept, smaller ones drawn; 0.001 or 2^-10")
      ->default_str("2^" + std::to_string(std::ilogb(LOGITLESS_DEFAULT_THRESHOLD)));
  if (!has_seed) return;
  add(kGroup, "--gradient-seed", options.seed, "Thinned: seed of the draw; the same one, the same bits");
}

void apply(const LossOptions& options, Problem& problem) {
  problem.scale = options.scale;
  problem.softcap = options.softcap;
  problem.temperature = options.temperature;
  problem.label_smoothing = options.label_smoothing;
  problem.z_loss = options.z_loss;
  if (!options.compute_dtype.empty()) {
    problem.compute_dtype = parse_dtype("--compute-dtype", options.compute_dtype);
  }
  problem.allow_tf32 = options.allow_tf32;
  problem.batch_invariant = options.batch_invariant;
  if (!options.budget.empty()) {
    problem.max_workspace_bytes = parse_budget("--budget", options.budget);
    if (problem.max_workspace_bytes == 0)
      throw UsageError("--budget: expected more than 0 bytes, got '" + options.budget + "'");
  }
  const double threshold = options.threshold.empty() ? LOGITLESS_DEFAULT_THRESHOLD
                                                     : parse_threshold("--threshold", options.threshold);
  for (size_t i = 1; i < kGradients.size(); ++i) {
    if (options.gradient == kGradients[i])
      set_gradient(problem, static_cast<Gradient>(i), threshold, options.seed);
  }
}

uint64_t parse_budget(const std::string& option, const std::string& text) {
  if (text == "fastest") return LOGITLESS_FASTEST;
  const double bytes = parse_scaled(text, true);
  if (!(bytes >= 0 && bytes < 0x1p62)) {
    throw UsageError(option + ": expected a size such as 256MiB or 1GB, got '" + text + "'");
  }
  return static_cast<uint64_t>(bytes);
}

double parse_threshold(const std::string& option, const std::string& text) {
  const bool is_power = text.starts_with("2^");
  const std::string_view digits = std::string_view(text).substr(is_power ? 2 : 0);
  const auto [number, length] = leading_number(digits, true);
  const double value = length != digits.size() ? NAN : is_power ? std::exp2(number) : number;
  if (!(value > 0 && value <= 1)) {
    throw UsageError(option + ": expected a number in (0, 1], such as 0.001 or 2^-10, got '" + text + "'");
  }
  return value;
}

int64_t parse_count(const std::string& option, const std::string& text) {
  const double count = parse_scaled(text, false);
  if (!(count >= 0 && count <= 0x1p53 && count == std::floor(count))) {
    throw UsageError(option + ": expected a whole number such as 4096 or 128Ki, got '" + text + "'");
  }
  return static_cast<int64_t>(count);
}

const char* gradient_text(int32_t gradient) {
  return kGradients.at(static_cast<size_t>(gradient));
}

logitless_dtype parse_dtype(const std::string& option, const std::string& text) {
  for (int dtype = LOGITLESS_F32; dtype <= LOGITLESS_F64; ++dtype) {
    const DTypeRow& row = kDTypes[static_cast<size_t>(dtype)];
    if (text == row.text || text == row.long_text) return static_cast<logitless_dtype>(dtype);
  }
  throw UsageError(option + ": expected f32, bf16, f16 or f64, got '" + text + "'");
}

const char* dtype_text(int32_t dtype) {
  return kDTypes.at(static_cast<size_t>(dtype)).text;
}

int64_t dtype_bytes(int32_t dtype) {
  return bits_of(element_from_dtype(dtype)) / 8;
}

logitless_dtype dtype_from_element(ElementType type) {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].element == type) return static_cast<logitless_dtype>(i);
  }
  throw std::logic_error("no dtype for elements of type " + std::string(name_of(type)));
}

ElementType element_from_dtype(int32_t dtype) {
  return kDTypes.at(static_cast<size_t>(dtype)).element;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

}  // namespace logitless::cli
