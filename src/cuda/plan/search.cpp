#include "cuda/plan/plans.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/logit_transform.h"
#include "cuda/engines/kernel_times.h"
#include "cuda/plan/describe.h"
#include "cuda/plan/sizes.h"
#include "cuda/run/bound_plan.h"
#include "cuda/run/sparsified/arena.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

// With batch_invariant, both are EngineTraits::partial_columns.
constexpr int64_t kSmallestWindow = 64;
constexpr int64_t kWindowStep = 192;  // a tile of the fused kernel
static_assert(kWindowStep % kExponentColumns == 0);
// How many numbers of windows are tried, from the fewest on; the second applies after each number of kept
// columns.
constexpr int64_t kMoreWindows = 8, kMoreWindowsAfterKept = 3;
constexpr int64_t kCopiedWindow = 24576;  // columns, of a copied weight or a staged gradient
// Most chunks whose d_weight may be added up in its own dtype. Plans get up to kRoundingsInNeed only in
// budgets so small that the others would have windows narrower than kNarrowWindow, which are slow.
constexpr int64_t kMostRoundings = 3, kRoundingsInNeed = 8;
constexpr int64_t kNarrowWindow = 2048;
// Bytes of the weight that are rounded at a time. The smaller ones are for small budgets.
constexpr int64_t kRoundedBytes[] = {int64_t{48} << 20, int64_t{6} << 20, 0};
constexpr int64_t kSavedWindow = 1024;  // narrowest of the windows beside saved exp logits

// Returns candidates for the number of rows that are worked on at once, the largest first. All but that are
// those of the largest number of tokens of the class.
std::vector<int64_t> token_chunks(int64_t tokens) {
  const int64_t all = std::max<int64_t>(tokens, 1), largest = largest_of_class(all);
  std::vector<int64_t> chunks;
  for (int64_t parts = 1; parts <= 64; parts = parts < 8 ? parts + 1 : parts * 2) {
    const int64_t rows = ceil_div(ceil_div(largest, parts), 256) * 256;
    const int64_t chunk = parts == 1 ? all : std::min(all, rows);
    if (chunks.empty() || chunk < chunks.back()) chunks.push_back(chunk);
  }
  return chunks;
}

// Returns the columns, at most `most`, of a block of logits whose product leaves the fewest processors idle
// in its last wave of tiles.
int64_t columns_in_whole_waves(const Problem& p, const Device& device, int64_t rows, int64_t most) {
  const KernelTimes times(p, device);
  int64_t best = most;
  for (int64_t columns = most; columns > most / 2; columns -= 64) {
    const auto seconds_of_column = [&](int64_t n) {
      return times.product(rows, n, p.hidden) / static_cast<double>(n);
    };
    if (seconds_of_column(columns) < 0.99 * seconds_of_column(best)) best = columns;
  }
  return best;
}

// A block of fp32 logits: larger blocks make faster products. With batch_invariant its columns are multiples
// of `step`.
struct ScratchBlock {
  int64_t rows, columns;
};
std::vector<ScratchBlock> scratch_blocks(const Problem& p, const Device& device, int64_t step) {
  // Pairs of most rows and total logits. Three of the first block take 96 MiB, and its product has whole
  // waves of tiles on an H100. A device with a larger L2 gets a larger one, of 5/8 of it. The others are for
  // small budgets.
  const int64_t in_l2 = device.l2_bytes / 8 * 5 / static_cast<int64_t>(sizeof(float));
  const std::pair<int64_t, int64_t> sizes[] = {{4096, std::max<int64_t>(1 << 23, in_l2)},
                                               {4096, 1 << 21},
                                               {2048, 1 << 19},
                                               {256, 1 << 16},
                                               {16, 1 << 10}};
  std::vector<ScratchBlock> blocks;
  for (const auto& [most_rows, logits] : sizes) {
    // Equal parts of the tokens, in whole tiles: a part of a few rows would read the whole weight again.
    const int64_t tile = std::min<int64_t>(256, most_rows / 8);
    const int64_t tokens = largest_of_class(p.tokens);
    const int64_t part = ceil_div(tokens, ceil_div(tokens, most_rows));
    const int64_t rows = tokens <= most_rows ? tokens : std::min(ceil_div(part, tile) * tile, most_rows);
    int64_t columns = logits / rows / 64 * 64;
    if (logits > 1 << 23) columns = columns_in_whole_waves(p, device, rows, columns);
    if (p.batch_invariant) columns = ceil_div(columns, step) * step;
    blocks.push_back({std::clamp<int64_t>(p.tokens, 1, rows), std::min((p.vocab + 3) / 4 * 4, columns)});
  }
  return blocks;
}

