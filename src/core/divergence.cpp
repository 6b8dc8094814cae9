#include "core/divergence.h"

#include <string>

#include "core/number_text.h"
#include "core/status.h"

namespace logitless {
namespace {

// Logits are multiplied with and divided by float32 factors, so the factor must fit into float32.
void check_factor(double value, bool is_float64, const std::string& argument) {
  const bool fits = is_float64 ? std::isfinite(value) : std::fabs(value) <= 0x1p126;
  expect(fits, argument, "a finite number, and at most 2^126 without float64", number_text(value));
}

HeadProducts head_of(HeadProducts head, const Divergence& d, double scale, double softcap, double temperature,
                     const std::string& name) {
  const bool is_float64 = d.dtype == DType::kF64;
  check_factor(scale, is_float64, name + "_scale");
  check_factor(softcap, is_float64, name + "_softcap");
  const double least = is_float64 ? std::numeric_limits<double>::min() : 0x1p-126;
  expect(softcap == 0 || softcap >= least, name + "_softcap", "0, or a positive number that is not subnormal",
         number_text(softcap));
  head.scale = scale / temperature;
  head.softcap = softcap / temperature;
  head.bias_scale = 1 / temperature;
  check_factor(head.scale, is_float64, name + "_scale / temperature");
  check_factor(head.softcap, is_float64, name + "_softcap / temperature");
  expect(softcap == 0 || head.softcap >= least, name + "_softcap / temperature",
         "0, or a positive number that is not subnormal", number_text(head.softcap));
  head.stride = stride_of(head.stride, d.columns, name + "_stride", "columns");
  if (d.rows > 0 && d.columns > 0) required(head.data, name.c_str());
  return head;
}

void check_rows(const Divergence& d) {
  if (d.rows == 0) return;
  required(d.student_lse, "student_lse");
  required(d.teacher_lse, "teacher_lse");
  if (d.stage == DivergenceStage::kSums) return;
  required(d.student_kl, "student_kl");
  if (d.stage == DivergenceStage::kGradient) {
    required(d.grad, "grad");
    required(d.d_logits, "d_logits");
  } else {
    required(d.divergence, "divergence");
  }
}

}  // namespace

Divergence validated(Divergence d, const DivergenceOptions& options) {
  const double t = options.temperature;
  expect(d.dtype == DType::kF32 || d.dtype == DType::kF64, "dtype", "float32 or float64",
         dtype_name(d.dtype));
  const bool is_float64 = d.dtype == DType::kF64;
  const bool fits = is_float(d.gradient_dtype) && (d.gradient_dtype == DType::kF64) == is_float64;
  expect(fits || d.stage != DivergenceStage::kGradient, "gradient_dtype",
         "float64 with float64, else another float dtype", dtype_name(d.gradient_dtype));
  expect(d.rows >= 0, "rows", "at least 0", std::to_string(d.rows));
  const bool is_part = d.stage == DivergenceStage::kSums || d.stage == DivergenceStage::kTerms;
  const int64_t least = is_part ? 0 : 1;
  expect(d.columns >= least, "columns", "at least " + std::to_string(least), std::to_string(d.columns));
  expect(d.beta == 0 || (d.beta >= 0x1p-100 && d.beta <= 1), "beta", "0, or a number in [2^-100, 1]",
         number_text(d.beta));
  expect(std::isfinite(t) && t > 0, "temperature", "a finite number > 0", number_text(t));
  check_factor(1 / t, is_float64, "1 / temperature");
  d.inverse_temperature = 1 / t;
  d.student = head_of(d.student, d, options.student_scale, options.student_softcap, t, "student");
  d.teacher = head_of(d.teacher, d, options.teacher_scale, options.teacher_softcap, t, "teacher");
  d.d_logits_stride = stride_of(d.d_logits_stride, d.columns, "d_logits_stride", "columns");
  check_rows(d);
  return d;
}

}  // namespace logitless
