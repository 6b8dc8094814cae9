#include "cpu/backend.h"

#include <algorithm>
#include <map>

#include "core/group_stats.h"
#include "core/host_loss.h"
#include "cpu/run/arena.h"

namespace logitless::cpu {
namespace {

// 448 = 14 * 32 fills the register tiles of AVX-512 on either side of a product. A block's panels (448 x D)
// stay near the second level cache. Rows of more units get half the block: it is no slower, and leaves more
// of a small budget for exp logits.
constexpr int64_t kVocabBlock = 448;
constexpr int64_t kWideUnits = 1280;
constexpr int64_t kPanelColumns = 32;  // columns of the widest register tile; the block is a multiple for all
constexpr int64_t kTokenUnits = 256;   // K of one partial sum of d_weight
constexpr int64_t kMaxRange = 1024;

// Rows a multiple of 1 KiB apart would share few sets of the first level cache.
int64_t avoid_aliasing(int64_t words) {
  return words % 256 == 0 ? words + 16 : words;
}

// Two backward windows, with their gradients and panels, should stay in the last level cache, which grows
// with the number of cores. Larger windows read memory, smaller ones pay more barriers. Other sizes serve
// small budgets.
constexpr int64_t kWindowBytesPerThread = int64_t{5} << 19;
constexpr int64_t kLargestWindow = 16;
constexpr int64_t kForwardWindow = 32;

// The least work that earns a thread: several times what it takes to wake one and to wait for it.
constexpr double kLeastThreadSeconds = 200e-6;

// Bytes a second that one thread moves when it packs or adds matrices, for predicted times.
constexpr double kPackBytesPerSecond = 8e9;
// The cost of fresh memory, page faults and zeros: 0.1 s for 256 MiB.
constexpr double kFreshBytesPerSecond = 2.3e9;

// Returns a group's problem as the rank with the most work has it.
Problem largest_shard(Problem p) {
  if (!p.in_group()) return p;
  p.vocab = p.group_vocab;
  p.vocab_start = 0;
  return p;
}

class Planner {
 public:
  Planner(const Problem& problem, const BackendOptions& options, uint64_t budget)
      : shard_(problem),
        problem_(largest_shard(problem)),
        kernels_(select_kernels(problem, options.engine, &reason_)),
        shape_(make_shape(problem_, kernels_)),
        pool_(options.parallel_for),
        threads_(useful_threads(pool_.threads)),
        budget_(budget) {}

  std::vector<Plan> all() {
    if (problem_.is_sparsified()) return sparsified();
    for (int64_t chunk : token_chunks()) {
      for (Schedule schedule : schedules(chunk)) {
        consider(schedule);
        if (keeps_exp_logits(problem_)) consider_kept(schedule);
        if (const int64_t kept = blocks_kept_in_gradient(problem_, shape_, chunk); kept > 0) {
          Schedule in_gradient = schedule;
          in_gradient.kept_blocks = kept;
          in_gradient.keeps_in_gradient = true;
          consider(in_gradient);
        }
        if (sums_weight_apart(chunk)) {
          schedule.sweeps_vocabulary = true;
          consider(schedule);
        }
      }
    }
    return offered();
  }

 private:
  int useful_threads(int most) const {
    const Schedule schedule{.token_chunk = std::max<int64_t>(problem_.tokens, 1),
                            .kept_blocks = keeps_exp_logits(problem_) ? shape_.blocks : 0};
    return static_cast<int>(
        std::clamp(work_seconds(schedule) / kLeastThreadSeconds, 1.0, static_cast<double>(most)));
  }

  struct Candidate {
    Schedule schedule;
    uint64_t bytes = 0;
    double seconds = 0;
  };

  std::vector<Plan> offered() const {
    std::vector<Plan> out;
    out.reserve(best_.size() + 1);
    for (const auto& [kind, candidate] : best_) out.push_back(described(candidate));
    near_fastest_.for_each([&](const Candidate& candidate) {
      if (candidate.bytes != best_.at(kind_of(candidate.schedule)).bytes) out.push_back(described(candidate));
    });
    const bool listed = std::any_of(
        out.begin(), out.end(), [&](const Plan& plan) { return plan.workspace_bytes == smallest_.bytes; });
    if (!listed) out.push_back(described(smallest_));
    return out;
  }