class Search {
 public:
  Search(const Problem& problem, const Device& device, const Choice& choice, uint64_t budget)
      : p_(problem),
        device_(device),
        budget_(budget),
        choice_(choice),
        traits_(choice.engine->traits()),
        window_step_(problem.batch_invariant ? traits_.partial_columns : kWindowStep),
        smallest_window_(problem.batch_invariant ? traits_.partial_columns : kSmallestWindow),
        saves_(can_save_exp_logits()),
        saved_columns_(saves_ && !chooses_saved() ? columns_of(p_.saved_bytes) : 0) {}

  std::vector<Plan> all() {
    consider_all();
    if (budget_ != 0 && p_.needs_backward() && !p_.is_sparsified() && may_round(kRoundingsInNeed)) {
      consider_in_need();
    }
    std::vector<Plan> out;
    out.reserve(best_.size() + 1);
    for (const auto& [kind, candidate] : best_) out.push_back(described(candidate));
    near_fastest_.for_each([&](const Candidate& candidate) {
      const Candidate& best = best_.at(candidate.detail.kind);
      if (candidate.bytes != best.bytes) out.push_back(described(candidate));
    });
    if (std::none_of(out.begin(), out.end(),
                     [&](const Plan& plan) { return plan.counted_bytes() == smallest_.bytes; })) {
      out.push_back(described(smallest_));
    }
    return out;
  }

 private:
  // A plan as far as choosing one needs it: thousands may be compared for one problem.
  struct Candidate {
    PlanDetail detail;
    uint64_t bytes = 0;  // that a budget limits
    double seconds = 0;
  };

  // Does not depend on the budget: a larger one includes these plans, so it is never slower than a smaller
  // one.
  void consider_in_need() {
    budget_ = std::min(budget_, bytes_in_need());
    fewest_chunks_ = kMostRoundings + 1;
    most_roundings_ = kRoundingsInNeed;
    consider_all();
  }

  // Returns the bytes from which on plans with few roundings have windows that are not narrow.
  uint64_t bytes_in_need() const {
    PlanDetail d = base_;  // the last one, with the least scratch
    d.source = backward_source();
    d.vocab_window = std::min(p_.vocab, kNarrowWindow);
    d.cached_columns = 0;
    uint64_t least = 0;
    for (const int64_t chunk : token_chunks(p_.tokens)) {
      if (chunks_of(chunk) > kMostRoundings) break;
      d.rounds_between_chunks = may_round(chunks_of(chunk));
      const uint64_t bytes = counted_bytes(window_kind(), chunk, d);
      if (least == 0 || bytes < least) least = bytes;
    }
    return least;
  }

  void consider_all() {
    for (const int64_t gemm_bytes : gemm_scratches()) {
      for (const auto& [rows, columns] : scratches()) {
        for (const int64_t rounded_window : rounded_windows()) {
          base_ = PlanDetail{};
          base_.rounded_window = rounded_window;
          base_.engine = choice_.engine;
          base_.copies_weight =
              p_.unaligned_rows || p_.hidden != padded_hidden(p_) || p_.dtype.weight != operand_dtype(p_);
          base_.scratch_rows = rows;
          base_.scratch_columns = columns;
          base_.gemm_bytes = gemm_bytes;
          if (p_.is_sparsified()) {
            sparsified_plan();
          } else if (p_.pass == Pass::kForward) {
            forward_plans();
          } else {
            if (saves_ && fewest_chunks_ == 1) saved_plans();
            if (can_keep_exp_logits() && fewest_chunks_ == 1) kept_plans();
            if (saved_columns_ == 0) window_plans();
          }
        }
      }
    }
  }

  // Returns the numbers of columns that may be rounded at once where logits need it, in whole tiles.
  std::vector<int64_t> rounded_windows() const {
    if (!p_.has_fp8_logits()) return {0};
    const int64_t step = std::max(window_step_, kWindowStep);
    const int64_t row_bytes =
        rounded_stride(p_) * static_cast<int64_t>(size_of(rounded_dtype(traits_.has_e4m3)));
    std::vector<int64_t> windows;
    for (const int64_t bytes : kRoundedBytes) {
      const int64_t columns = std::min(p_.vocab, std::max<int64_t>(bytes / row_bytes / step, 1) * step);
      if (windows.empty() || columns < windows.back()) windows.push_back(columns);
    }
    return windows;
  }

