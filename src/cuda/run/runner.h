#pragma once
// One run on a device, and the parts that exact and sparsified plans share: operands.cpp, row_sums.cpp.
// bound_plan.cpp has the order of steps, with exact/ or sparsified/ in the middle.
#include <algorithm>
#include <type_traits>

#include "core/buffers.h"
#include "core/communicator.h"
#include "core/problem.h"
#include "cuda/engines/engine.h"
#include "cuda/rows/rows.h"
#include "cuda/run/arena.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {

// The computed rows [first, first + rows), as far as they exist.
struct Chunk {
  bool is_first = true;  // the first chunk worked on: sums over chunks begin with it
  bool is_last = true;
  int64_t first = 0, rows = 0;
  const int32_t* row_count = nullptr;  // on the device
};

// Columns [first, first + columns) of the shard.
struct Window {
  int64_t first = 0, columns = 0;
  bool is_first = true;  // the first window worked on: sums over windows begin with it
};

// Real: as in ArenaOf.
template <class Real>
struct RunnerOf {
  const Problem& problem;
  const Buffers& buffers;
  const PlanDetail& detail;
  ArenaOf<Real> arena;
  RowInputsOf<Real> rows;
  LogitTransform<Real> transform;  // of all computed rows and all columns of the shard
  const Queue& queue;
  int64_t chunks;
  bool products;              // whether there are any matrices, and logits depend on them (scale != 0)
  const Communicator* group;  // null: none

  // Whether the ranks exchange the sums of rows, so that these cover all ranks.
  bool exchanges() const { return problem.group_size > 1 && problem.needs_forward(); }
  // The caller's matrices.
  ConstMatrix hidden() const { return {buffers.hidden, problem.dtype.hidden, buffers.hidden_stride}; }
  ConstMatrix weight() const { return {buffers.weight, problem.dtype.weight, buffers.weight_stride}; }
  Matrix d_hidden() const { return {buffers.d_hidden, problem.dtype.d_hidden, buffers.d_hidden_stride}; }
  Matrix d_weight() const { return {buffers.d_weight, problem.dtype.d_weight, buffers.d_weight_stride}; }
  // A matrix of the run's own, with rows as long as the operands'.
  Matrix padded(void* data, DType dtype) const { return {data, dtype, depth()}; }
  Matrix exp_logits() const { return {arena.exp_logits, dtype(), exp_logits_stride(problem, detail)}; }
  // Returns the exponents of exp_logits(); none but in float16.
  Exponents exponents() const {
    if (!has_exponents(problem)) return {};
    const Matrix kept = exp_logits();
    return {static_cast<int8_t*>(kept.data) + bytes_before_exponents(problem, detail),
            kept.stride * static_cast<int64_t>(size_of(kept.dtype))};
  }
  Matrix dz() const { return {arena.dz, dtype(), dz_stride(problem, detail)}; }
  // The mask of the caller's rows.
  ColumnMask mask() const { return {buffers.sample_mask, mask_words(problem.vocab)}; }
  // Whether a chunk's rows are copied side by side, without ignored ones.
  bool compacts_rows() const { return detail.source != HiddenSource::kCaller && !detail.is_sparsified(); }
  EngineTraits traits() const { return detail.engine->traits(); }
  DType dtype() const { return operand_dtype(problem); }
  int64_t depth() const { return padded_hidden(problem); }
  // The factor between gradients of logits and of products, which the coefficients include.
  double gradient_scale() const { return products ? problem.scale : 1; }
  // The factor that turns sums of these gradients into gradients of the bias.
  double bias_gradient_scale() const { return problem.bias_scale / gradient_scale(); }
};
using Runner = RunnerOf<float>;

// Calls body(Window) for columns [first, end), `width` at a time.
template <class F>
void for_windows(int64_t first, int64_t end, int64_t width, F&& body) {
  for (int64_t j = first; j < end; j += width) body(Window{j, end - j < width ? end - j : width, j == 0});
}

// Calls body(Window) for columns [0, end), `width` at a time, the last ones first.
template <class F>
void for_windows_backwards(int64_t end, int64_t width, F&& body) {
  for (int64_t j = (end - 1) / width * width; j >= 0; j -= width) {
    body(Window{j, end - j < width ? end - j : width, end - j <= width});
  }
}

