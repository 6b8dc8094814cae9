#include <algorithm>

#include "cuda/portable/logits.h"
#include "cuda/runner.h"
#include "cuda/sm90/logits.h"

namespace headroom::cuda {

Operand load_hidden(const Runner& run, const Chunk& chunk) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  if (run.detail.source == HiddenSource::kCaller) {
    return {at(b.hidden, p.hidden_dtype, chunk.first * b.hidden_stride), b.hidden_stride};
  }
  const bool to_output = run.detail.source == HiddenSource::kOutput;
  RowsCopy c{};
  c.from = b.hidden;
  c.from_dtype = p.hidden_dtype;
  c.from_stride = b.hidden_stride;
  c.row_map = run.arena.row_map + chunk.first;
  c.row_count = chunk.row_count;
  c.to = to_output ? b.d_hidden : run.arena.hidden;
  c.to_dtype = run.dtype();
  c.to_stride = to_output ? b.d_hidden_stride : run.depth();
  c.rows = chunk.rows;
  c.columns = p.hidden;
  c.padded = run.depth();
  launch_copy_rows(c, run.stream);
  return {c.to, c.to_stride};
}

int64_t widest_window(const Runner& run) {
  return run.detail.copies_classifier ? run.detail.vocab_window : run.problem.vocab;
}

Operand load_classifier(const Runner& run, const Window& window) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  const void* rows = at(b.classifier, p.classifier_dtype, window.first * b.classifier_stride);
  if (!run.detail.copies_classifier) return {rows, b.classifier_stride};
  RowsCopy c{};
  c.from = rows;
  c.from_dtype = p.classifier_dtype;
  c.from_stride = b.classifier_stride;
  c.to = run.arena.window;
  c.to_dtype = run.dtype();
  c.to_stride = run.depth();
  c.rows = window.columns;
  c.columns = p.hidden;
  c.padded = run.depth();
  launch_copy_rows(c, run.stream);
  return {c.to, c.to_stride};
}

LogitsArgs logits_args(const Runner& run, const Chunk& chunk, const Operand& hidden, const Window& window,
                       const Operand& classifier, Epilogue epilogue) {
  const Problem& p = run.problem;
  const float* bias = bias_of(run);
  LogitsArgs args;
  args.epilogue = epilogue;
  args.dtype = run.dtype();
  args.hidden = hidden.data;
  args.hidden_stride = hidden.stride;
  args.classifier = classifier.data;
  args.classifier_stride = classifier.stride;
  args.rows = chunk.rows;
  args.columns = window.columns;
  // Copied rows are padded with zeros to what the fastest loads want.
  args.depth = hidden.stride == run.depth() && classifier.stride == run.depth() ? run.depth() : p.hidden;
  if (run.detail.source != HiddenSource::kCaller) args.row_count = chunk.row_count;  // else all rows exist
  args.scale = static_cast<float>(p.scale);
  args.softcap = static_cast<float>(p.softcap);
  args.bias = bias != nullptr ? bias + window.first : nullptr;
  args.target = run.arena.target + chunk.first;
  args.column_offset = window.first;
  args.stats = run.arena.slots;
  args.class_weight =
      run.rows.class_weight != nullptr ? run.rows.class_weight + p.vocab_start + window.first : nullptr;
  args.target_logit = run.arena.target_logit;
  return args;
}

void launch_logits(const Runner& run, LogitsArgs args) {
  if (run.detail.implementation == Implementation::kSm90) {
    sm90::launch_logits(args, run.stream);
    return;
  }
  portable::Scratch scratch;
  scratch.logits = run.arena.logits;
  scratch.rows = run.detail.scratch_rows;
  scratch.columns = run.detail.scratch_columns;
  scratch.gemm = run.arena.gemm;
  scratch.gemm_bytes = static_cast<size_t>(run.detail.gemm_bytes);
  portable::launch_logits(args, scratch, run.stream);
}

}  // namespace headroom::cuda