  bool needs_products() const { return p_.needs_backward() || traits_.needs_scratch; }

  std::vector<int64_t> gemm_scratches() const {
    if (p_.is_sparsified()) return {sparsified_gemm_bytes(p_)};
    if (!needs_products()) return {0};
    return {static_cast<int64_t>(kGemmScratchBytes), int64_t{4} << 20, 0};
  }

  std::vector<ScratchBlock> scratches() const {
    return traits_.needs_scratch ? scratch_blocks(p_, device_, window_step_)
                                 : std::vector<ScratchBlock>{{0, 0}};
  }

  bool has_exp_logits() const {
    const DType dtype = operand_dtype(p_);
    if (dtype == DType::kF64 || (has_exponents(p_) && !traits_.keeps_float16)) return false;
    // Sums of weighted logits would have other bits than those of passes that keep none.
    // Sums from operands as they are would not be those of rounded rows.
    return !p_.smooths() || (is_linear(p_) && !p_.batch_invariant && !p_.has_fp8_logits());
  }
  bool can_keep_exp_logits() const { return p_.pass == Pass::kForwardBackward && has_exp_logits(); }

  // An upstream gradient of the entropy needs linear logits.
  bool can_save_exp_logits() const {
    return p_.has.saved && p_.saved_bytes > 0 && !p_.is_sparsified() && has_exp_logits() && p_.tokens > 0 &&
           !p_.is_unmerged_shard() && (is_linear(p_) || !p_.has.grad_entropy);
  }

  // Whether the plan chooses of how many columns: only a backward pass may.
  bool chooses_saved() const { return saves_ && p_.saved_bytes >= kFastest; }

  // Returns the columns whose exp logits take these bytes, or fewer.
  int64_t columns_of(uint64_t saved_bytes) const {
    return most_columns([&](int64_t columns) {
      PlanDetail d;
      d.engine = choice_.engine;
      d.token_chunk = std::max<int64_t>(p_.tokens, 1);
      d.cached_columns = columns;
      return bytes_of(p_, d).saved <= saved_bytes;
    });
  }

  // Returns the largest number of columns that fit: all, or whole steps; 0 if not even one does.
  template <class Fits>
  int64_t most_columns(const Fits& fits) const {
    if (fits(p_.vocab)) return p_.vocab;
    int64_t fitting = 0, too_many = ceil_div(p_.vocab, window_step_);
    while (too_many - fitting > 1) {
      const int64_t steps = fitting + (too_many - fitting) / 2;
      (fits(steps * window_step_) ? fitting : too_many) = steps;
    }
    return fitting * window_step_;
  }

  // Returns the most columns that a budget allows to save, with the windows of d, for the largest number of
  // tokens of the class.
  int64_t most_saved(PlanKind kind, PlanDetail d) const {
    Problem largest = p_;
    largest.tokens = largest_of_class(p_.tokens);
    return most_columns([&](int64_t columns) {
      d.cached_columns = columns;
      return counted(bytes_of(largest, completed(kind, largest.tokens, d))) <= budget_;
    });
  }

  // Returns whether sums are made beside exp logits, relative to logit offsets. With batch_invariant this
  // must not depend on the pass: it holds in all passes, or in none if offsets are chosen later.
  bool is_relative_to_offset(const PlanDetail& d) const {
    if (!p_.needs_forward() || p_.is_sparsified()) return false;
    return p_.batch_invariant ? traits_.offsets_first && has_exp_logits() : d.cached_columns > 0;
  }

  bool hidden_is_operand() const {
    return !p_.unaligned_rows && p_.hidden == padded_hidden(p_) && p_.dtype.hidden == operand_dtype(p_);
  }

  int64_t chunks_of(int64_t chunk) const { return ceil_div(std::max<int64_t>(p_.tokens, 1), chunk); }

