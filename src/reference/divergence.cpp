#include <algorithm>
#include <cmath>
#include <limits>

#include "core/divergence.h"
#include "core/logit_transform.h"
#include "reference/backend.h"

namespace logitless::reference {
namespace {

// The logits of row i of one head.
class RowLogits {
 public:
  RowLogits(const HeadProducts& head, DType dtype, int64_t row)
      : head_(head), transform_{head.scale, head.softcap}, dtype_(dtype), row_(row) {}

  double operator()(int64_t j) const {
    const double dot = load_as_double(head_.data, dtype_, row_ * head_.stride + j);
    const double bias = head_.bias == nullptr ? 0 : head_.bias_scale * load_as_double(head_.bias, dtype_, j);
    return transform_.logit(dot, bias, 1);
  }

  // dz / d(s x + b)
  double slope(double z) const { return head_.bias_scale * transform_.slope(z, 1); }

 private:
  const HeadProducts& head_;
  LogitTransform<double> transform_;
  DType dtype_;
  int64_t row_;
};

struct RowSums {
  double lse = 0, entropy = 0;
};

RowSums sums_of(const RowLogits& z, int64_t columns) {
  double max = -std::numeric_limits<double>::infinity(), sum = 0, offsets = 0;
  for (int64_t j = 0; j < columns; ++j) max = std::max(max, z(j));
  if (max == -std::numeric_limits<double>::infinity()) max = 0;  // of a part without a possible column
  for (int64_t j = 0; j < columns; ++j) {
    const double offset = z(j) - max, e = std::exp(offset);
    sum += e;
    offsets += times_log(e, offset);
  }
  return {max + std::log(sum), std::log(sum) - offsets / sum};
}

void sums(const Divergence& d, int64_t i) {
  const RowLogits student(d.student, d.dtype, i), teacher(d.teacher, d.dtype, i);
  const RowSums sums = sums_of(student, d.columns);
  store_from_double(d.student_lse, d.dtype, i, sums.lse);
  store_from_double(d.teacher_lse, d.dtype, i, sums_of(teacher, d.columns).lse);
  if (d.entropy != nullptr) store_from_double(d.entropy, d.dtype, i, sums.entropy);
}

void terms(const Divergence& d, int64_t i) {
  const RowLogits student(d.student, d.dtype, i), teacher(d.teacher, d.dtype, i);
  const Mixture<double> mixture = mixture_of<double>(d.beta);
  // Rounded as they are stored, so that both stages see the same probabilities.
  const double student_lse = load_as_double(d.student_lse, d.dtype, i);
  const double teacher_lse = load_as_double(d.teacher_lse, d.dtype, i);
  double student_kl = 0, teacher_kl = 0;
  for (int64_t j = 0; j < d.columns; ++j) {
    const auto column = divergence_column(mixture, student(j) - student_lse, teacher(j) - teacher_lse);
    student_kl += column.student_term;
    teacher_kl += column.teacher_term;
  }
  store_from_double(d.student_kl, d.dtype, i, student_kl);
  store_from_double(d.divergence, d.dtype, i, divergence_of(mixture, student_kl, teacher_kl));
}

void gradient(const Divergence& d, int64_t i) {
  const RowLogits student(d.student, d.dtype, i), teacher(d.teacher, d.dtype, i);
  const Mixture<double> mixture = mixture_of<double>(d.beta);
  const double student_lse = load_as_double(d.student_lse, d.dtype, i);
  const double teacher_lse = load_as_double(d.teacher_lse, d.dtype, i);
  const double student_kl = load_as_double(d.student_kl, d.dtype, i);
  const double grad = load_as_double(d.grad, d.dtype, i);
  for (int64_t j = 0; j < d.columns; ++j) {
    double g = 0;
    if (grad != 0) {
      const double z = student(j), log_q = teacher(j) - teacher_lse;
      const auto column = divergence_column(mixture, z - student_lse, log_q);
      g = grad * student.slope(z) * divergence_slope(mixture, column, std::exp(log_q), student_kl);
    }
    store_from_double(d.d_logits, d.gradient_dtype, i * d.d_logits_stride + j, g);
  }
}

}  // namespace

void divergence(const Divergence& d, const BackendOptions& options, void* /*stream*/) {
  constexpr DivergenceRow kRow{sums, terms, gradient};
  options.parallel_for(d.rows, [&](int64_t row, int) { kRow.run(d, row); });
}

}  // namespace logitless::reference
