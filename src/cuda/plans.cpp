#include "cuda/plans.h"

#include <algorithm>
#include <map>

#include "cuda/gemm.h"
#include "cuda/sm90/logits.h"

namespace headroom::cuda {
namespace {

// For predicted times only: what plain products and copies reach on an H200, scaled by the processors of
// others.
constexpr double kFlopPerProcessor = 5.2e12;
constexpr double kBytesPerSecond = 4e12;
constexpr double kLaunchSeconds = 5e-6;
// A window's products end in a part-filled wave of tiles each.
constexpr double kWindowSeconds = 40e-6;
constexpr int64_t kSmallestWindow = 64;
constexpr int64_t kWindowStep = 768;  // a whole number of tiles of all widths

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

class Planner {
 public:
  Planner(const Problem& problem, const Device& device, const std::string& asked, size_t budget)
      : p_(problem),
        device_(device),
        budget_(budget),
        choice_(choose_implementation(problem, device, asked)) {}

  std::vector<Plan> all() {
    for (const int64_t gemm_bytes : {static_cast<int64_t>(kGemmScratchBytes), int64_t{4} << 20, int64_t{0}}) {
      for (const auto& [rows, columns] : scratches()) {
        base_ = PlanDetail{};
        base_.implementation = choice_.implementation;
        base_.copies_classifier =
            p_.unaligned_rows || p_.hidden != padded_hidden(p_) || p_.classifier_dtype != operand_dtype(p_);
        base_.scratch_rows = rows;
        base_.scratch_columns = columns;
        base_.gemm_bytes = needs_products() ? gemm_bytes : 0;
        if (p_.pass == Pass::kForward) {
          forward_plans();
        } else {
          if (p_.pass == Pass::kForwardBackward && can_keep_exps()) kept_plans();
          window_plans();
        }
      }
    }
    std::vector<Plan> out;
    for (const auto& [kind, plan] : best_) out.push_back(plan);
    if (std::none_of(out.begin(), out.end(),
                     [&](const Plan& plan) { return plan.workspace_bytes == smallest_.workspace_bytes; })) {
      out.push_back(smallest_);
    }
    return out;
  }

 private:
  bool sm90() const { return choice_.implementation == Implementation::kSm90; }
  bool needs_products() const { return p_.needs_backward() || !sm90(); }

  // fp32 logits at once (portable): larger blocks make faster products.
  std::vector<std::pair<int64_t, int64_t>> scratches() const {
    if (sm90()) return {{0, 0}};
    const int64_t rows = std::max<int64_t>(p_.tokens, 1);
    std::vector<std::pair<int64_t, int64_t>> out;
    for (const int64_t edge : {16384, 4096, 1024, 256, 64}) {
      out.emplace_back(std::min<int64_t>(rows, edge / 4), std::min<int64_t>((p_.vocab + 3) / 4 * 4, edge));
    }
    return out;
  }

  // Exps can become gradients by a factor for each row only: not with a term that is no multiple of p.
  bool can_keep_exps() const { return operand_dtype(p_) != DType::kF16 && p_.label_smoothing == 0; }

  bool hidden_is_operand() const {
    return !p_.unaligned_rows && p_.hidden == padded_hidden(p_) && p_.hidden_dtype == operand_dtype(p_);
  }

  std::vector<int64_t> token_chunks() const {
    const int64_t all = std::max<int64_t>(p_.tokens, 1);
    std::vector<int64_t> chunks;
    for (int64_t parts = 1; parts <= 64; parts = parts < 8 ? parts + 1 : parts * 2) {
      const int64_t rows = ceil_div(ceil_div(all, parts), 256) * 256;
      const int64_t chunk = parts == 1 ? all : std::min(all, rows);
      if (chunks.empty() || chunk < chunks.back()) chunks.push_back(chunk);
    }
    return chunks;
  }

  void forward_plans() {
    base_.source = hidden_is_operand() ? HiddenSource::kCaller : HiddenSource::kWorkspace;
    for (const int64_t chunk : base_.source == HiddenSource::kCaller
                                   ? std::vector{std::max<int64_t>(p_.tokens, 1)}
                                   : token_chunks()) {
      for (int64_t window = base_.copies_classifier ? std::min<int64_t>(p_.vocab, 32 * kWindowStep)
                                                    : p_.vocab;
           ; window = ceil_div(window, 4)) {
        PlanDetail d = base_;
        d.vocab_window = window;
        consider(PlanKind::kForward, chunk, d);
        if (!base_.copies_classifier || window <= kSmallestWindow) break;
      }
    }
  }