  void forward_plans() {
    base_.cached_columns = saved_columns_;
    if (saved_columns_ > 0) return forward_plans_of(HiddenSource::kWorkspace, {p_.tokens});
    const bool lists = p_.top_k > 0 && traits_.top_groups > 0;
    if (hidden_is_operand()) {
      forward_plans_of(HiddenSource::kCaller, {std::max<int64_t>(p_.tokens, 1)});
      // Else fewer rows at a time make lists, partials, samples or rounded rows smaller.
      const bool one = !lists && !p_.batch_invariant && p_.num_samples == 0 && !p_.has_fp8_logits();
      if (one) return;
    }
    forward_plans_of(HiddenSource::kWorkspace, token_chunks(p_.tokens));
  }

  void forward_plans_of(HiddenSource source, const std::vector<int64_t>& chunks) {
    base_.source = source;
    for (const int64_t chunk : chunks) {
      for (const int64_t window : copied_windows(chunk)) {
        base_.vocab_window = window;
        consider(PlanKind::kForward, chunk, base_);
      }
    }
  }

  // Returns the numbers of columns whose weight rows are copied at once; all, if the weight is not copied.
  // The saved exp logits of a window must begin at a multiple of 16 bytes, and in float16 with a group.
  std::vector<int64_t> copied_windows(int64_t chunk) const {
    if (!base_.copies_weight) return {p_.vocab};
    std::vector<int64_t> windows;
    // Masks have words of 32 columns.
    const bool cuts_at_multiples = p_.batch_invariant || saved_columns_ > 0 || p_.has.sample_mask;
    int64_t least = cuts_at_multiples ? smallest_window_ : 1;
    if (saved_columns_ > 0 && has_exponents(p_)) least = window_step_;
    for (int64_t most = std::min(p_.vocab, kCopiedWindow);;
         most = ceil_div(ceil_div(most, 4), least) * least) {
      windows.push_back(in_whole_waves(most, chunk));
      if (most <= std::max(least, smallest_window_)) return windows;
    }
  }

  // Returns the sizes of a launch of a chunk of tokens over the whole vocabulary.
  LogitsArgs launch_of(const EpilogueArgs& epilogue, int64_t chunk) const {
    LogitsArgs args;
    args.of_epilogue = epilogue;
    args.dtype = p_.has_fp8_logits() ? rounded_dtype(traits_.has_e4m3) : operand_dtype(p_);
    args.rows = chunk;
    args.columns = p_.vocab;
    args.depth = p_.has_fp8_logits() ? rounded_stride(p_) : padded_hidden(p_);
    args.transform = logit_transform<float>(p_);
    args.batch_invariant = p_.batch_invariant;
    return args;
  }

  // Returns the sizes of a draw from a screen's rounded operands.
  LogitsArgs screened_draw(int64_t chunk) const {
    LogitsArgs args = launch_of(DrawArgs{}, chunk);
    args.dtype = rounded_dtype(traits_.has_e4m3);
    args.depth = rounded_stride(p_);
    return args;
  }

  // Returns the partials of the row statistics of a chunk; 1 without statistics.
  int64_t partials_of(int64_t chunk) const {
    const auto [at, is_new] = partials_.try_emplace(chunk, 1);
    if (is_new && p_.needs_forward()) {
      at->second = choice_.engine->partials(launch_of(forward_epilogue(p_), chunk), device_);
    }
    if (is_new && p_.is_sparsified()) {
      at->second =
          std::max<int64_t>(at->second, choice_.engine->partials(launch_of(DrawArgs{}, chunk), device_));
    }
    if (is_new && p_.screens()) {
      at->second = std::max<int64_t>(at->second, choice_.engine->partials(screened_draw(chunk), device_));
    }
    return at->second;
  }

  // Returns the engine's configuration, as text for people, of the launch that takes most of the time.
  std::string config_of(int64_t chunk) const {
    const auto main_epilogue = [&]() -> EpilogueArgs {
      if (p_.is_sparsified()) return DrawArgs{};
      return p_.needs_forward() ? forward_epilogue(p_) : GradientArgs{};
    };
    return choice_.engine->config(launch_of(main_epilogue(), chunk));
  }

  // Returns a window of at most `most` columns whose last wave of tiles leaves few processors idle.
  int64_t in_whole_waves(int64_t most, int64_t chunk) const {
    const EngineTiles tile = choice_.engine->tiles(launch_of(StatsArgs{}, chunk), device_);
    if (most >= p_.vocab) return most;
    if (tile.rows == 0) return p_.batch_invariant ? most / window_step_ * window_step_ : most;
    const int64_t units = ceil_div(chunk, tile.rows), clusters = tile.at_once;
    const auto waves = [&](int64_t tiles) { return ceil_div(units * tiles, clusters); };
    int64_t best = most / window_step_;
    for (int64_t tiles = best - 1, half = best / 2; tiles > half; --tiles) {
      if (tiles * waves(best) > best * waves(tiles)) best = tiles;
    }
    return best > 0 ? best * window_step_ : most;
  }