  Plan described(const Candidate& candidate) const {
    const Schedule& schedule = candidate.schedule;
    Plan plan;
    plan.kind = kind_of(schedule);
    plan.workspace_bytes = candidate.bytes;
    if (problem_.is_sparsified() && problem_.has.saved) {
      Workspace counter;
      lay_out_draws(problem_, shape_, counter);
      plan.saved_bytes = counter.used();
    }
    plan.screen_weight_bytes = host_screen_weight_bytes(problem_);
    plan.cost_matmuls = cost_of(schedule);
    plan.predicted_seconds = candidate.seconds;
    plan.threads = schedule.threads;
    plan.engine = kernels_.name;
    plan.reason = reason_;
    plan.config = config_of(schedule);
    plan.token_chunk = schedule.token_chunk;
    plan.cached_columns = std::min(schedule.kept_blocks * shape_.vocab_block, problem_.vocab);
    const int64_t window = problem_.needs_backward() ? schedule.backward_window : schedule.forward_window;
    plan.vocab_window = std::min(window * shape_.vocab_block, problem_.vocab);
    count_gathers(shard_, DType::kF64, schedule.token_chunk, &plan);
    const Shape shape = make_shape(shard_, kernels_);
    plan.backend_plan = std::make_shared<CpuPlan>(shard_, kernels_, shape, of_shard(schedule, shape), pool_);
    return plan;
  }

  // Returns the schedule for this rank's shard. The shard has at most as many blocks as were planned, so it
  // needs no more memory.
  Schedule of_shard(Schedule schedule, const Shape& shape) const {
    if (schedule.keeps_in_gradient) {
      schedule.kept_blocks = blocks_kept_in_gradient(shard_, shape, schedule.token_chunk);
      schedule.keeps_in_gradient = schedule.kept_blocks > 0;
    }
    schedule.kept_blocks = std::min(schedule.kept_blocks, shape.blocks);
    return schedule;
  }

  // Windows are those of the draws (sparsified/arena.h), whatever the budget. Lists of kept elements have
  // room for all rows. Chunks take turns with the packed rows of hidden.
  std::vector<Plan> sparsified() {
    for (int64_t chunk : token_chunks()) {
      consider({.threads = threads_,
                .token_chunk = chunk,
                .forward_window = std::min(shape_.blocks, kLargestDrawWindow)});
      if (!draws_elements(problem_)) break;
    }
    return offered();
  }

  // All tokens, then halves of that in whole token blocks, so that the sums over tokens stay the same.
  std::vector<int64_t> token_chunks() const {
    const int64_t all = std::max<int64_t>(problem_.tokens, 1);
    const int64_t unit = problem_.needs_backward() ? shape_.token_block : 8 * kernels_.mr;
    std::vector<int64_t> chunks{all};
    for (int64_t chunk = ceil_div(all, 2); chunks.back() > unit; chunk = ceil_div(chunk, 2)) {
      chunks.push_back(round_up(chunk, unit));
    }
    return chunks;
  }

  // Lists schedules from the largest windows to windows of one block.
  std::vector<Schedule> schedules(int64_t chunk) const {
    const int64_t block_bytes = shape_.vocab_block * element_bytes(kernels_) *
                                (chunk + (problem_.has.d_hidden ? shape_.hidden_padded : 0));
    Schedule s{
        .threads = threads_,
        .token_chunk = chunk,
        .forward_window = std::min(shape_.blocks, kForwardWindow),
        .backward_window = std::min({shape_.blocks, kLargestWindow,
                                     std::max<int64_t>(threads_ * kWindowBytesPerThread / block_bytes, 1)}),
        .backward_windows_alive = kMostWindowsAlive};
    std::vector<Schedule> all{s};
    --s.backward_windows_alive;
    all.push_back(s);
    while (s.backward_window > 1 || s.forward_window > 1) {
      s.forward_window = ceil_div(s.forward_window, 4);
      s.backward_window = ceil_div(s.backward_window, 2);
      all.push_back(s);
    }
    return all;
  }

  // Whether chunks need an fp32 sum of d_weight beside the output.
  bool sums_weight_apart(int64_t chunk) const {
    return problem_.needs_backward() && problem_.has.d_weight && chunk < problem_.tokens &&
           problem_.dtype.d_weight != DType::kF32;
  }