  // Copied rows in the gradient's own buffer cost nothing; it must be as the operand is, and hold nothing
  // yet.
  HiddenSource backward_source(int64_t chunk) const {
    const bool fits = p_.want_d_hidden && !p_.accumulate_d_hidden && p_.d_hidden_dtype == operand_dtype(p_) &&
                      !p_.unaligned_rows && p_.hidden == padded_hidden(p_) && chunk >= p_.tokens;
    return fits ? HiddenSource::kOutput : HiddenSource::kWorkspace;
  }

  void kept_plans() {
    for (const int64_t chunk : token_chunks()) {
      const int64_t chunks = ceil_div(std::max<int64_t>(p_.tokens, 1), chunk);
      const bool native = writes_d_classifier(p_) && p_.d_classifier_dtype != DType::kF32;
      for (const bool rounds : {false, true}) {
        // One rounding more than a single chunk's: only for two chunks, where fp32 sums do not fit.
        if (rounds && !(chunks == 2 && native && p_.want_d_classifier)) continue;
        PlanDetail d = base_;
        d.source = backward_source(chunk);
        d.rounds_between_chunks = rounds;
        d.vocab_window = base_.copies_classifier || !writes_d_classifier(p_)
                             ? std::min<int64_t>(p_.vocab, 32 * kWindowStep)
                             : p_.vocab;
        consider(chunk >= p_.tokens ? PlanKind::kWhole : PlanKind::kTokenChunks, chunk, d);
      }
    }
  }

  void window_plans() {
    const PlanKind kind = p_.pass == Pass::kBackward ? PlanKind::kBackward : PlanKind::kVocabChunks;
    const int64_t chunk = std::max<int64_t>(p_.tokens, 1);
    PlanDetail d = base_;
    d.source = backward_source(chunk);
    d.vocab_window = p_.vocab;
    consider(kind, chunk, d);
    // The widest window that fits, and the narrowest of all.
    int64_t fits = 0, too_many = ceil_div(p_.vocab, kWindowStep);
    while (budget_ != 0 && too_many - fits > 1) {
      const int64_t steps = fits + (too_many - fits) / 2;
      d.vocab_window = steps * kWindowStep;
      (bytes_of(kind, chunk, d) <= budget_ ? fits : too_many) = steps;
    }
    for (const int64_t window : {fits * kWindowStep, int64_t{384}, kSmallestWindow}) {
      d.vocab_window = window;
      if (window > 0 && window < p_.vocab) consider(kind, chunk, d);
    }
  }

  Plan plan_of(PlanKind kind, int64_t chunk, PlanDetail d) const {
    Plan plan;
    plan.kind = kind;
    plan.token_chunk = chunk;
    d.slots = p_.needs_forward() && sm90() ? fused(chunk, d).slots : 1;
    d.store(&plan);
    return plan;
  }

  // What the fused kernel that keeps statistics needs and is called.
  sm90::LogitsPlan fused(int64_t chunk, const PlanDetail& d) const {
    LogitsArgs args;
    args.epilogue = p_.needs_forward() ? Epilogue::kStats : Epilogue::kGradient;
    args.dtype = operand_dtype(p_);
    args.rows = chunk;
    args.columns = p_.vocab;
    args.depth = padded_hidden(p_);
    args.scale = static_cast<float>(p_.scale);
    args.softcap = static_cast<float>(p_.softcap);
    return sm90::plan_logits(args, device_.processors, d.source != HiddenSource::kCaller);
  }

  size_t bytes_of(PlanKind kind, int64_t chunk, const PlanDetail& d) const {
    Workspace counter;
    lay_out(p_, plan_of(kind, chunk, d), counter);
    return counter.used();
  }

  void consider(PlanKind kind, int64_t chunk, const PlanDetail& d) {
    Plan plan = plan_of(kind, chunk, d);
    Workspace counter;
    lay_out(p_, plan, counter);
    plan.workspace_bytes = counter.used();
    plan.cost_f = cost_of(plan);
    plan.predicted_seconds = seconds_of(plan, d);
    plan.config = config_of(plan, d);
    if (smallest_.workspace_bytes == 0 || plan.workspace_bytes < smallest_.workspace_bytes) smallest_ = plan;
    if (budget_ != 0 && plan.workspace_bytes > budget_) return;
    const auto [at, is_new] = best_.try_emplace(kind, plan);
    const bool faster = plan.predicted_seconds < at->second.predicted_seconds ||
                        (plan.predicted_seconds == at->second.predicted_seconds &&
                         plan.workspace_bytes < at->second.workspace_bytes);
    if (!is_new && faster) at->second = plan;
  }