  // All rows at once, and windows that no budget changes, because sums depend on them.
  void sparsified_plan() {
    base_.source = hidden_is_operand() ? HiddenSource::kCaller : HiddenSource::kWorkspace;
    base_.vocab_window = base_.copies_weight ? std::min(p_.vocab, kCopiedWindow) : p_.vocab;
    consider(PlanKind::kSparsified, std::max<int64_t>(p_.tokens, 1), base_);
  }

  // Copied rows in the gradient's own buffer cost nothing.
  HiddenSource backward_source() const {
    return fits_in_d_hidden(p_) ? HiddenSource::kOutput : HiddenSource::kWorkspace;
  }

  // Returns whether sums of d_weight over chunks may be kept in its own dtype, rounded once more for each
  // chunk.
  bool may_round(int64_t chunks) const {
    return chunks > 1 && p_.has.d_weight && writes_d_weight(p_) && p_.dtype.d_weight != p_.stats_dtype();
  }

  // Considers plans that keep all exp logits of a chunk.
  void kept_plans() {
    for (const int64_t chunk : token_chunks(p_.tokens)) {
      PlanDetail d = base_;
      d.source = backward_source();
      d.cached_columns = p_.vocab;
      d.vocab_window = stages_apart(p_) ? std::min(p_.vocab, kCopiedWindow) : p_.vocab;
      consider_kept(chunk, d);
      if (!base_.copies_weight) continue;
      for (const int64_t windows : {2, 3, 4, 6, 8, 12, 16, 24, 32}) {  // of about the same width
        d.vocab_window = ceil_div(ceil_div(p_.vocab, windows), window_step_) * window_step_;
        const bool stages_much = stages_apart(p_) && d.vocab_window > kCopiedWindow;
        if (d.vocab_window < p_.vocab && !stages_much) consider_kept(chunk, d);
      }
    }
  }

  // Considers backward plans that begin with saved exp logits: of all columns or, in a budget, of as many as
  // some widths of windows leave room for.
  void saved_plans() {
    PlanDetail d = base_;
    d.source = backward_source();
    if (chooses_saved() && budget_ != 0) {
      for (int64_t window = kSavedWindow; window < p_.vocab; window *= 2) {
        d.vocab_window = std::max(window / window_step_ * window_step_, smallest_window_);
        d.cached_columns = most_saved(PlanKind::kBackward, d);
        if (d.cached_columns > 0) consider(PlanKind::kBackward, p_.tokens, d);
      }
    }
    d.cached_columns = chooses_saved() ? p_.vocab : saved_columns_;
    if (d.cached_columns == 0) return;
    const bool by_factor = d.cached_columns == p_.vocab && !exp_logits_become_dz(p_);
    if (by_factor && !base_.copies_weight) {
      d.vocab_window = stages_apart(p_) ? std::min(p_.vocab, kCopiedWindow) : p_.vocab;
      return consider(PlanKind::kBackward, p_.tokens, d);
    }
    const int64_t cut = exp_logits_become_dz(p_) || by_factor ? p_.vocab : p_.vocab - d.cached_columns;
    for (const int64_t windows : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
      d.vocab_window = std::min(p_.vocab, ceil_div(ceil_div(cut, windows), window_step_) * window_step_);
      if (by_factor && windows == 1) d.vocab_window = std::min(p_.vocab, kCopiedWindow);
      consider(PlanKind::kBackward, p_.tokens, d);
      if (d.vocab_window <= window_step_) break;
    }
    d.vocab_window = std::min(smallest_window_, p_.vocab);
    consider(PlanKind::kBackward, p_.tokens, d);
  }

  void consider_kept(int64_t chunk, PlanDetail d) {
    const PlanKind kind = chunk >= p_.tokens ? PlanKind::kWhole : PlanKind::kTokenChunks;
    consider(kind, chunk, d);
    d.rounds_between_chunks = may_round(chunks_of(chunk));
    if (d.rounds_between_chunks && chunks_of(chunk) <= kMostRoundings) consider(kind, chunk, d);
  }

