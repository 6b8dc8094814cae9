#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "core/sparsification.h"
#include "core/targets.h"
#include "cpu/sparsified/sparsified.h"

namespace logitless::cpu {
namespace {

// w_j
float class_weight(const Runner& run, int64_t column) {
  if (!run.problem.has.class_weight) return 1;
  return static_cast<const float*>(run.buffers.class_weight)[run.problem.vocab_start + column];
}

// sums += value * row, one fp32 row.
void add_row(const Runner& run, std::span<const float> row, float value, std::span<float> sums) {
  const SparseElement one{0, value};
  run.kernels.add_rows({{row.data(), DType::kF32, 0}, &one, 1, run.problem.hidden, sums.data()});
}

// One row's numbers, in double; coefficients carry the logits' scale.
struct Row {
  int64_t at = 0;      // index among the rows that are not ignored
  int64_t source = 0;  // the caller's row
  int64_t target = -1;
  LogSumExp<double> lse;
  RowCoefficients<double> k;
  double inverse_temperature = 1;
};

// Returns lse as two floats in every pass, so that a backward pass with lse as an input has the same bits.
LogSumExp<double> lse_of(const Runner& run, const HostLoss& loss, const Chunk& chunk, const Row& row) {
  if (!run.problem.needs_forward()) return known_lse(loss, row.source);
  const LogSumExp<float> saved =
      split_to<float>(log_sum_exp_parts(run.arena.stats[static_cast<size_t>(row.at - chunk.first)]));
  return {saved.high, saved.low};
}

Row make_row(const Runner& run, const HostLoss& loss, const Chunk& chunk, int64_t at) {
  const Problem& p = run.problem;
  Row row;
  row.at = at;
  row.source = run.arena.rows[static_cast<size_t>(at)];
  const int64_t column = target_of_row(p, run.buffers.targets, row.source) - p.vocab_start;
  if (column >= 0 && column < p.vocab) row.target = column;
  row.lse = lse_of(run, loss, chunk, row);
  const double entropy =
      p.has.grad_entropy ? load_as_double(run.buffers.entropy, p.stats_dtype(), row.source) : 0;
  const double fold = p.scale != 0 ? p.scale : 1;
  row.k = scaled(coefficients_of_row(loss, row.source, row.lse.value(), entropy), fold);
  row.inverse_temperature = inverse_temperature_of_row(p, run.buffers, row.source);
  return row;
}

// The factor of a probability: (a + b log p) t'(z).
double factor_of(const Row& row, double z, double slope) {
  return probability_factor(row.k, row.lse.log_p(z)) * slope;
}

// dz of the target; label smoothing's part is added to all columns together.
double target_gradient(const Problem& p, const Row& row, double z) {
  const RowCoefficients<double> k{row.k.a, row.k.b, 0, row.k.g};
  return dz_element(k, row.lse.log_p(z), 1.0, 1) * softcap_slope(p, z, row.inverse_temperature);
}

// The weight of element k of the row's list.
ElementWeight weight_of(const Runner& run, const Row& row, int32_t k) {
  const SparsifiedArena& t = run.arena.sparsified;
  const auto at = static_cast<size_t>(row.at * t.capacity + k);
  const SparseElement& element = t.draws.elements[at];
  if (!run.problem.screens()) return reweight(run, row.at, element, row.lse);
  const auto probability = static_cast<float>(std::exp(row.lse.log_p(element.value)));
  return {probability / t.draws.probability[at], probability};
}

// Writes the row's list of columns and gradients of their dot products. Returns its length.
int32_t finish_list(const Runner& run, const Row& row, DrawVariance<double>* variance) {
  const Problem& p = run.problem;
  const SparsifiedArena& t = run.arena.sparsified;
  const SparseElement* drawn = t.row(t.draws.elements, row.at).data();
  SparseElement* out = t.row(t.elements, row.at).data();  // may be the same: written behind the reads
  const int32_t count = t.draws.count[static_cast<size_t>(row.at)];
  int32_t size = 0;
  // Without a finite sum of exp logits there is no draw, and every element of the exact gradient is NaN. One
  // element of the row is made NaN here.
  if (!std::isfinite(row.lse.value())) {
    out[size++] = {static_cast<int32_t>(std::max<int64_t>(row.target, 0)), static_cast<float>(NAN)};
    variance->add_exact(NAN);
    return size;
  }
  for (int32_t k = 0; k < count; ++k) {
    const SparseElement element = drawn[k];
    if (element.index == row.target) continue;
    const ElementWeight w = weight_of(run, row, k);
    if (w.weight == 0) continue;
    const double factor =
        factor_of(row, element.value, softcap_slope(p, element.value, row.inverse_temperature));
    const double d = w.weight * factor;
    out[size++] = {element.index, static_cast<float>(d)};
    if (w.weight == w.probability) {
      variance->add_exact(d);
    } else {
      variance->add_drawn(w.probability, factor, w.weight);
    }
  }
  if (row.target >= 0) {
    const double d = target_gradient(p, row, t.draws.target_logit[static_cast<size_t>(row.at)]);
    out[size++] = {static_cast<int32_t>(row.target), static_cast<float>(d)};
    variance->add_exact(d);
  }
  std::sort(out, out + size,
            [](const SparseElement& a, const SparseElement& b) { return a.index < b.index; });
  return size;
}

void write_d_hidden(const Runner& run, const Row& row, std::span<const SparseElement> list,
                    std::span<float> sums) {
  const Problem& p = run.problem;
  std::fill(sums.begin(), sums.end(), 0.0f);
  run.kernels.add_rows(
      {run.weight_from(0), list.data(), static_cast<int64_t>(list.size()), p.hidden, sums.data()});
  if (p.label_smoothing > 0) {
    add_row(run, run.arena.sparsified.weight_sum, static_cast<float>(row.k.c), sums);
  }
  run.kernels.store_row(sums.data(), p.hidden, 1, p.accumulate.d_hidden, p.dtype.d_hidden,
                        run.d_hidden_row(row.source));
}

void finish_row(const Runner& run, const Row& row, std::span<float> sums) {
  const Problem& p = run.problem;
  const SparsifiedArena& t = run.arena.sparsified;
  DrawVariance<double> variance;
  const int32_t size = finish_list(run, row, &variance);
  const auto list = t.row(t.elements, row.at).first(static_cast<size_t>(size));
  t.count[static_cast<size_t>(row.at)] = size;
  if (p.label_smoothing > 0) t.c[static_cast<size_t>(row.at)] = static_cast<float>(row.k.c);
  if (!t.column_count.empty()) {
    for (const SparseElement& element : list) {
      std::atomic_ref<int32_t>(t.column_count[static_cast<size_t>(element.index)])
          .fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (p.has.d_hidden) write_d_hidden(run, row, list, sums);
  if (run.buffers.kept_count != nullptr) run.buffers.kept_count[row.source] = size;
  if (run.buffers.draw_variance != nullptr) {
    store_from_double(run.buffers.draw_variance, p.stats_dtype(), row.source, variance.relative());
  }
}

// Cuts the columns into ranges of about as many elements each; returns how many.
int64_t cut_ranges(const Runner& run) {
  const SparsifiedArena& t = run.arena.sparsified;
  const int64_t most = range_elements(run.problem);
  int64_t ranges = 0;
  int64_t elements = 0;
  t.range_start[0] = 0;
  for (int64_t j = 0; j < run.problem.vocab; ++j) {
    const int64_t more = t.column_count[static_cast<size_t>(j)];
    if (elements + more > most || j - t.range_start[static_cast<size_t>(ranges)] == kRangeColumns) {
      t.range_start[static_cast<size_t>(++ranges)] = j;
      elements = 0;
    }
    elements += more;
  }
  t.range_start[static_cast<size_t>(++ranges)] = run.problem.vocab;
  return ranges;
}

// Sorts the range's elements by column and then by row (a counting sort). w.end then has the end of each
// column.
void sort_by_column(const Runner& run, const Range& range, const SparsifiedWorker& w) {
  const SparsifiedArena& t = run.arena.sparsified;
  int32_t at = 0;
  for (int64_t j = range.start; j < range.end; ++j) {
    w.end[static_cast<size_t>(j - range.start)] = at;
    at += t.column_count[static_cast<size_t>(j)];
  }
  for (int64_t i = 0; i < run.row_count; ++i) {
    const auto list = t.row(t.elements, i).first(static_cast<size_t>(t.count[static_cast<size_t>(i)]));
    auto element = std::lower_bound(list.begin(), list.end(), range.start,
                                    [](const SparseElement& e, int64_t column) { return e.index < column; });
    for (; element != list.end() && element->index < range.end; ++element) {
      int32_t& end = w.end[static_cast<size_t>(element->index - range.start)];
      w.elements[static_cast<size_t>(end++)] = {static_cast<int32_t>(run.arena.rows[static_cast<size_t>(i)]),
                                                element->value};
    }
  }
}

void write_d_weight(const Runner& run, int64_t column, std::span<const SparseElement> list,
                    std::span<float> sums) {
  const Problem& p = run.problem;
  std::byte* out = run.d_weight_row(column);
  if (list.empty() && p.label_smoothing == 0) {
    if (!p.accumulate.d_weight)
      std::memset(out, 0, static_cast<size_t>(p.hidden) * size_of(p.dtype.d_weight));
    return;
  }
  std::fill(sums.begin(), sums.end(), 0.0f);
  run.kernels.add_rows(
      {run.hidden_from(0), list.data(), static_cast<int64_t>(list.size()), p.hidden, sums.data()});
  if (p.label_smoothing > 0) add_row(run, run.arena.sparsified.hidden_sum, class_weight(run, column), sums);
  run.kernels.store_row(sums.data(), p.hidden, 1, p.accumulate.d_weight, p.dtype.d_weight, out);
}

// c is the sum of label smoothing's coefficients.
void write_d_bias(const Runner& run, int64_t column, std::span<const SparseElement> list, double c) {
  const Problem& p = run.problem;
  double sum = p.label_smoothing > 0 ? c * class_weight(run, column) : 0;
  for (const SparseElement& element : list) sum += element.value;
  sum *= p.scale != 0 ? p.bias_scale / p.scale : p.bias_scale;
  if (p.accumulate.d_bias) sum += load_as_double(run.buffers.d_bias, p.dtype.d_bias, column);
  store_from_double(run.buffers.d_bias, p.dtype.d_bias, column, sum);
}

// out = sum_k value(k) * matrix[index(k)] over k < count. Parts are added in their order.
template <class Element>
void weighted_sum(const Runner& run, const MatrixView& matrix, int64_t count, const Element& element,
                  std::span<float> out) {
  const int64_t padded = run.shape.hidden_padded;
  const std::span<float> parts = run.arena.sparsified.sum_parts;
  run.loop(kSumParts, [&](int64_t part, int) {
    float* sums = parts.data() + part * padded;
    std::fill_n(sums, padded, 0.0f);
    constexpr int64_t kAtOnce = 64;
    SparseElement rows[kAtOnce];
    const int64_t end = count * (part + 1) / kSumParts;
    for (int64_t k = count * part / kSumParts; k < end; k += kAtOnce) {
      const int64_t size = std::min(kAtOnce, end - k);
      for (int64_t r = 0; r < size; ++r) rows[r] = element(k + r);
      run.kernels.add_rows({matrix, rows, size, run.problem.hidden, sums});
    }
  });
  std::fill(out.begin(), out.end(), 0.0f);
  for (int64_t part = 0; part < kSumParts; ++part) {
    for (size_t j = 0; j < out.size(); ++j) out[j] += parts[static_cast<size_t>(part * padded) + j];
  }
}

}  // namespace

void finish_rows(const Runner& run, const HostLoss& loss, const Chunk& chunk) {
  constexpr int64_t kRows = 8;
  run.loop(ceil_div(chunk.count, kRows), [&](int64_t task, int worker) {
    const WorkerArena w = run.worker(worker);
    const int64_t end = std::min(chunk.count, (task + 1) * kRows);
    for (int64_t i = task * kRows; i < end; ++i) {
      finish_row(run, make_row(run, loss, chunk, chunk.first + i), w.sparsified.sums);
    }
  });
}

void finish_columns(const Runner& run) {
  const Problem& p = run.problem;
  const SparsifiedArena& t = run.arena.sparsified;
  double c = 0;
  if (p.label_smoothing > 0) {
    for (int64_t i = 0; i < run.row_count; ++i) c += t.c[static_cast<size_t>(i)];
  }
  run.loop(cut_ranges(run), [&](int64_t task, int worker) {
    const SparsifiedWorker w = run.worker(worker).sparsified;
    const Range range{t.range_start[static_cast<size_t>(task)], t.range_start[static_cast<size_t>(task + 1)]};
    sort_by_column(run, range, w);
    int32_t begin = 0;
    for (int64_t j = range.start; j < range.end; ++j) {
      const int32_t end = w.end[static_cast<size_t>(j - range.start)];
      const auto list = std::span<const SparseElement>(w.elements)
                            .subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      if (p.has.d_weight) write_d_weight(run, j, list, w.sums);
      if (p.has.d_bias) write_d_bias(run, j, list, c);
      begin = end;
    }
  });
}

void sum_weight(const Runner& run) {
  const auto element = [&](int64_t j) {
    return SparseElement{static_cast<int32_t>(j), class_weight(run, j)};
  };
  weighted_sum(run, run.weight_from(0), run.problem.vocab, element, run.arena.sparsified.weight_sum);
}

void sum_hidden(const Runner& run) {
  const auto element = [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    return SparseElement{static_cast<int32_t>(run.arena.rows[at]), run.arena.sparsified.c[at]};
  };
  weighted_sum(run, run.hidden_from(0), run.row_count, element, run.arena.sparsified.hidden_sum);
}

}  // namespace logitless::cpu