  double cost_of(const Plan& plan) const {
    double cost = p_.needs_forward() ? 1 : 0;
    if (!p_.needs_backward()) return cost;
    if (!keeps_exps(plan)) cost += 1;
    return cost + (p_.want_d_hidden ? 1 : 0) + (p_.want_d_classifier ? 1 : 0);
  }

  double seconds_of(const Plan& plan, const PlanDetail& d) const {
    const auto n = static_cast<double>(p_.tokens), v = static_cast<double>(p_.vocab),
               h = static_cast<double>(p_.hidden);
    const auto chunks = static_cast<double>(ceil_div(std::max<int64_t>(p_.tokens, 1), plan.token_chunk));
    const auto windows = static_cast<double>(ceil_div(p_.vocab, d.vocab_window));
    const double rate = kFlopPerProcessor * std::max(device_.processors, 1);
    const double peak_share = operand_dtype(p_) == DType::kF32 ? 0.06 : 1;  // fp32 is not rounded to tf32
    double bytes = plan.cost_f * (n * h + chunks * v * h) * 2;
    double launches = 20;
    if (p_.needs_backward()) {
      bytes += 3 * 2 * n * v;  // exps or dz are written once and read twice
      if (p_.want_d_hidden) bytes += windows * 8 * n * h;
      if (p_.want_d_classifier) bytes += chunks * v * h * (d.rounds_between_chunks || chunks == 1 ? 4 : 8);
      launches += windows * 5;
    }
    if (!sm90()) {
      const double blocks = static_cast<double>(ceil_div(plan.token_chunk, d.scratch_rows)) * chunks *
                            static_cast<double>(ceil_div(p_.vocab, d.scratch_columns));
      bytes += plan.cost_f * 8 * n * v;
      launches += plan.cost_f * 2 * blocks;
    }
    const double copies = d.copies_classifier ? plan.cost_f * chunks * v * h * 4 : 0;
    // Less room for split-K sums costs little, but something: the larger one is taken where it fits.
    const double scratch = d.gemm_bytes == static_cast<int64_t>(kGemmScratchBytes) ? 0 : 10e-6;
    return gemm_flop(p_) * plan.cost_f / (rate * peak_share) + (bytes + copies) / kBytesPerSecond / 4 +
           launches * kLaunchSeconds + (p_.needs_backward() ? windows * chunks * kWindowSeconds : 0) +
           scratch;
  }

  std::string config_of(const Plan& plan, const PlanDetail& d) const {
    static const char* const kSources[] = {"in place", "in d_hidden", "copied"};
    std::string text = sm90() ? sm90::describe(fused(plan.token_chunk, d).instance.config) : "portable";
    text += ", rows " + std::string(kSources[static_cast<int>(d.source)]);
    if (d.copies_classifier) text += ", classifier copied";
    if (d.vocab_window < p_.vocab) text += ", window " + std::to_string(d.vocab_window);
    if (plan.token_chunk < p_.tokens) text += ", chunk " + std::to_string(plan.token_chunk);
    if (d.rounds_between_chunks) text += ", rounded twice";
    return text;
  }

  const Problem& p_;
  const Device& device_;
  const size_t budget_;
  const Choice choice_;
  PlanDetail base_;
  std::map<PlanKind, Plan> best_;
  Plan smallest_;
};

}  // namespace

Choice choose_implementation(const Problem& p, const Device& device, const std::string& asked) {
  if (asked == "portable") return {Implementation::kPortable, "asked for"};
  if (device.capability != 90) return {Implementation::kPortable, "sm90 needs compute capability 9.0"};
  const DType dtype = operand_dtype(p);
  if (dtype == DType::kF32)
    return {Implementation::kPortable, "sm90 needs both operands in bf16, or both in fp16"};
  return {Implementation::kSm90, "compute capability 9.0 and 16-bit operands"};
}

std::vector<Plan> make_plans(const Problem& problem, const Device& device, const std::string& asked,
                             size_t max_workspace_bytes) {
  return Planner(problem, device, asked, max_workspace_bytes).all();
}

}  // namespace headroom::cuda