  PlanKind window_kind() const {
    return p_.pass == Pass::kBackward ? PlanKind::kBackward : PlanKind::kVocabChunks;
  }

  void window_plans() {
    const PlanKind kind = window_kind();
    PlanDetail d = base_;
    d.source = backward_source();
    for (const int64_t chunk : token_chunks(p_.tokens)) {
      const int64_t chunks = chunks_of(chunk);
      if (chunks < fewest_chunks_) continue;
      if (may_round(chunks) && chunks > most_roundings_) break;
      d.rounds_between_chunks = may_round(chunks);
      windows_of(kind, chunk, d);
    }
  }

  // Considers one window, the fewest that fit, some more, whose products may end in fuller waves, and the
  // narrowest.
  void windows_of(PlanKind kind, int64_t chunk, PlanDetail d) {
    d.vocab_window = p_.vocab;
    consider(kind, chunk, d);
    const auto at = best_.find(kind);
    const bool worthwhile = at == best_.end() || least_seconds(kind, chunk, d) < at->second.seconds;
    if (budget_ != 0 && worthwhile) {
      equal_windows(kind, chunk, d, kMoreWindows);
      if (can_keep_exp_logits()) windows_after_kept(kind, chunk, d);
    }
    if (budget_ == 0 && scratch_penalty(d) == 1) default_windows(kind, chunk, d);
    d.vocab_window = smallest_window_;
    if (d.vocab_window < p_.vocab) consider(kind, chunk, d);
  }

  // Considers narrower windows, while they cost little.
  void default_windows(PlanKind kind, int64_t chunk, PlanDetail d) {
    for (const int64_t windows : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
      if (near_fastest_.is_too_slow(ranked_seconds(p_, kind, chunk, d, device_))) return;
      d.vocab_window = ceil_div(ceil_div(p_.vocab, windows), window_step_) * window_step_;
      if (d.vocab_window >= p_.vocab) return;
      consider(kind, chunk, d);
    }
  }

  // A lower bound of the prediction for plans of this kind and chunk.
  double least_seconds(PlanKind kind, int64_t chunk, PlanDetail d) const {
    if (can_keep_exp_logits()) d.cached_columns = p_.vocab;
    return ranked_seconds(p_, kind, chunk, d, device_);
  }

  // Divides the columns that are not kept into windows of equal size: the fewest that fit, and `more` widths
  // from there on.
  void equal_windows(PlanKind kind, int64_t chunk, PlanDetail d, int64_t more) {
    const int64_t columns = p_.vocab - d.cached_columns;
    const int64_t widest = d.cached_columns > 0 ? d.cached_columns : widest_window(kind, chunk, d, false);
    int64_t windows = ceil_div(columns, std::max(widest, smallest_window_));
    for (int64_t tried = 0; tried < more; ++tried) {
      d.vocab_window = ceil_div(ceil_div(columns, windows), window_step_) * window_step_;
      if (d.vocab_window < p_.vocab) consider(kind, chunk, d);
      if (d.vocab_window <= window_step_) break;
      windows = std::max(windows + 1, ceil_div(columns, d.vocab_window - window_step_));  // of another width
    }
  }

  // The exp logits of the first columns may still be there when the gradients need them. The windows of the
  // other columns take their place afterwards.
  void windows_after_kept(PlanKind kind, int64_t chunk, PlanDetail d) {
    const int64_t widest = widest_window(kind, chunk, d, true);
    for (int64_t sixteenths = 16; sixteenths > 12; --sixteenths) {
      d.cached_columns = widest * sixteenths / 16 / window_step_ * window_step_;
      if (d.cached_columns > 0 && d.cached_columns < p_.vocab)
        equal_windows(kind, chunk, d, kMoreWindowsAfterKept);
    }
  }

  // Returns the most columns, in steps, that a budget allows for the largest number of tokens of the class; 0
  // if not even one step fits. So a new number of tokens seldom has new products, whose first use takes the
  // host milliseconds.
  int64_t widest_window(PlanKind kind, int64_t chunk, PlanDetail d, bool keeps) const {
    Problem largest = p_;
    largest.tokens = largest_of_class(p_.tokens);
    if (chunk == p_.tokens) chunk = largest.tokens;
    int64_t fits = 0, too_many = ceil_div(p_.vocab, window_step_);
    while (too_many - fits > 1) {
      const int64_t steps = fits + (too_many - fits) / 2;
      d.vocab_window = steps * window_step_;
      if (keeps) d.cached_columns = d.vocab_window;
      (counted(bytes_of(largest, completed(kind, chunk, d))) <= budget_ ? fits : too_many) = steps;
    }
    return fits * window_step_;
  }