  // Counts the blocks whose exp logits fit into their own rows of d_weight: all whole blocks, or none. The
  // last block may be short.
  int64_t blocks_kept_in_gradient(const Problem& p, const Shape& shape, int64_t chunk) const {
    if (!keeps_exp_logits(p) || !p.has.d_weight || p.accumulate.d_weight) return 0;
    if (chunk < p.tokens) return 0;
    const int64_t exp_logits = chunk * shape.vocab_block * element_bytes(kernels_);
    const int64_t row = p.hidden * static_cast<int64_t>(size_of(p.dtype.d_weight));
    if (exp_logits > shape.vocab_block * row) return 0;
    if (shape.blocks == 0) return 0;
    const int64_t last_rows = shape.block_columns(p.vocab, shape.blocks - 1);
    return exp_logits <= last_rows * row ? shape.blocks : shape.blocks - 1;
  }

  uint64_t bytes_of(const Schedule& schedule) const {
    Workspace counter;
    lay_out(problem_, kernels_, shape_, schedule, counter);
    return counter.used();
  }

  // Considers as many kept blocks as the budget has room for, and all of them.
  void consider_kept(Schedule schedule) {
    schedule.kept_blocks = shape_.blocks;
    consider(schedule);
    if (budget_ == 0 || shape_.blocks < 2) return;
    int64_t fits = 0;
    int64_t too_many = shape_.blocks;
    while (too_many - fits > 1) {
      schedule.kept_blocks = fits + (too_many - fits) / 2;
      (bytes_of(schedule) <= budget_ ? fits : too_many) = schedule.kept_blocks;
    }
    schedule.kept_blocks = fits;
    if (fits > 0) consider(schedule);
  }

  void consider(const Schedule& schedule) {
    Candidate made{schedule, bytes_of(schedule), 0};
    made.seconds = seconds_of(made);
    if (smallest_.bytes == 0 || made.bytes < smallest_.bytes) smallest_ = made;
    if (budget_ != 0 && made.bytes + host_screen_weight_bytes(problem_) > budget_) return;
    const auto [at, is_new] = best_.try_emplace(kind_of(schedule), made);
    if (!is_new && made.seconds < at->second.seconds) at->second = made;
    if (budget_ == 0) near_fastest_.add({made.bytes, made.seconds}, made);
  }

  PlanKind kind_of(const Schedule& schedule) const {
    if (problem_.is_sparsified()) return PlanKind::kSparsified;
    if (problem_.pass == Pass::kForward) return PlanKind::kForward;
    if (problem_.pass == Pass::kBackward) return PlanKind::kBackward;
    if (schedule.kept_blocks < shape_.blocks) return PlanKind::kVocabChunks;
    return schedule.token_chunk >= problem_.tokens ? PlanKind::kWhole : PlanKind::kTokenChunks;
  }

  double recomputed_share(const Schedule& schedule) const {
    return 1 - static_cast<double>(schedule.kept_blocks) / static_cast<double>(shape_.blocks);
  }

  double cost_of(const Schedule& schedule) const {
    if (problem_.is_sparsified()) return sparsified_cost();
    double cost = problem_.needs_forward() ? 1 : 0;
    if (!problem_.needs_backward()) return cost;
    cost += recomputed_share(schedule);
    if (schedule.sweeps_vocabulary && problem_.has.d_hidden) cost += 1;
    cost += (problem_.has.d_hidden ? 1 : 0) + (problem_.has.d_weight ? 1 : 0);
    return cost;
  }

  // Assumes the kept elements of a trained model's softmax: about a quarter of the most that a row can have.
  // A product with scattered rows of memory takes several times as long as its arithmetic in a matrix
  // product.
  double sparsified_cost() const {
    constexpr double kKeptShare = 0.25;
    constexpr double kScattered = 8;
    const double kept =
        std::min(1.0, kKeptShare / problem_.threshold / static_cast<double>(problem_.vocab)) * kScattered;
    return (draws_elements(problem_) ? 1 : 0) +
           kept * ((problem_.has.d_hidden ? 1 : 0) + (problem_.has.d_weight ? 1 : 0));
  }

  int64_t chunks_of(const Schedule& schedule) const {
    return ceil_div(std::max<int64_t>(problem_.tokens, 1), schedule.token_chunk);
  }

