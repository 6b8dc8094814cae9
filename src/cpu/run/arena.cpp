#include "cpu/run/arena.h"

#include <algorithm>
#include <array>

#include "core/group_stats.h"

namespace logitless::cpu {
namespace {

// An upper bound of the groups that the stages add.
int64_t most_groups(const Problem& p, const Shape& s, const Schedule& schedule) {
  const int64_t forward =
      p.is_sparsified() ? draw_windows(s.blocks) : ceil_div(s.blocks, schedule.forward_window);
  const int64_t backward =
      p.needs_backward() && !p.is_sparsified() ? ceil_div(s.blocks, schedule.backward_window) : 0;
  return 8 + 3 * forward + 4 * backward;
}

std::array<std::span<float>*, 5> coefficients_of_rows(Arena& a) {
  return {&a.lse_high, &a.lse_residual, &a.a, &a.b, &a.c};
}
std::array<std::span<float>*, 2> coefficients_of_targets(Arena& a) {
  return {&a.g, &a.target_gradient};
}

}  // namespace

Arena with_rows_of(const Arena& arena, const Problem& p, int64_t first, int64_t count) {
  Arena part = arena;
  const auto cut = [&](std::span<float>* vector, int64_t width) {
    *vector = vector->subspan(static_cast<size_t>(first * width), static_cast<size_t>(count * width));
  };
  for (std::span<float>* vector : coefficients_of_rows(part)) cut(vector, 1);
  for (std::span<float>* vector : coefficients_of_targets(part)) cut(vector, p.target_count());
  return part;
}

WorkerArena lay_out_worker(const Problem& p, const Kernels& k, const Shape& s, Workspace& workspace) {
  WorkerArena w;
  if (p.is_sparsified()) w.sparsified = lay_out_sparsified_worker(p, s, workspace);
  if (p.is_sparsified() && !draws_elements(p)) return w;
  w.logits = workspace.take<float>(k.mr * s.vocab_block);
  w.weight = workspace.take<uint32_t>(s.vocab_block * s.hidden_units);
  if (p.rounds_rows()) w.rounded = workspace.take<float>(k.nr * p.hidden);
  if (p.has.bias) w.bias = workspace.take<float>(s.vocab_block);
  if (p.has.class_weight) w.class_weight = workspace.take<float>(s.vocab_block);
  if (p.has.d_weight && !p.is_sparsified()) {
    if (k.pair == 2) w.dz_pairs = workspace.take<uint32_t>(s.token_block / 2 * s.vocab_block);
    w.d_weight = workspace.take<float>(s.vocab_block * s.range);
  }
  w.packed_block = workspace.take<int64_t>(1);
  if (p.top_k > 0 || p.num_samples > 0 || draws_elements(p)) {
    w.columns = workspace.take<int32_t>(s.vocab_block + kVectorRoom);
    w.element_logits = workspace.take<float>(s.vocab_block + kVectorRoom);
  }
  return w;
}

Arena lay_out(const Problem& p, const Kernels& k, const Shape& s, const Schedule& schedule,
              Workspace& workspace) {
  const int64_t tokens = schedule.token_chunk;
  const bool one_chunk = tokens >= p.tokens;
  const bool has_logits = !p.is_sparsified() || draws_elements(p);
  Arena a;
  a.rows = workspace.take<int64_t>(p.tokens);
  if (p.is_sparsified()) a.sparsified = lay_out_sparsified(p, s, tokens, workspace);
  if (has_logits) {
    a.target = workspace.take<int64_t>(tokens * p.target_count());
    a.target_logit = workspace.take<float>(tokens * p.target_count());
    if (p.has.temperature) a.inverse_temperature = workspace.take<float>(tokens);
    a.hidden_rows = workspace.take<uint32_t>(tokens * s.hidden_stride);
    if (p.has_fp8_logits() && p.has.d_weight)
      a.unrounded_rows = workspace.take<uint32_t>(tokens * s.hidden_stride);
  }
  if (p.needs_forward() || draws_elements(p)) {
    const int64_t window =
        std::min(s.blocks, forward_windows_alive(p, schedule) * schedule.forward_window) * tokens;
    a.stats = workspace.take<RowStats<double>>(tokens);
    if (p.in_group() && p.needs_forward()) {
      a.gathered = workspace.take<double>(host_numbers(p, tokens));
    }
    a.block_max = workspace.take<float>(window);
    a.block_sum = workspace.take<float>(window);
    const WantedSums sums = wanted_sums(p);
#define LOGITLESS_TAKE(name, part, ...) \
  if (sums.name) a.block_##part = workspace.take<float>(window);
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_TAKE)
#undef LOGITLESS_TAKE
    if (sums.weighted_logit_sum) a.block_weight = workspace.take<double>(s.blocks);
    if (p.has.argmax) a.block_argmax = workspace.take<int32_t>(window);
  }
  if (p.top_k > 0) {
    a.top_rows = workspace.take<TopRow>(tokens);
    a.top_best = workspace.take<TopLogit<float>>(tokens * p.top_k);
  }
  a.samples = workspace.take<SampleRow>(tokens * p.num_samples);
  if (p.needs_backward() && !p.is_sparsified()) {
    const int64_t kept_rows = schedule.sweeps_vocabulary ? p.tokens : tokens;
    for (auto* vector : coefficients_of_rows(a)) *vector = workspace.take<float>(kept_rows);
    for (auto* vector : coefficients_of_targets(a))
      *vector = workspace.take<float>(kept_rows * p.target_count());
    if (p.has.d_hidden) {
      a.d_hidden = workspace.take<float>(tokens * s.gradient_stride);
      a.window_panels =
          workspace.take<uint32_t>(window_partials(schedule, s) * s.hidden_padded * (s.vocab_block / k.pair));
    }
    if (p.has.d_weight) {
      a.hidden_panels = workspace.take<uint32_t>(ceil_div(tokens, k.pair) * s.hidden_padded);
      if (!one_chunk && p.dtype.d_weight != DType::kF32) {
        const int64_t rows = schedule.sweeps_vocabulary ? schedule.backward_window * s.vocab_block : p.vocab;
        a.d_weight = workspace.take<float>(rows * s.hidden_padded);
      }
    }
    if (p.has.d_bias) a.d_bias = workspace.take<float>(s.blocks * s.vocab_block);
    const int64_t block_bytes = tokens * s.vocab_block * element_bytes(k);
    a.kept_exp_logits =
        workspace.take<std::byte>(schedule.keeps_in_gradient ? 0 : schedule.kept_blocks * block_bytes);
    a.kept_offset = workspace.take<float>(schedule.kept_blocks * tokens);
    if (schedule.kept_blocks < s.blocks || schedule.keeps_in_gradient) {
      a.window_exp_logits = workspace.take<std::byte>(window_partials(schedule, s) * block_bytes);
      a.window_offset = workspace.take<float>(window_partials(schedule, s) * tokens);
    }
  }
  a.groups = workspace.take<TaskGroup>(most_groups(p, s, schedule));
  Workspace worker;
  lay_out_worker(p, k, s, worker);
  a.worker_bytes = worker.used();
  a.worker_memory = workspace.take<std::byte>(schedule.threads * static_cast<int64_t>(a.worker_bytes));
  return a;
}

}  // namespace logitless::cpu
