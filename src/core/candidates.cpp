#include "core/candidates.h"

#include <algorithm>
#include <string>

#include "core/number_text.h"
#include "core/row_coefficients.h"
#include "core/status.h"

namespace logitless {
namespace {

void check_dtypes(const Candidates& c) {
  const bool is_float64 = c.hidden_dtype == DType::kF64;
  const auto check = [&](DType dtype, const char* argument) {
    expect(is_float(dtype) && (dtype == DType::kF64) == is_float64, argument,
           is_float64 ? "float64, as hidden_dtype is" : "float32, bfloat16 or float16", dtype_name(dtype));
  };
  expect(is_float(c.hidden_dtype), "hidden_dtype", "a floating point dtype", dtype_name(c.hidden_dtype));
  check(c.weight_dtype, "weight_dtype");
  if (c.bias != nullptr) check(c.bias_dtype, "bias_dtype");
  if (c.d_hidden != nullptr) check(c.d_hidden_dtype, "d_hidden_dtype");
  if (c.d_weight != nullptr) check(c.d_weight_dtype, "d_weight_dtype");
  if (c.d_bias != nullptr) check(c.d_bias_dtype, "d_bias_dtype");
  const bool rounds = c.compute_dtype == DType::kBF16 || c.compute_dtype == DType::kF16;
  expect(c.compute_dtype == DType::kF32 || rounds, "compute_dtype", "float32, bfloat16 or float16",
         dtype_name(c.compute_dtype));
  expect(!(rounds && is_float64), "compute_dtype", "float32, which rounds nothing, with float64",
         dtype_name(c.compute_dtype));
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

// The backends that are not reference compute with float32 factors.
void check_factors(const Candidates& c, double scale, double softcap, double temperature) {
  const bool is_float64 = c.hidden_dtype == DType::kF64;
  const double most = is_float64 ? std::numeric_limits<double>::max() : 0x1p126;
  const double least = is_float64 ? std::numeric_limits<double>::min() : 0x1p-126;
  const auto in_range = [&](double factor) { return factor >= least && factor <= most; };
  const std::string range =
      is_float64 ? "a finite number that is not subnormal" : "a number in [2^-126, 2^126]";
  expect(std::fabs(scale) <= most, "scale", is_float64 ? "a finite number" : "a number in [-2^126, 2^126]",
         number_text(scale));
  expect(softcap == 0 || in_range(softcap), "softcap", "0, or " + range, number_text(softcap));
  expect(temperature > 0 && in_range(temperature) && in_range(1 / temperature), "temperature",
         range + " and > 0", number_text(temperature));
  expect(std::fabs(c.scale) <= most, "scale / temperature", "a number of float32's range",
         number_text(c.scale));
  expect(c.softcap == 0 || in_range(c.softcap), "softcap / temperature", range, number_text(c.softcap));
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
  if (c.softcap != 0) required(c.logits, "logits");
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
  const double scale = c.scale, softcap = c.softcap;
  if (c.row_temperature != nullptr) temperature = 1;
  c.product_scale = scale;
  c.scale = scale / temperature;
  c.softcap = softcap / temperature;
  c.bias_scale = 1 / temperature;
  check_factors(c, scale, softcap, temperature);
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
  const LogitTransform<double> transform{c.scale, c.softcap};
  const double bias =
      c.bias == nullptr ? 0 : c.bias_scale * load_as_double(c.bias, c.bias_dtype, element.column);
  return transform.logit(dot, bias, inverse_temperature_of(c, element.row));
}

double candidate_gradient(const Candidates& c, const CandidateElement& element, int64_t e) {
  if (element.column < 0) return 0;
  const double grad = load_as_double(c.grad, c.stats_dtype(), e);
  if (grad == 0) return 0;
  const double of_row = inverse_temperature_of(c, element.row);
  const LogitTransform<double> transform{c.scale, c.softcap};
  const double z = c.softcap == 0 ? 0 : load_as_double(c.logits, c.stats_dtype(), e);
  return grad * transform.slope(z, of_row) * of_row * c.bias_scale;
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
