#include <algorithm>

#include "cuda/check.h"
#include "cuda/runner.h"

namespace headroom::cuda {

void load_bias(const Runner& run) {
  if (run.arena.bias == nullptr) return;
  launch_to_float(run.buffers.bias, run.problem.bias_dtype, run.problem.vocab, run.arena.bias, run.stream);
}

const float* bias_of(const Runner& run) {
  if (!run.problem.has_bias) return nullptr;
  return run.arena.bias != nullptr ? run.arena.bias : static_cast<const float*>(run.buffers.bias);
}

void sum_rows(const Runner& run, const Chunk& chunk, const Operand& hidden, const uint8_t* active) {
  launch_init_slots(run.arena.slots, active, run.stream);
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    LogitsArgs args = logits_args(run, chunk, hidden, window, load_classifier(run, window), Epilogue::kStats);
    args.row_block_active = active;
    launch_logits(run, args);
  });
}

bool tracks_max(const Runner& run) {
  const Buffers& b = run.buffers;
  return run.problem.want_argmax || b.max != nullptr || b.sum_exp != nullptr || b.sum_exp_logit != nullptr;
}

namespace {

void keep_exps_of(const Runner& run, const Chunk& chunk, const Operand& hidden, const uint8_t* active) {
  launch_init_slots(run.arena.slots, active, run.stream);
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    LogitsArgs args = logits_args(run, chunk, hidden, window, load_classifier(run, window), Epilogue::kExps);
    args.anchor = run.arena.anchor;
    args.row_block_active = active;
    if (!tracks_max(run)) args.stats.max = nullptr;
    const int64_t kept = run.detail.kept_columns;
    args.out_columns = std::clamp<int64_t>(kept - window.first, 0, window.columns);
    args.out = at(run.arena.exps, run.dtype(), args.out_columns > 0 ? window.first : 0);
    args.out_stride = padded_columns(run.problem, kept);
    launch_logits(run, args);
  });
}

}  // namespace

void find_target_logits(const Runner& run, const Chunk& chunk, const Operand& hidden) {
  const Problem& p = run.problem;
  const Arena& a = run.arena;
  TargetLogits t{};
  t.hidden = hidden.data;
  t.hidden_stride = hidden.stride;
  t.hidden_dtype = run.dtype();
  t.classifier = run.buffers.classifier;
  t.classifier_stride = run.buffers.classifier_stride;
  t.classifier_dtype = p.classifier_dtype;
  t.depth = p.hidden;
  t.rows = chunk.rows;
  t.row_count = chunk.row_count;
  t.target = a.target + chunk.first;
  t.bias = bias_of(run);
  t.scale = static_cast<float>(p.scale);
  t.softcap = static_cast<float>(p.softcap);
  t.out = a.target_logit;
  launch_target_logits(t, run.stream);
}

// sm90: the anchor is the target's logit, which is nearly always within 86 nats of lse. Blocks with a row
// where it is not are done again with lse as the anchor; nobody has to wait to know whether there are any.
void keep_exps(const Runner& run, const Chunk& chunk, const Operand& hidden) {
  if (run.detail.implementation == Implementation::kPortable) {  // knows the maximum before it stores
    keep_exps_of(run, chunk, hidden, nullptr);
    return;
  }
  const Arena& a = run.arena;
  find_target_logits(run, chunk, hidden);
  check(cudaMemcpyAsync(a.anchor, a.target_logit, static_cast<size_t>(chunk.rows) * sizeof(float),
                        cudaMemcpyDeviceToDevice, run.stream),
        "copy of the anchors");
  keep_exps_of(run, chunk, hidden, nullptr);
  launch_find_redo(a, chunk.rows, chunk.row_count, run.stream);
  sum_rows(run, chunk, hidden, a.active);
  launch_anchor_from_slots(a, chunk.rows, chunk.row_count, run.stream);
  keep_exps_of(run, chunk, hidden, a.active);
}

}  // namespace headroom::cuda
