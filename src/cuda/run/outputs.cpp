#include "cuda/run/runner.h"

namespace logitless::cuda {
namespace {

template <class Real>
void clear_rows(const RunnerOf<Real>& run, void* data, DType dtype, int64_t stride, int64_t rows) {
  launch_zero_rows(data, dtype, stride, rows, run.problem.hidden, run.queue);
}

// Whether d_bias is made from a sum in the workspace at the end of the run: where no chunk of an exact plan
// writes it.
template <class Real>
bool ends_with_d_bias(const RunnerOf<Real>& run) {
  return run.problem.has.d_bias && (run.problem.tokens == 0 || run.detail.is_thinned());
}

}  // namespace

template <class Real>
void store_matrix(const RunnerOf<Real>& run, const void* from, DType from_dtype, const Window& window,
                  bool accumulate) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  launch_store_matrix({.from = from,
                       .from_dtype = from_dtype,
                       .from_stride = run.depth(),
                       .rows = window.columns,
                       .columns = p.hidden,
                       .to = at(b.d_classifier, p.dtype.d_classifier, window.first * b.d_classifier_stride),
                       .dtype = p.dtype.d_classifier,
                       .to_stride = b.d_classifier_stride,
                       .accumulate = accumulate},
                      run.queue);
}

// What no product will write: d_classifier when there are no rows or logits do not depend on the matrices.
template <class Real>
void clear_gradients(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  if (p.vocab == 0) return;  // of a rank of a group
  if (ends_with_d_bias(run)) {
    run.queue.clear(run.arena.d_bias, static_cast<size_t>(p.vocab) * sizeof(Real));
  }
  if (run.products && p.tokens > 0) return;
  if (p.has.d_classifier && !p.accumulate.d_classifier) {
    clear_rows(run, b.d_classifier, p.dtype.d_classifier, b.d_classifier_stride, p.vocab);
  }
}

template <class Real>
void finish_gradients(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  const ArenaOf<Real>& a = run.arena;
  if (p.has.d_hidden && !p.accumulate.d_hidden && !run.products) {
    clear_rows(run, b.d_hidden, p.dtype.d_hidden, b.d_hidden_stride, p.tokens);
  }
  if (a.d_classifier != nullptr && run.products && p.tokens > 0) {
    store_matrix(run, a.d_classifier, p.stats_dtype(), {0, p.vocab}, p.accumulate.d_classifier);
  }
  if (ends_with_d_bias(run) && p.vocab > 0) {
    launch_store_vector(a.d_bias, p.vocab, run.bias_gradient_scale(), b.d_bias, p.dtype.d_bias,
                        p.accumulate.d_bias, run.queue);
  }
}

#define LOGITLESS_INSTANTIATE(Real)                                                           \
  template void store_matrix(const RunnerOf<Real>&, const void*, DType, const Window&, bool); \
  template void clear_gradients(const RunnerOf<Real>&);                                       \
  template void finish_gradients(const RunnerOf<Real>&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
