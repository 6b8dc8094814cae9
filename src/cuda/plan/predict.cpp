#include "cuda/plan/describe.h"

#include <algorithm>

#include "cuda/engines/engine.h"
#include "cuda/engines/kernel_times.h"
#include "cuda/plan/sizes.h"
#include "cuda/run/sparsified/sizes.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

constexpr double kChunkRounding = 0.04;  // of the time: the gain that justifies one more rounding of d_weight

// Sparsified gradients: the cost of a kept element, and of each number of its two rows in the gathers, fitted
// on seven heads with a flat softmax. The margin is there because products run up to 15% faster than the rate
// above after idle, and gathers do not.
constexpr double kElementSeconds = 0.1e-9, kGatherSeconds = 0.44e-12, kProcessorsMeasured = 132;
// Rows that do not begin at multiples of 16 bytes need this many times the accesses.
constexpr double kUnalignedGather = 1.5;
// Cost of a place in a list, in bytes moved. 8192 lists of 3072 took 0.45 ms, mostly to sort the listed
// elements.
constexpr double kListedBytes = 72;
constexpr double kSparsifiedLaunches = 80, kSparsifiedMargin = 1.1;

class Prediction {
 public:
  Prediction(const Problem& problem, const PlanDetail& detail, const Device& device)
      : p_(problem), d_(detail), times_(problem, device) {}

  // Time of a launch's logits and their reduction, with `bytes` written for each.
  double logits(int64_t rows, int64_t columns, double bytes) const {
    if (!p_.has_fp8_logits()) return logits_of(operand_dtype(p_), rows, columns, bytes);
    return rounded(columns) + rounded_logits(rows, columns, d_.rounded_window, bytes);
  }
  // Time of products of rounded rows, and of the launches that round the weight's, window by window.
  double rounded_logits(int64_t rows, int64_t columns, int64_t window, double bytes) const {
    const DType dtype = rounded_dtype(d_.engine->traits().has_e4m3);
    return KernelTimes::in_parts(
        columns, window, [&](int64_t part) { return kLaunchSeconds + logits_of(dtype, rows, part, bytes); });
  }
  double rounded(int64_t rows) const {
    const DType dtype = rounded_dtype(d_.engine->traits().has_e4m3);
    return moved(rows, p_.hidden, static_cast<double>(size_of(operand_dtype(p_)) + size_of(dtype)));
  }
  double logits_of(DType dtype, int64_t rows, int64_t columns, double bytes) const {
    LogitsArgs args;
    args.dtype = dtype;
    args.rows = rows;
    args.columns = columns;
    args.depth = p_.hidden;
    if (p_.pass == Pass::kForward) args.of_epilogue = forward_epilogue(p_);
    return d_.engine->seconds(args, {nullptr, d_.scratch_rows, d_.scratch_columns, nullptr, 0}, bytes,
                              times_);
  }

  // Time for the whole vocabulary, with a launch for each window of a copied weight.
  double all_logits(int64_t rows, double bytes) const {
    const int64_t window = d_.copies_weight ? d_.vocab_window : p_.vocab;
    return KernelTimes::in_parts(p_.vocab, window,
                                 [&](int64_t columns) { return logits(rows, columns, bytes); });
  }

  // Time of kTop beyond that of all logits: the sample, and the lists, which are written, read and sorted.
  double top(int64_t rows) const {
    if (p_.top_k == 0 || d_.engine->traits().top_groups == 0) return 0;
    const TopSizes sizes = top_sizes(p_, d_);
    const double sample = KernelTimes::in_parts(sizes.sampled, sizes.window,
                                                [&](int64_t columns) { return logits(rows, columns, 0); });
    return sample + moved(rows, sizes.capacity, kListedBytes) + 5 * kLaunchSeconds;
  }

  // Time of copies of the operands: read in the caller's dtype, written in that of the products.
  double copied_weight(int64_t columns) const {
    if (!d_.copies_weight || columns <= 0) return 0;
    return moved(columns, p_.hidden, bytes_copied(p_.dtype.weight)) + kLaunchSeconds;
  }
  double copied_hidden(int64_t rows) const {
    const double copied =
        d_.source == HiddenSource::kCaller ? 0 : moved(rows, p_.hidden, bytes_copied(p_.dtype.hidden));
    return copied + (p_.has_fp8_logits() ? rounded(rows) + kLaunchSeconds : 0);
  }

