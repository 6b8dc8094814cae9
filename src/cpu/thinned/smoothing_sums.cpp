#include <algorithm>

#include "cpu/thinned/thinned.h"

namespace logitless::cpu {
namespace {

// out = sum_k value(k) * matrix[index(k)] over k < count. Parts are added in their order.
template <class Element>
void weighted_sum(const Runner& run, const MatrixView& matrix, int64_t count, const Element& element,
                  std::span<float> out) {
  const int64_t padded = run.shape.hidden_padded;
  const std::span<float> parts = run.arena.thinned.sum_parts;
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

float class_weight(const Runner& run, int64_t column) {
  if (!run.problem.has.class_weight) return 1;
  return static_cast<const float*>(run.buffers.class_weight)[run.problem.vocab_start + column];
}

void add_row(const Runner& run, std::span<const float> row, float value, std::span<float> sums) {
  const SparseElement one{0, value};
  run.kernels.add_rows({{row.data(), DType::kF32, 0}, &one, 1, run.problem.hidden, sums.data()});
}

void sum_classifier(const Runner& run) {
  const auto element = [&](int64_t j) {
    return SparseElement{static_cast<int32_t>(j), class_weight(run, j)};
  };
  weighted_sum(run, run.classifier_from(0), run.problem.vocab, element, run.arena.thinned.classifier_sum);
}

void sum_hidden(const Runner& run) {
  const auto element = [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    return SparseElement{static_cast<int32_t>(run.arena.rows[at]), run.arena.thinned.c[at]};
  };
  weighted_sum(run, run.hidden_from(0), run.row_count, element, run.arena.thinned.hidden_sum);
}

}  // namespace logitless::cpu
