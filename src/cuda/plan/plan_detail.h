#pragma once
#include <cstdint>

#include "core/plan.h"

namespace logitless::cuda {

class Engine;

// Where the hidden rows that the products read lie. Copied rows are compacted: ignored rows are left out (not
// by sparsified plans, whose rows stay where they are).
enum class HiddenSource : int {
  kCaller = 0,  // in the caller's buffer, ignored rows among them; forward passes and sparsified plans
  kOutput = 1,  // in the buffer of d_hidden, until the gradient is written there
  kWorkspace = 2,
};

// Blocks of logits that take turns (LogitsScratch).
inline constexpr int kScratchBlocks = 3;

// How a device is to run a problem: what its plans differ in.
struct PlanDetail {
  PlanKind kind = PlanKind::kForward;
  int64_t token_chunk = 0;  // rows that are worked on at once
  const Engine* engine = nullptr;
  HiddenSource source = HiddenSource::kCaller;
  bool copies_weight = false;          // windows of it are converted or padded into the workspace
  bool rounds_between_chunks = false;  // the sum of d_weight over chunks is kept in its own dtype
  int64_t vocab_window = 0;            // columns made at once, of those that are not kept
  int64_t cached_columns = 0;  // the first ones, whose exp_logits are kept: 0, at least a window, or all
  bool relative_to_offset =
      false;  // sums are relative to logit_offsets (kExpLogits), whether exp_logits are kept or not
  int64_t partials = 1;      // of the statistics, a row
  int64_t scratch_rows = 0;  // of fp32 logits at once (EngineTraits::needs_scratch)
  int64_t scratch_columns = 0;
  int64_t gemm_bytes = 0;

  // Logits in the scratch: of several blocks, where launches of so many rows and columns have several.
  int64_t scratch_numbers(int64_t rows, int64_t columns) const {
    const bool has_several = scratch_rows < rows || scratch_columns < columns;
    return (has_several ? kScratchBlocks : 1) * scratch_rows * scratch_columns;
  }

  bool is_sparsified() const { return kind == PlanKind::kSparsified; }
};

}  // namespace logitless::cuda
