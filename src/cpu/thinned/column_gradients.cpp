#include <algorithm>
#include <cstring>

#include "cpu/thinned/thinned.h"

namespace logitless::cpu {
namespace {

// Cuts the columns into ranges of about as many elements each; returns how many.
int64_t cut_ranges(const Runner& run) {
  const ThinnedArena& t = run.arena.thinned;
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

// The range's elements, column by column and in the order of the rows: a counting sort. w.end then has the
// end of each column.
void sort_by_column(const Runner& run, const Range& range, const ThinnedWorker& w) {
  const ThinnedArena& t = run.arena.thinned;
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

void write_d_classifier(const Runner& run, int64_t column, std::span<const SparseElement> list,
                        std::span<float> sums) {
  const Problem& p = run.problem;
  std::byte* out = run.d_classifier_row(column);
  if (list.empty() && p.label_smoothing == 0) {
    if (!p.accumulate.d_classifier)
      std::memset(out, 0, static_cast<size_t>(p.hidden) * size_of(p.dtype.d_classifier));
    return;
  }
  std::fill(sums.begin(), sums.end(), 0.0f);
  run.kernels.add_rows(
      {run.hidden_from(0), list.data(), static_cast<int64_t>(list.size()), p.hidden, sums.data()});
  if (p.label_smoothing > 0) add_row(run, run.arena.thinned.hidden_sum, class_weight(run, column), sums);
  run.kernels.store_row(sums.data(), p.hidden, 1, p.accumulate.d_classifier, p.dtype.d_classifier, out);
}

// c: the sum of label smoothing's coefficients.
void write_d_bias(const Runner& run, int64_t column, std::span<const SparseElement> list, double c) {
  const Problem& p = run.problem;
  double sum = p.label_smoothing > 0 ? c * class_weight(run, column) : 0;
  for (const SparseElement& element : list) sum += element.value;
  sum *= p.scale != 0 ? p.bias_scale / p.scale : p.bias_scale;
  if (p.accumulate.d_bias) sum += load_as_double(run.buffers.d_bias, p.dtype.d_bias, column);
  store_from_double(run.buffers.d_bias, p.dtype.d_bias, column, sum);
}

}  // namespace

void finish_columns(const Runner& run) {
  const Problem& p = run.problem;
  const ThinnedArena& t = run.arena.thinned;
  double c = 0;
  if (p.label_smoothing > 0) {
    for (int64_t i = 0; i < run.row_count; ++i) c += t.c[static_cast<size_t>(i)];
  }
  run.loop(cut_ranges(run), [&](int64_t task, int worker) {
    const ThinnedWorker w = run.worker(worker).thinned;
    const Range range{t.range_start[static_cast<size_t>(task)], t.range_start[static_cast<size_t>(task + 1)]};
    sort_by_column(run, range, w);
    int32_t begin = 0;
    for (int64_t j = range.start; j < range.end; ++j) {
      const int32_t end = w.end[static_cast<size_t>(j - range.start)];
      const auto list = std::span<const SparseElement>(w.elements)
                            .subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      if (p.has.d_classifier) write_d_classifier(run, j, list, w.sums);
      if (p.has.d_bias) write_d_bias(run, j, list, c);
      begin = end;
    }
  });
}

}  // namespace logitless::cpu
