#pragma once
#include <cstdint>

#include "core/plan.h"

namespace logitless::cuda {

class Engine;

// The place of the hidden rows that products read. Copied rows are compacted: ignored rows are left out.
// Sparsified plans are the exception: their rows keep their places.
enum class HiddenSource : int {
  kCaller = 0,  // in the caller's buffer, ignored rows included; forward passes and sparsified plans
  kOutput = 1,  // in the buffer of d_hidden, until the gradient is written there
  kWorkspace = 2,
};

// Blocks of logits that take turns (LogitsScratch).
inline constexpr int kScratchBlocks = 3;

// How a device runs a problem: the properties in which its plans differ.
struct PlanDetail {
  PlanKind kind = PlanKind::kForward;
  int64_t token_chunk = 0;  // rows that are worked on at once
  const Engine* engine = nullptr;
  HiddenSource source = HiddenSource::kCaller;
  bool copies_weight = false;          // windows of it are converted or padded into the workspace
  bool rounds_between_chunks = false;  // the sum of d_weight over chunks is kept in d_weight's dtype
  int64_t vocab_window = 0;            // columns made at once, of those that are not kept
  int64_t rounded_window = 0;          // columns of the weight in e4m3 at once, where all logits need them
  int64_t cached_columns = 0;  // the first ones, whose exp logits are kept: 0, at least a window, or all
  // Sums are relative to logit offsets (kExpLogits), even if no exp logits are kept.
  bool relative_to_offset = false;
  int64_t partials = 1;      // of the statistics of a row
  int64_t scratch_rows = 0;  // of fp32 logits at once (EngineTraits::needs_scratch)
  int64_t scratch_columns = 0;
  int64_t gemm_bytes = 0;

  // Returns the number of logits in the scratch. Launches larger than a block have several blocks.
  int64_t scratch_numbers(int64_t rows, int64_t columns) const {
    const bool has_several = scratch_rows < rows || scratch_columns < columns;
    return (has_several ? kScratchBlocks : 1) * scratch_rows * scratch_columns;
  }

  bool is_sparsified() const { return kind == PlanKind::kSparsified; }
};

}  // namespace logitless::cuda