// ---- operands.cpp
//
// The first launch of a chunk. It copies rows, makes the logits of their targets if wanted, and initializes
// the results of the chunk's first product or sum.
template <class Real>
ConstMatrix load_rows(const RunnerOf<Real>& run, const Chunk& chunk, bool wants_target_logits);
// Copies the rows once more, if they are copies.
void reload_hidden(const Runner& run, const Chunk& chunk);
// Copies the whole weight, once a run, if the plan has room for that.
template <class Real>
void load_whole_weight(const RunnerOf<Real>& run);
// Returns rows of the weight for a product. A copied window is loaded only if the condition holds.
template <class Real>
ConstMatrix load_weight(const RunnerOf<Real>& run, const Window& window, const Condition& condition = {});
// Returns these rows of the window that was loaded last.
template <class Real>
ConstMatrix loaded_weight(const RunnerOf<Real>& run, const Window& window);
// Returns a window of a sample, which has every step-th row of the weight.
ConstMatrix load_sample(const Runner& run, const Window& window, int64_t step, const Condition& condition);
// Returns the number of columns whose operands are available at once, and that of for_products()' parts.
template <class Real>
int64_t widest_window(const RunnerOf<Real>& run);
template <class Real>
int64_t widest_product(const RunnerOf<Real>& run) {
  const int64_t window = widest_window(run);
  return run.problem.has_fp8_logits() ? std::min(window, run.detail.rounded_window) : window;
}
template <class Real>
void launch_logits(const RunnerOf<Real>& run, const LogitsArgsOf<Real>& args);
// Round a chunk's rows, and rows of the weight, to e4m3 (RoundedRows). Ignored rows become 0. Nothing of the
// weight is done unless the condition holds. The third function makes a product of such rows.
ConstMatrix round_hidden(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden);
void round_weight(const Runner& run, const ConstMatrix& weight, int64_t rows, const Condition& condition,
                  const RoundedWeight& to);
void multiply_rounded(const Runner& run, const RoundedWeight& weight, LogitsProduct& product);
template <class Real>
LogitsProductOf<Real> logits_product(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                                     const Window& window, const ConstMatrix& weight);
// Calls body(LogitsProduct, Window) for a window, or for its parts if rows are rounded: as many columns at a
// time as there is room for. round_hidden() must then have been called for the chunk. condition: as of
// load_weight().
template <class Real, class F>
void for_products(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                  const Window& window, const ConstMatrix& weight, const Condition& condition, F&& body) {
  if constexpr (std::is_same_v<Real, float>) {
    if (run.problem.has_fp8_logits()) {
      const RoundedRows& r = run.arena.rounded;
      const int64_t end = window.first + window.columns;
      for_windows(window.first, end, run.detail.rounded_window, [&](const Window& part) {
        round_weight(run, weight.from(part.first - window.first), part.columns, condition, r.weight);
        LogitsProduct product =
            logits_product(run, chunk, {r.hidden, r.dtype, r.stride}, part, r.weight.rows);
        multiply_rounded(run, r.weight, product);
        body(product, part);
      });
      return;
    }
  }
  body(logits_product(run, chunk, hidden, window, weight), window);
}
// Gives a product the mask of the chunk's rows, if the run has one.
template <class Real>
void apply_mask(const RunnerOf<Real>& run, const Chunk& chunk, LogitsProductOf<Real>& product) {
  product.mask = run.mask();
  product.mask_row = run.arena.row_map + chunk.first;
}
// Returns the outputs of a window: sums of logits in the partials, and logits of targets.
template <class Real>
RowSumsOf<Real> row_sums(const RunnerOf<Real>& run, const Window& window);
// Returns the class weights of a window's columns; null: ones.
template <class Real>
const Real* class_weight_of(const RunnerOf<Real>& run, const Window& window);

// Makes the logits of the rows' targets, if a row has several.
template <class Real>
void make_target_logits(const RunnerOf<Real>& run, const Chunk& chunk);

// ---- row_sums.cpp
//
// Adds a chunk's row statistics to cleared partials, in the active blocks of rows only. seldom: nearly always
// no block is active.
template <class Real>
void sum_rows(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden, const uint8_t* active,
              bool seldom = false);
// Returns whether sums relative to a logit offset come with maxima, which only their outputs need.
template <class Real>
bool tracks_max(const RunnerOf<Real>& run);
// Makes sum_j w_j C_j of the first columns, for label smoothing.
void sum_weight(const Runner& run, int64_t columns, float* sum);
// Makes a chunk's sums of weighted logits from it, where logits are not summed one by one. Must follow the
// last change of the partials.
void sum_weighted_logits(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden);
// Turns a chunk's statistics into outputs, coefficients, factors of kept exp logits and, after the last
// chunk, the loss. relative_to_offset: the sums are relative to logit offsets.
template <class Real>
void finish_chunk(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                  bool relative_to_offset);

}  // namespace logitless::cuda
