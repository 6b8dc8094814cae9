// Logits at lists of columns and their gradients in double, one scalar at a time.
#include "core/candidates.h"

#include "reference/backend.h"

namespace logitless::reference {
namespace {

class CandidateOperand {
 public:
  CandidateOperand(const Candidates& c, const void* data, DType dtype, int64_t stride)
      : data_(data), dtype_(dtype), stride_(stride), to_(c.rounds_to(dtype)) {}

  double operator()(int64_t row, int64_t d) const {
    const double x = load_as_double(data_, dtype_, row * stride_ + d);
    if (to_ == DType::kF32) return x;
    const auto single = static_cast<float>(x);
    return to_ == DType::kBF16 ? bf16_to_float(float_to_bf16(single)) : f16_to_float(float_to_f16(single));
  }

 private:
  const void* data_;
  DType dtype_;
  int64_t stride_;
  DType to_;
};

CandidateOperand hidden_of(const Candidates& c) {
  return {c, c.hidden, c.hidden_dtype, c.hidden_stride};
}
CandidateOperand weight_of(const Candidates& c) {
  return {c, c.weight, c.weight_dtype, c.weight_stride};
}

void write_candidate_logit(const Candidates& c, int64_t e) {
  const CandidateOperand hidden = hidden_of(c), weight = weight_of(c);
  const CandidateElement element = element_at(c, e);
  double z = -std::numeric_limits<double>::infinity();
  if (element.column >= 0) {
    double dot = 0;
    for (int64_t d = 0; d < c.hidden_size; ++d) dot += hidden(element.row, d) * weight(element.column, d);
    z = candidate_logit(c, element, dot);
  }
  store_from_double(c.logits, c.stats_dtype(), e, z);
}

void write_d_hidden_row(const Candidates& c, int64_t row) {
  const CandidateOperand weight = weight_of(c);
  for (int64_t d = 0; d < c.hidden_size; ++d) {
    double sum = 0;
    for (int64_t e = c.lists.begin(row); c.factors.scale != 0 && e < c.lists.begin(row + 1); ++e) {
      const CandidateElement element = element_at(c, e);
      const double u = candidate_gradient(c, element, e);
      if (u != 0) sum += u * c.product_scale * weight(element.column, d);
    }
    store_from_double(c.d_hidden, c.d_hidden_dtype, row * c.d_hidden_stride + d, sum);
  }
}

void write_d_weight_row(const Candidates& c, const ColumnOrder& order, int64_t column) {
  const CandidateOperand hidden = hidden_of(c);
  for (int64_t d = 0; d < c.hidden_size; ++d) {
    const int64_t at = column * c.d_weight_stride + d;
    double sum = c.accumulate_d_weight ? load_as_double(c.d_weight, c.d_weight_dtype, at) : 0;
    for (const int64_t e : order.of(column)) {
      const CandidateElement element = element_at(c, e);
      const double u = candidate_gradient(c, element, e);
      if (u != 0 && c.factors.scale != 0) sum += u * c.product_scale * hidden(element.row, d);
    }
    store_from_double(c.d_weight, c.d_weight_dtype, at, sum);
  }
}

void write_d_bias_element(const Candidates& c, const ColumnOrder& order, int64_t column) {
  double sum = 0;
  for (const int64_t e : order.of(column)) sum += candidate_gradient(c, element_at(c, e), e);
  store_from_double(c.d_bias, c.d_bias_dtype, column, sum);
}

}  // namespace

uint64_t candidates_bytes(const Candidates& c, const BackendOptions& /*options*/) {
  Workspace counted;
  if (c.stage == CandidatesStage::kGradient) take_column_order(c, &counted);
  return counted.used();
}

void candidates(const Candidates& c, const BackendOptions& options, Workspace workspace, void* /*stream*/) {
  if (c.stage == CandidatesStage::kLogits) {
    options.parallel_for(c.lists.elements, [&](int64_t e, int) { write_candidate_logit(c, e); });
    return;
  }
  if (c.d_hidden != nullptr) {
    options.parallel_for(c.lists.rows, [&](int64_t row, int) { write_d_hidden_row(c, row); });
  }
  if (!c.needs_columns()) return;
  const ColumnOrder order = take_column_order(c, &workspace);
  sort_by_column(c, order);
  options.parallel_for(c.lists.vocab, [&](int64_t column, int) {
    if (c.d_weight != nullptr) write_d_weight_row(c, order, column);
    if (c.d_bias != nullptr) write_d_bias_element(c, order, column);
  });
}

}  // namespace logitless::reference
