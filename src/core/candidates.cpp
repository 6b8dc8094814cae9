#include "core/candidates.h"

#include <algorithm>
#include <string>

#include "core/number_text.h"
#include "core/row_coefficients.h"
#include "core/status.h"
#include "core/validate.h"

namespace logitless {
namespace {

void check_dtypes(const Candidates& c) {
  const bool is_float64 = c.hidden_dtype == DType::kF64;
  check_float("hidden_dtype", c.hidden_dtype, is_float64);
  check_float("weight_dtype", c.weight_dtype, is_float64);
  if (c.bias != nullptr) check_float("bias_dtype", c.bias_dtype, is_float64);
  if (c.d_hidden != nullptr) check_float("d_hidden_dtype", c.d_hidden_dtype, is_float64);
  if (c.d_weight != nullptr) check_float("d_weight_dtype", c.d_weight_dtype, is_float64);
  if (c.d_bias != nullptr) check_float("d_bias_dtype", c.d_bias_dtype, is_float64);
  check_compute_dtype(c.compute_dtype, is_float64);
}

void check_lengths(const CandidateLists& lists) {
  expect(lists.rows >= 0, "rows", "at least 0", std::to_string(lists.rows));
  expect(lists.vocab >= 1, "vocab", "at least 1", std::to_string(lists.vocab));
  expect(lists.elements >= 0, "elements", "at least 0", std::to_string(lists.elements));
  expect(lists.rows > 0 || lists.elements == 0, "elements", "0 without rows", std::to_string(lists.elements));
  expect(lists.offsets != nullptr || lists.rows == 0 || lists.elements % lists.rows == 0, "elements",
         "a multiple of rows = " + std::to_string(lists.rows) + " without offsets",
         std::to_string(lists.elements));
}

void check_pointers(const Candidates& c) {
  if (c.lists.elements == 0) return;
  required(c.lists.ids, "ids");
  if (c.stage == CandidatesStage::kLogits) {
    required(c.hidden, "hidden");
    required(c.weight, "weight");
    required(c.logits, "logits");
    return;
  }
  required(c.grad, "grad");
  if (!c.factors.is_linear()) required(c.logits, "logits");
  if (c.d_hidden != nullptr) required(c.weight, "weight");
  if (c.d_weight != nullptr) required(c.hidden, "hidden");
}

double inverse_temperature_of(const Candidates& c, int64_t row) {
  if (c.row_temperature == nullptr) return 1;
  const double t = load_as_double(c.row_temperature, c.stats_dtype(), row);
  return c.stats_dtype() == DType::kF64 ? inverse_temperature(t)
                                        : inverse_temperature(t, double{std::numeric_limits<float>::min()});
}

}  // namespace

Candidates validated(Candidates c, double temperature, bool sizes_only) {
  CandidateLists& lists = c.lists;
  check_lengths(lists);
  expect(c.hidden_size >= 1, "hidden_size", "at least 1", std::to_string(c.hidden_size));
  lists.per_row = lists.offsets == nullptr && lists.rows > 0 ? lists.elements / lists.rows : 0;
  check_dtypes(c);
  c.product_scale = c.factors.scale;
  c.factors = checked_factors(c.factors, temperature, c.row_temperature != nullptr, c.hidden_dtype);
  c.hidden_stride = stride_of(c.hidden_stride, c.hidden_size, "hidden_stride", "hidden_size");
  c.weight_stride = stride_of(c.weight_stride, c.hidden_size, "weight_stride", "hidden_size");
  c.d_hidden_stride = stride_of(c.d_hidden_stride, c.hidden_size, "d_hidden_stride", "hidden_size");
  c.d_weight_stride = stride_of(c.d_weight_stride, c.hidden_size, "d_weight_stride", "hidden_size");
  if (!sizes_only) check_pointers(c);
  return c;
}

void check_lists(const CandidateLists& lists) {
  if (lists.offsets != nullptr) {
    const auto check = [&](int64_t row, bool ok, const std::string& expected) {
      expect(ok, "offsets[" + std::to_string(row) + "]", expected, std::to_string(lists.offsets[row]));
    };
    check(0, lists.offsets[0] == 0, "0");
    for (int64_t row = 1; row <= lists.rows; ++row) {
      check(row, lists.offsets[row] >= lists.offsets[row - 1],
            "at least " + std::to_string(lists.offsets[row - 1]) + ", the number before it");
    }
    check(lists.rows, lists.offsets[lists.rows] == lists.elements,
          "elements = " + std::to_string(lists.elements));
  }
  for (int64_t e = 0; e < lists.elements; ++e) {
    if (lists.is_valid(lists.id(e))) continue;
    throw Error(Status::kInvalidTarget,
                ErrorInfo{.argument = "ids",
                          .expected = "0 <= id < " + std::to_string(lists.vocab) + " or ignore_id " +
                                      std::to_string(lists.ignore_id),
                          .got = std::to_string(lists.id(e)),
                          .row = e,
                          .place = std::to_string(e)});
  }
}

CandidateElement element_at(const Candidates& c, int64_t e) {
  const int64_t id = c.lists.id(e);
  return {c.lists.row_of(e), id == c.lists.ignore_id ? -1 : id};
}

double candidate_logit(const Candidates& c, const CandidateElement& element, double dot) {
  const double bias = c.bias == nullptr ? 0 : load_as_double(c.bias, c.bias_dtype, element.column);
  return c.factors.logit(dot, bias, inverse_temperature_of(c, element.row));
}

double candidate_gradient(const Candidates& c, const CandidateElement& element, int64_t e) {
  if (element.column < 0) return 0;
  const double grad = load_as_double(c.grad, c.stats_dtype(), e);
  if (grad == 0) return 0;
  const double z = c.factors.is_linear() ? 0 : load_as_double(c.logits, c.stats_dtype(), e);
  return c.factors.gradient(grad, z, inverse_temperature_of(c, element.row));
}

ColumnOrder take_column_order(const Candidates& c, Workspace* workspace) {
  ColumnOrder order;
  if (!c.needs_columns()) return order;
  order.start = workspace->take<int64_t>(c.lists.vocab + 1);
  order.order = workspace->take<int64_t>(c.lists.elements);
  return order;
}

void sort_by_column(const Candidates& c, const ColumnOrder& to) {
  const auto column = [&](int64_t e) { return c.lists.id(e) == c.lists.ignore_id ? -1 : c.lists.id(e); };
  std::fill(to.start.begin(), to.start.end(), 0);
  // Counts are two places ahead, so that the second loop leaves each column's start in its own place.
  const size_t columns = to.start.size() - 1;
  const auto place = [&](int64_t j, size_t ahead) { return static_cast<size_t>(j) + ahead; };
  for (int64_t e = 0; e < c.lists.elements; ++e) {
    const int64_t j = column(e);
    if (j >= 0 && place(j, 2) <= columns) ++to.start[place(j, 2)];
  }
  for (size_t k = 1; k <= columns; ++k) to.start[k] += to.start[k - 1];
  for (int64_t e = 0; e < c.lists.elements; ++e) {
    const int64_t j = column(e);
    if (j >= 0) to.order[static_cast<size_t>(to.start[place(j, 1)]++)] = e;
  }
}

}  // namespace logitless
