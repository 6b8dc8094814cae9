#pragma once
// One run on a device, and its parts that exact and sparsified plans have in common: operands.cpp,
// row_sums.cpp. bound_plan.cpp is the order of things, with exact/ or sparsified/ in the middle.
#include "core/buffers.h"
#include "core/communicator.h"
#include "core/problem.h"
#include "cuda/engines/engine.h"
#include "cuda/rows/rows.h"
#include "cuda/run/arena.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {

// Rows [first, first + rows) of the computed ones, as far as they exist.
struct Chunk {
  bool is_first = true;  // of those that are worked on; sums over chunks begin with it
  bool is_last = true;
  int64_t first = 0, rows = 0;
  const int32_t* row_count = nullptr;  // device
};

// Columns [first, first + columns) of the shard.
struct Window {
  int64_t first = 0, columns = 0;
  bool is_first = true;  // of those that are worked on; sums over windows begin with it
};

// Real: as of ArenaOf.
template <class Real>
struct RunnerOf {
  const Problem& problem;
  const Buffers& buffers;
  const PlanDetail& detail;
  ArenaOf<Real> arena;
  RowInputsOf<Real> rows;
  LogitTransform<Real> transform;  // of all computed rows and of the shard's columns
  const Queue& queue;
  int64_t chunks;
  bool products;              // whether logits depend on the matrices at all (scale != 0), and there are any
  const Communicator* group;  // null: none

  // Whether the sums of rows are those of all ranks, which tell each other.
  bool exchanges() const { return problem.group_size > 1 && problem.needs_forward(); }
  // The caller's.
  ConstMatrix hidden() const { return {buffers.hidden, problem.dtype.hidden, buffers.hidden_stride}; }
  ConstMatrix weight() const { return {buffers.weight, problem.dtype.weight, buffers.weight_stride}; }
  Matrix d_hidden() const { return {buffers.d_hidden, problem.dtype.d_hidden, buffers.d_hidden_stride}; }
  Matrix d_weight() const { return {buffers.d_weight, problem.dtype.d_weight, buffers.d_weight_stride}; }
  // A matrix of the run's own, with rows as long as the operands'.
  Matrix padded(void* data, DType dtype) const { return {data, dtype, depth()}; }
  Matrix exp_logits() const { return {arena.exp_logits, dtype(), exp_logits_stride(problem, detail)}; }
  EngineTraits traits() const { return detail.engine->traits(); }
  DType dtype() const { return operand_dtype(problem); }
  int64_t depth() const { return padded_hidden(problem); }
  // The factor between gradients of logits and of products, which the coefficients carry.
  double gradient_scale() const { return products ? problem.scale : 1; }
  // By which sums of these become gradients of the bias.
  double bias_gradient_scale() const { return problem.bias_scale / gradient_scale(); }
};
using Runner = RunnerOf<float>;

// Calls body(Window) for columns [first, end), `width` at a time.
template <class F>
void for_windows(int64_t first, int64_t end, int64_t width, F&& body) {
  for (int64_t j = first; j < end; j += width) body(Window{j, end - j < width ? end - j : width, j == 0});
}

// The same for columns [0, end), the last ones first.
template <class F>
void for_windows_backwards(int64_t end, int64_t width, F&& body) {
  for (int64_t j = (end - 1) / width * width; j >= 0; j -= width) {
    body(Window{j, end - j < width ? end - j : width, end - j <= width});
  }
}

// ---- operands.cpp
// The first launch of a chunk: its rows, logits of its targets where they are wanted, and what its first
// product or sum goes on from.
template <class Real>
ConstMatrix load_rows(const RunnerOf<Real>& run, const Chunk& chunk, bool wants_target_logits);
// Once more the rows alone, where they are copies.
void reload_hidden(const Runner& run, const Chunk& chunk);
// The whole weight, once a run, where the plan has room for a copy of all of it.
template <class Real>
void load_whole_weight(const RunnerOf<Real>& run);
// Rows of the weight for a product. A window of it is copied where the condition holds.
template <class Real>
ConstMatrix load_weight(const RunnerOf<Real>& run, const Window& window, const Condition& condition = {});
// The same of the window that was loaded last.
template <class Real>
ConstMatrix loaded_weight(const RunnerOf<Real>& run, const Window& window);
// The same of a sample, every step-th row of the weight: of these, those of the window.
ConstMatrix load_sample(const Runner& run, const Window& window, int64_t step, const Condition& condition);
// Columns whose operands can be had at once.
template <class Real>
int64_t widest_window(const RunnerOf<Real>& run);
template <class Real>
void launch_logits(const RunnerOf<Real>& run, const LogitsArgsOf<Real>& args);
template <class Real>
LogitsProductOf<Real> logits_product(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                                     const Window& window, const ConstMatrix& weight);
// Sums of a window's logits in the partials, and logits of targets.
template <class Real>
RowSumsOf<Real> row_sums(const RunnerOf<Real>& run, const Window& window);
// Of a window's columns; null: ones.
template <class Real>
const Real* class_weight_of(const RunnerOf<Real>& run, const Window& window);

// Logits of the rows' targets, where a row has several.
template <class Real>
void make_target_logits(const RunnerOf<Real>& run, const Chunk& chunk);

// ---- row_sums.cpp
// Row statistics of a chunk, in the partials, which are clear; active: only in these blocks of rows.
template <class Real>
void sum_rows(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
              const uint8_t* active);
// Whether sums that are relative to an logit_offset come with maxima, which only their outputs need.
template <class Real>
bool tracks_max(const RunnerOf<Real>& run);
// From a chunk's statistics to outputs, coefficients, factors of kept exp_logits and, after the last chunk,
// the loss. relative_to_offset: the sums are relative to logit_offsets.
template <class Real>
void finish_chunk(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                  bool relative_to_offset);

}  // namespace logitless::cuda