  // Time to store d_weight from where it is staged.
  double stored_weight() const {
    if (!p_.has.d_weight || writes_d_weight(p_)) return 0;
    return moved(p_.vocab, p_.hidden,
                 static_cast<double>(size_of(staging_dtype(p_)) + size_of(p_.dtype.d_weight)));
  }

  double gradients(int64_t rows, int64_t columns, bool adds_d_hidden) const {
    double seconds = 2 * kLaunchSeconds;
    if (p_.has.d_hidden) {
      seconds += times_.product(rows, p_.hidden, columns);
      if (adds_d_hidden) seconds += moved(rows, p_.hidden, 8);
    }
    if (p_.has.d_weight) seconds += times_.product(columns, p_.hidden, rows);
    if (p_.has.d_bias) seconds += moved(rows, columns, 2);
    return seconds;
  }

  // Time of gradients from kept exp logits. Windows are those of d_hidden and of a staged d_weight.
  double gradients_of_exp_logits(int64_t rows, int64_t columns) const {
    if (columns == 0) return 0;
    const auto size = static_cast<double>(size_of(operand_dtype(p_)));
    if (exp_logits_become_dz(p_)) {
      const int64_t window = saves_exp_logits(p_, d_) ? d_.vocab_window : kept_window(p_, d_);
      return KernelTimes::in_parts(columns, window, [&](int64_t width) {
        return moved(rows, width, 2 * size) + kLaunchSeconds + gradients(rows, width, window < columns);
      });
    }
    const int64_t window = kept_window(p_, d_);
    double seconds = 2 * kLaunchSeconds;
    if (p_.has.d_hidden) {
      const auto sums = static_cast<double>(ceil_div(columns, window) - 1);
      seconds += sums * moved(rows, p_.hidden, 8);
      seconds += KernelTimes::in_parts(columns, window,
                                       [&](int64_t k) { return times_.product(rows, p_.hidden, k); });
    }
    if (p_.has.d_weight) {
      const int64_t staged = writes_d_weight(p_) ? columns : window;
      seconds += KernelTimes::in_parts(columns, staged,
                                       [&](int64_t m) { return times_.product(m, p_.hidden, rows); });
    }
    if (p_.has.d_bias) seconds += moved(rows, columns, 2);
    if (p_.smooths()) {  // sums of the weight and of hidden
      seconds += moved(p_.vocab, p_.hidden, size) + moved(rows, p_.hidden, size) + 6 * kLaunchSeconds;
    }
    return seconds;
  }

  // Time of gradients of the other columns.
  double gradients_of_lse(int64_t rows) const {
    const int64_t columns = p_.vocab - d_.cached_columns, first = std::min(columns, d_.vocab_window);
    const auto window = [&](bool adds) {
      return [this, rows, adds](int64_t width) {
        return logits(rows, width, static_cast<double>(size_of(operand_dtype(p_)))) +
               gradients(rows, width, adds);
      };
    };
    if (columns == 0) return 0;
    return window(d_.cached_columns > 0)(first) +
           KernelTimes::in_parts(columns - first, d_.vocab_window, window(true));
  }

  // Time to copy windows of the weight for these. A pass over all columns leaves the last window in place.
  double copies_for_gradients() const {
    if (d_.cached_columns < p_.vocab) return copied_weight(p_.vocab);
    const int64_t last = (p_.vocab - 1) % d_.vocab_window + 1;
    return p_.has.d_hidden ? copied_weight(p_.vocab - last) : 0;
  }

  // Time of a screen's logits: rows are rounded, and multiplied window by window. A run that reads a kept
  // copy of the weight is predicted like the one that wrote it, so that both have one plan.
  double screened_logits(int64_t rows) const {
    const DType dtype = rounded_dtype(d_.engine->traits().has_e4m3);
    const int64_t window = rounds_whole_weight(p_, dtype) ? p_.vocab : screen_window(p_, dtype);
    return rounded(rows) + rounded(p_.vocab) + rounded_logits(rows, p_.vocab, window, 0);
  }