  PlanDetail completed(PlanKind kind, int64_t chunk, PlanDetail d) const {
    d.kind = kind;
    d.token_chunk = chunk;
    d.scratch_rows = std::min(d.scratch_rows, chunk);
    d.partials = partials_of(chunk);
    d.relative_to_offset = is_relative_to_offset(d);
    // Label smoothing has further rows of hidden behind the copies. Upstream gradients do not decide about
    // them: with fewer of these, saved exp logits must not need more memory.
    const bool more_rows = d.cached_columns > 0 && p_.has.d_weight && has_smoothing_rows(p_);
    if (d.source == HiddenSource::kOutput && more_rows) d.source = HiddenSource::kWorkspace;
    return d;
  }

  // Returns what a budget limits.
  uint64_t counted(const PlanBytes& bytes) const {
    return bytes.workspace + bytes.screen_weight + (p_.is_sparsified() ? 0 : bytes.saved);
  }
  uint64_t counted_bytes(PlanKind kind, int64_t chunk, const PlanDetail& d) const {
    return counted(bytes_of(p_, completed(kind, chunk, d)));
  }

  void consider(PlanKind kind, int64_t chunk, const PlanDetail& d) {
    Candidate made{completed(kind, chunk, d), counted_bytes(kind, chunk, d), 0};
    const bool smaller = smallest_.bytes == 0 || made.bytes < smallest_.bytes;
    const bool fits = budget_ == 0 || made.bytes <= budget_;
    if (!smaller && !fits) return;
    made.seconds = ranked_seconds(p_, kind, chunk, d, device_);
    if (smaller) smallest_ = made;
    if (!fits) return;
    const auto [at, is_new] = best_.try_emplace(kind, made);
    const Candidate& known = at->second;
    const bool faster =
        made.seconds < known.seconds || (made.seconds == known.seconds && made.bytes < known.bytes);
    if (!is_new && faster) at->second = made;
    if (budget_ == 0) {
      const double rounding = rounding_penalty(p_, chunk, d);
      near_fastest_.add({made.bytes, made.seconds / rounding, rounding * scratch_penalty(d)}, made);
    }
  }

  // By default less of it is taken only to stay within the default's bytes: its cost is not predicted.
  double scratch_penalty(const PlanDetail& d) const {
    const int64_t all = gemm_scratches().front();
    return d.gemm_bytes == all ? 1 : d.gemm_bytes > 0 ? kNearlyFastest : kFastEnough;
  }

  Plan described(const Candidate& candidate) const {
    const PlanDetail& d = candidate.detail;
    Plan plan = plan_of(p_, d);
    const PlanBytes bytes = bytes_of(p_, d);
    plan.workspace_bytes = bytes.workspace;
    plan.saved_bytes = bytes.saved;
    plan.screen_weight_bytes = bytes.screen_weight;
    plan.rounding_penalty = rounding_penalty(p_, d.token_chunk, d);
    plan.default_penalty = scratch_penalty(d);
    plan.predicted_seconds = candidate.seconds / plan.rounding_penalty;
    plan.engine = choice_.engine->name();
    plan.reason = choice_.reason;
    plan.config = config_of(d.token_chunk) + description_of(p_, d);
    plan.backend_plan = std::make_shared<CudaPlan>(p_, d, device_);
    return plan;
  }

  const Problem& p_;
  const Device& device_;
  uint64_t budget_;
  const Choice& choice_;
  const EngineTraits traits_;
  const int64_t window_step_, smallest_window_;
  const bool saves_;             // whether exp logits are saved
  const int64_t saved_columns_;  // the first ones, whose exp logits are saved if it does not
  int64_t fewest_chunks_ = 1, most_roundings_ = kMostRoundings;
  PlanDetail base_;
  std::map<PlanKind, Candidate> best_;
  DefaultCandidates<Candidate> near_fastest_;  // used without a budget
  Candidate smallest_;
  mutable std::map<int64_t, int64_t> partials_;  // by chunk
};

}  // namespace

std::vector<Plan> search_plans(const Problem& problem, const Device& device, const Choice& choice,
                               uint64_t budget) {
  return Search(problem, device, choice, budget).all();
}

}  // namespace logitless::cuda