  // One thread's seconds: the arithmetic, and what every chunk repeats for the whole weight.
  double work_seconds(const Schedule& schedule) const {
    const double weight = static_cast<double>(problem_.vocab) * static_cast<double>(problem_.hidden);
    const auto chunks = static_cast<double>(chunks_of(schedule));
    const double cost = cost_of(schedule);
    double bytes = weight * 4 * cost;
    double hidden_bytes = 0;
    if (schedule.sweeps_vocabulary) {  // every window packs all rows of hidden again
      const auto windows = static_cast<double>(ceil_div(shape_.blocks, schedule.backward_window));
      hidden_bytes =
          windows * static_cast<double>(problem_.tokens) * static_cast<double>(problem_.hidden) * 16;
    } else if (problem_.has.d_weight && chunks > 1 && !problem_.is_sparsified()) {
      bytes += weight * 16;
    }
    const double arithmetic = gemm_flop(problem_) * cost / (kernels_.gflops_thread * 1e9);
    return arithmetic + (chunks * bytes + hidden_bytes) / kPackBytesPerSecond;
  }

  // Seconds that threads wait at the ends of a chunk's windows; other windows that are alive shorten it.
  double wait_seconds(const Schedule& schedule) const {
    const auto ends = [&](int64_t size, int64_t more_alive) {
      return static_cast<double>(ceil_div(shape_.blocks, size)) / static_cast<double>(1 + more_alive);
    };
    double waits = ends(schedule.forward_window, forward_windows_alive(problem_, schedule) - 1);
    if (problem_.needs_backward() && !problem_.is_sparsified()) {
      waits += ends(schedule.backward_window, schedule.backward_windows_alive - 2);
    }
    return waits * 100e-6;
  }

  double seconds_of(const Candidate& candidate) const {
    const Schedule& schedule = candidate.schedule;
    const double fresh = static_cast<double>(candidate.bytes) / kFreshBytesPerSecond;
    return (work_seconds(schedule) + fresh) / threads_ +
           static_cast<double>(chunks_of(schedule)) * wait_seconds(schedule);
  }

  std::string config_of(const Schedule& schedule) const {
    const auto text = [](auto v) { return std::to_string(v); };
    if (problem_.is_sparsified()) {
      return std::string(kernels_.name) + " " + text(kernels_.mr) + "x" + text(kernels_.nr) + ", block " +
             text(shape_.vocab_block) + ", lists of " + text(row_capacity(problem_, shape_));
    }
    return std::string(kernels_.name) + " " + text(kernels_.mr) + "x" + text(kernels_.nr) + ", block " +
           text(shape_.vocab_block) + ", kept " + text(schedule.kept_blocks) + "/" + text(shape_.blocks) +
           (schedule.keeps_in_gradient ? " in d_weight" : "") + ", windows " + text(schedule.forward_window) +
           ", " + text(schedule.backward_windows_alive) + " x " + text(schedule.backward_window) +
           (schedule.sweeps_vocabulary ? ", d_weight after all rows" : "");
  }

  const Problem& shard_;
  const Problem problem_;  // the planned problem; in a group the largest shard, so that all ranks plan alike
  std::string reason_;     // before kernels_, whose choice writes it
  const Kernels& kernels_;
  const Shape shape_;
  const ParallelFor& pool_;
  const int threads_;
  const uint64_t budget_;
  std::map<PlanKind, Candidate> best_;
  DefaultCandidates<Candidate> near_fastest_;  // used without a budget
  Candidate smallest_;
};

}  // namespace

Shape make_shape(const Problem& p, const Kernels& k) {
  Shape s;
  const int64_t block = ceil_div(p.hidden, k.pair) > kWideUnits ? kVocabBlock / 2 : kVocabBlock;
  s.vocab_block = std::min(block, round_up(std::max<int64_t>(p.vocab, 1), kPanelColumns));
  s.blocks = ceil_div(p.vocab, s.vocab_block);
  s.token_block = kTokenUnits * k.pair;
  s.hidden_units = ceil_div(p.hidden, k.pair);
  s.hidden_stride = avoid_aliasing(round_up(s.hidden_units, 16));
  s.hidden_padded = round_up(p.hidden, k.nr);
  s.gradient_stride = avoid_aliasing(s.hidden_padded);
  s.ranges = ceil_div(s.hidden_padded, kMaxRange);
  s.range = round_up(ceil_div(s.hidden_padded, s.ranges), k.nr);
  s.ranges = ceil_div(s.hidden_padded, s.range);
  return s;
}

std::vector<Plan> plans(const Problem& problem, const BackendOptions& options, uint64_t max_workspace_bytes) {
  return Planner(problem, options, max_workspace_bytes).all();
}

}  // namespace logitless::cpu