  // Time with a flat softmax, which keeps 1 / threshold elements a row: the most of any softmax.
  double sparsified(int64_t rows, const SparsifiedSizes& s) const {
    const auto size = static_cast<double>(size_of(operand_dtype(p_)));
    double seconds = kSparsifiedLaunches * kLaunchSeconds;
    if (p_.needs_forward() || !p_.has.saved) {
      seconds += (p_.screens() ? screened_logits(rows) : all_logits(rows, 0)) * d_.engine->traits().draw_cost;
      if (d_.vocab_window < p_.vocab) seconds += copied_weight(p_.vocab);
    }
    if (!p_.needs_backward() && !p_.screens()) return seconds * kSparsifiedMargin;
    const double kept_of_row = std::min(1 / p_.threshold, static_cast<double>(p_.vocab - s.dense));
    const bool unaligned = p_.unaligned_rows || p_.hidden != padded_hidden(p_);
    const double of_number = kGatherSeconds * size / 2 * (unaligned ? kUnalignedGather : 1);
    // Behind a screen one more row of the weight is read for each element: half of what both gathers read.
    const double reads = (p_.needs_backward() ? 1 : 0) + (p_.screens() ? 0.5 : 0);
    const double of_element = kElementSeconds + reads * of_number * static_cast<double>(p_.hidden);
    seconds += static_cast<double>(rows) * kept_of_row * of_element * kProcessorsMeasured /
               static_cast<double>(times_.processors());
    if (!p_.needs_backward()) return seconds * kSparsifiedMargin;
    seconds += logits(rows, s.dense, size) + gradients(rows, s.dense + s.frequent, false) +
               moved(p_.vocab, p_.hidden, 2);
    return seconds * kSparsifiedMargin;
  }

  double moved(int64_t rows, int64_t columns, double bytes) const {
    return times_.moved(rows, columns, bytes);
  }

 private:
  double bytes_copied(DType from) const {
    return static_cast<double>(size_of(from) + size_of(operand_dtype(p_)));
  }

  const Problem& p_;
  const PlanDetail& d_;
  const KernelTimes times_;
};

}  // namespace

double predict_seconds(const Problem& p, PlanKind kind, int64_t chunk, const PlanDetail& d,
                       const Device& device) {
  const Prediction predict(p, d, device);
  const int64_t tokens = std::max<int64_t>(p.tokens, 1), chunks = ceil_div(tokens, chunk);
  const double exp_logits = static_cast<double>(size_of(operand_dtype(p)));
  const bool whole_copy = d.vocab_window >= p.vocab;  // made once
  const auto of_chunk = [&](int64_t rows) {
    double seconds = 20 * kLaunchSeconds;
    if (p.needs_forward()) {
      seconds += predict.all_logits(rows, d.cached_columns > 0 ? exp_logits : 0);
      if (!whole_copy) seconds += predict.copied_weight(p.vocab);
      seconds += predict.top(rows);
    }
    if (kind == PlanKind::kSparsified) {
      seconds = predict.sparsified(rows, sparsified_sizes(p));
    } else if (p.needs_backward()) {
      seconds += predict.gradients_of_exp_logits(rows, d.cached_columns) + predict.gradients_of_lse(rows);
      if (!whole_copy) seconds += predict.copies_for_gradients();
      if (d.cached_columns > 0 && d.cached_columns < p.vocab && !exp_logits_become_dz(p)) {
        seconds += predict.moved(rows, p.hidden, 8 + 2 * exp_logits) + 8 * kLaunchSeconds;
      }
      if (chunks == 1) seconds += predict.stored_weight();
      if (chunks > 1 && p.has.d_weight) {
        seconds += predict.moved(p.vocab, p.hidden, d.rounds_between_chunks ? 2 : 8);
      }
    }
    return seconds + predict.copied_hidden(rows);
  };
  // The last chunk may be short.
  double seconds = KernelTimes::in_parts(tokens, chunk, of_chunk);
  if (whole_copy) seconds += predict.copied_weight(p.vocab);
  // Less room for split-K sums costs little, but not nothing: the larger room is taken if it fits.
  return seconds + (d.gemm_bytes < static_cast<int64_t>(kGemmScratchBytes) && p.needs_backward() ? 10e-6 : 0);
}

double rounding_penalty(const Problem& p, int64_t chunk, const PlanDetail& d) {
  if (!d.rounds_between_chunks) return 1;
  return 1 + kChunkRounding * static_cast<double>(ceil_div(std::max<int64_t>(p.tokens, 1), chunk) - 1);
}

}  // namespace logitless::cuda
