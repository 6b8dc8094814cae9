#include "cuda/run/float64/run.h"

#include <algorithm>

#include "cuda/run/float64/kernels.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda::float64 {
namespace {

struct Runner {
  const Problem& problem;
  const Buffers& buffers;
  BlockSize size;
  Arena arena;
  Inputs inputs;
  cudaStream_t stream;

  const double* hidden() const { return static_cast<const double*>(buffers.hidden); }
  const double* classifier() const { return static_cast<const double*>(buffers.classifier); }
};

// Calls body(first, count) for all of `total`, `width` at a time.
template <class F>
void for_parts(int64_t total, int64_t width, F&& body) {
  for (int64_t first = 0; first < total; first += width) body(first, std::min(width, total - first));
}

// The dot products of a block.
Block multiply(const Runner& run, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const Buffers& b = run.buffers;
  const Block block{.row = row,
                    .rows = rows,
                    .column = column,
                    .columns = columns,
                    .data = run.arena.block,
                    .stride = run.size.columns};
  Product p{};
  p.m = rows;
  p.n = columns;
  p.k = run.problem.hidden;
  p.a = {run.hidden() + row * b.hidden_stride, b.hidden_stride, 1};
  p.b = {run.classifier() + column * b.classifier_stride, b.classifier_stride, 1};
  p.scale = 1;
  p.c = block.data;
  p.c_stride = block.stride;
  launch_product(p, run.stream);
  return block;
}

Block make_dz(const Runner& run, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const Block block = multiply(run, row, rows, column, columns);
  launch_dz(run.inputs, run.arena, block, run.stream);
  return block;
}

void clear(const Runner& run, double* data, int64_t count) {
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(count) * sizeof(double), run.stream), "float64 sums");
}

void forward(const Runner& run) {
  const Problem& p = run.problem;
  if (p.tokens > 0) {
    for_parts(p.tokens, run.size.rows, [&](int64_t row, int64_t rows) {
      for_parts(p.vocab, run.size.columns, [&](int64_t column, int64_t columns) {
        const Block block = multiply(run, row, rows, column, columns);
        launch_stats(run.inputs, run.arena, block, run.stream);
        if (p.top_k > 0) launch_top(run.inputs, run.arena, block, p.top_k, run.stream);
      });
    });
    launch_finish_rows(run.inputs, run.arena, run.buffers, p.is_open_shard(), run.stream);
    if (p.top_k > 0) launch_write_top(run.inputs, run.arena, run.buffers, p.top_k, run.stream);
  }
  if (!p.is_open_shard()) launch_finish_loss(run.inputs, run.arena, run.buffers, run.stream);
}

void load_upstream(const Runner& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  Upstream u{};
  u.grad_loss = static_cast<const double*>(b.grad_loss);
  if (!p.needs_forward()) {
    u.lse = static_cast<const double*>(b.lse);
    u.lse_low = static_cast<const double*>(b.lse_low);
    if (p.has.grad_entropy) u.entropy = static_cast<const double*>(b.entropy);
#define LOGITLESS_POINTER(name) \
  if (p.has.grad_##name) u.grad_##name = static_cast<const double*>(b.grad_##name);
    LOGITLESS_ROW_UPSTREAM(LOGITLESS_POINTER)
#undef LOGITLESS_POINTER
  }
  launch_row_gradients(run.inputs, run.arena, u, run.stream);
}

// Rows of d_hidden: scale * sum_j dz_ij C_j, over all columns before the next rows.
void sweep_rows(const Runner& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  for_parts(p.tokens, run.size.rows, [&](int64_t row, int64_t rows) {
    clear(run, run.arena.sums, rows * p.hidden);
    for_parts(p.vocab, run.size.columns, [&](int64_t column, int64_t columns) {
      const Block dz = make_dz(run, row, rows, column, columns);
      Product product{};
      product.m = rows;
      product.n = p.hidden;
      product.k = columns;
      product.a = {dz.data, dz.stride, 1};
      product.b = {run.classifier() + column * b.classifier_stride, 1, b.classifier_stride};
      product.scale = p.scale;
      product.c = run.arena.sums;
      product.c_stride = p.hidden;
      product.adds = true;
      launch_product(product, run.stream);
    });
    launch_store_rows({.from = run.arena.sums,
                       .rows = rows,
                       .columns = p.hidden,
                       .target = run.arena.target + row,
                       .to = static_cast<double*>(b.d_hidden) + row * b.d_hidden_stride,
                       .stride = b.d_hidden_stride,
                       .accumulate = p.accumulate.d_hidden},
                      run.stream);
  });
}

// Rows of d_classifier, scale * sum_i dz_ij E_i, and of d_bias, sum_i dz_ij, over all tokens before the next
// columns.
void sweep_columns(const Runner& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  const Arena& a = run.arena;
  for_parts(p.vocab, run.size.columns, [&](int64_t column, int64_t columns) {
    if (p.has.d_classifier) clear(run, a.sums, columns * p.hidden);
    if (p.has.d_bias) clear(run, a.bias_sums, columns);
    for_parts(p.tokens, run.size.rows, [&](int64_t row, int64_t rows) {
      const Block dz = make_dz(run, row, rows, column, columns);
      if (p.has.d_bias) launch_column_sums(dz, a.bias_sums, run.stream);
      if (!p.has.d_classifier) return;
      Product product{};
      product.m = columns;
      product.n = p.hidden;
      product.k = rows;
      product.a = {dz.data, 1, dz.stride};
      product.b = {run.hidden() + row * b.hidden_stride, 1, b.hidden_stride};
      product.scale = p.scale;
      product.k_target = a.target + row;
      product.c = a.sums;
      product.c_stride = p.hidden;
      product.adds = true;
      launch_product(product, run.stream);
    });
    if (p.has.d_classifier) {
      launch_store_rows({.from = a.sums,
                         .rows = columns,
                         .columns = p.hidden,
                         .target = nullptr,
                         .to = static_cast<double*>(b.d_classifier) + column * b.d_classifier_stride,
                         .stride = b.d_classifier_stride,
                         .accumulate = p.accumulate.d_classifier},
                        run.stream);
    }
    if (p.has.d_bias) {
      launch_store_rows({.from = a.bias_sums,
                         .rows = columns,
                         .columns = 1,
                         .target = nullptr,
                         .to = static_cast<double*>(b.d_bias) + column,
                         .stride = 1,
                         .accumulate = p.accumulate.d_bias,
                         .factor = p.bias_scale},
                        run.stream);
    }
  });
}

}  // namespace

void Float64Plan::run(const Buffers& buffers, Workspace workspace, void* stream,
                      const Communicator* /*group*/) const {
  const DeviceGuard guard(device_);
  const Arena arena = lay_out(problem_, size_, workspace);
  const Runner run{problem_,
                   buffers,
                   size_,
                   arena,
                   inputs_of(problem_, buffers, arena),
                   static_cast<cudaStream_t>(stream)};
  if (problem_.targets_per_row > 0) {
    launch_join_targets(run.inputs.rows, buffers.target_weight, DType::kF64, arena.joined, run.stream);
  }
  launch_prepare_rows(run.inputs, run.arena, buffers, run.stream);
  if (problem_.needs_forward()) forward(run);
  if (!problem_.needs_backward()) return;
  if (problem_.tokens > 0) load_upstream(run);
  if (problem_.has.d_hidden) sweep_rows(run);
  if (problem_.has.d_classifier || problem_.has.d_bias) sweep_columns(run);
}

}  // namespace logitless::cuda::float64
