#pragma once
// Rows of two heads as the input of logitless_divergence_run, the header's formulas beside it, and the error
// that is allowed.
#include <gtest/gtest.h>
#include <logitless/divergence.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "compare.h"
#include "device_memory.h"
#include "engine.h"
#include "formats.h"
#include "random.h"
#include "solve.h"

namespace logitless_test {

using Values = std::vector<double>;

struct Head {
  Values products, bias;  // [rows, columns]; [columns] or nothing; as they are stored
  double scale = 1, softcap = 0;
};

struct TwoHeads {
  int64_t rows = 3, columns = 100;
  double beta = 0.5, temperature = 1;
  Head student, teacher;
  Values grad;  // [rows]
  logitless_dtype dtype = LOGITLESS_F32, gradient_dtype = LOGITLESS_F32;
  Layout student_layout, teacher_layout, gradient_layout;
  bool in_place = false;
  int64_t window = 0;  // columns whose gradients are made at once; 0: all
  std::vector<logitless_divergence_stage> stages = {LOGITLESS_DIVERGENCE_VALUES,
                                                    LOGITLESS_DIVERGENCE_GRADIENT};
  Values student_lse, teacher_lse;  // [rows] or nothing; for stages that read them and do not follow SUMS

  double product(const Head& head, int64_t i, int64_t j) const {
    return head.products[static_cast<size_t>(i * columns + j)];
  }
};

struct RowOutputs {
  Values student_lse, teacher_lse, student_kl, divergence, entropy, gradient;
};

// The numbers of rows in the order of the outputs, and last the gradient.
struct OutputNumber {
  const char* name;
  Values RowOutputs::*values;
};
inline constexpr OutputNumber kOutputs[] = {
    {"student_lse", &RowOutputs::student_lse}, {"teacher_lse", &RowOutputs::teacher_lse},
    {"student_kl", &RowOutputs::student_kl},   {"divergence", &RowOutputs::divergence},
    {"entropy", &RowOutputs::entropy},         {"gradient", &RowOutputs::gradient}};
constexpr size_t kRowNumbers = std::size(kOutputs) - 1;

// Names the first output with other bits; empty for none.
inline std::string difference(const RowOutputs& a, const RowOutputs& b) {
  for (const OutputNumber& each : kOutputs) {
    if (!same_bits(a.*each.values, b.*each.values)) return each.name;
  }
  return "";
}

// Normal products of a spread, and upstream gradients. The teacher has other products than the student.
inline TwoHeads random_heads(uint64_t seed, int64_t rows, int64_t columns, double spread = 2) {
  Random random(seed);
  TwoHeads p;
  p.rows = rows;
  p.columns = columns;
  for (Head* head : {&p.student, &p.teacher}) {
    head->products = normal_values(random, rows * columns, spread, LOGITLESS_F32);
  }
  p.grad = normal_values(random, rows, 1, LOGITLESS_F32);
  return p;
}

inline Values random_bias(uint64_t seed, int64_t columns) {
  Random random(seed);
  return normal_values(random, columns, 1, LOGITLESS_F32);
}

// Runs both stages on an engine. Memory between and beside the elements must stay as it was.
class RowsRun {
 public:
  explicit RowsRun(const TwoHeads& p)
      : p_(p),
        student_(p.dtype, p.rows, p.columns, p.student_layout),
        teacher_(p.dtype, p.rows, p.columns, p.teacher_layout),
        student_bias_(p.dtype, static_cast<int64_t>(p.student.bias.size()), 1),
        teacher_bias_(p.dtype, static_cast<int64_t>(p.teacher.bias.size()), 1),
        grad_(p.dtype, p.rows, 1),
        gradient_(p.gradient_dtype, p.rows, p.columns, p.gradient_layout) {
    student_.fill(p.student.products);
    teacher_.fill(p.teacher.products);
    student_bias_.fill(p.student.bias);
    teacher_bias_.fill(p.teacher.bias);
    grad_.fill(p.grad);
    for (size_t i = 0; i < kRowNumbers; ++i) numbers_.emplace_back(p.dtype, p.rows, 1);
    if (!p.student_lse.empty()) numbers_[0].fill(p.student_lse);
    if (!p.teacher_lse.empty()) numbers_[1].fill(p.teacher_lse);
  }

  RowOutputs on(const Engine& engine) {
    const logitless::Context context = make_context(engine);
    std::vector<Tensor*> all = {&student_, &teacher_, &student_bias_, &teacher_bias_, &grad_, &gradient_};
    for (Tensor& each : numbers_) all.push_back(&each);
    if (engine.is_device()) {
      std::vector<GuardedMemory*> memory;
      for (Tensor* each : all) memory.push_back(each->memory());
      run_on_device(memory, 0, [&](const OnDevice& device) {
        run(
            context, [&](Tensor& t) { return static_cast<std::byte*>(device.of(t.data())); }, device.stream);
      });
    } else {
      run(
          context, [](Tensor& t) { return static_cast<std::byte*>(t.data()); }, nullptr);
    }
    for (Tensor* each : all) EXPECT_EQ(each->violation(), "");
    RowOutputs outputs;
    for (size_t i = 0; i < numbers_.size(); ++i) outputs.*kOutputs[i].values = numbers_[i].values();
    outputs.gradient = (p_.in_place ? student_ : gradient_).values();
    return outputs;
  }

 private:
  template <class Place>
  void run(const logitless::Context& context, Place place, void* stream) {
    logitless_divergence d;
    logitless_divergence_init(&d);
    d.dtype = p_.dtype;
    d.gradient_dtype = p_.in_place ? p_.dtype : p_.gradient_dtype;
    d.rows = p_.rows;
    d.beta = p_.beta;
    d.temperature = p_.temperature;
    d.student_scale = p_.student.scale;
    d.student_softcap = p_.student.softcap;
    d.teacher_scale = p_.teacher.scale;
    d.teacher_softcap = p_.teacher.softcap;
    d.student_stride = student_.stride();
    d.teacher_stride = teacher_.stride();
    d.student_lse = place(numbers_[0]);
    d.teacher_lse = place(numbers_[1]);
    d.student_kl = place(numbers_[2]);
    d.divergence = place(numbers_[3]);
    d.entropy = place(numbers_[4]);
    d.grad = place(grad_);
    Tensor& out = p_.in_place ? student_ : gradient_;
    d.d_logits_stride = out.stride();
    const auto stage = [&](logitless_divergence_stage which, int64_t first, int64_t count) {
      const auto skip = static_cast<size_t>(first);
      d.stage = which;
      d.columns = count;
      d.student = place(student_) + skip * size_of(p_.dtype);
      d.teacher = place(teacher_) + skip * size_of(p_.dtype);
      if (!p_.student.bias.empty()) d.student_bias = place(student_bias_) + skip * size_of(p_.dtype);
      if (!p_.teacher.bias.empty()) d.teacher_bias = place(teacher_bias_) + skip * size_of(p_.dtype);
      d.d_logits = place(out) + skip * size_of(out.dtype());
      logitless::check(logitless_divergence_run(context.handle(), &d, stream));
    };
    for (const logitless_divergence_stage which : p_.stages) {
      const bool in_windows = which == LOGITLESS_DIVERGENCE_GRADIENT && p_.window != 0;
      const int64_t window = in_windows ? p_.window : std::max<int64_t>(p_.columns, 1);
      int64_t first = 0;
      do {
        stage(which, first, std::min(window, p_.columns - first));
        first += window;
      } while (first < p_.columns);
    }
  }

  const TwoHeads& p_;
  Tensor student_, teacher_, student_bias_, teacher_bias_, grad_, gradient_;
  std::deque<Tensor> numbers_;
};

// Columns [first, first + count) of both heads.
inline TwoHeads part_of(const TwoHeads& p, int64_t first, int64_t count) {
  const auto cut = [&](const Values& values, int64_t rows) {
    Values part;
    for (int64_t i = 0; i < rows && !values.empty(); ++i) {
      const auto from = values.begin() + i * p.columns + first;
      part.insert(part.end(), from, from + count);
    }
    return part;
  };
  TwoHeads part = p;
  part.columns = count;
  for (Head* head : {&part.student, &part.teacher}) {
    head->products = cut(head->products, p.rows);
    head->bias = cut(head->bias, 1);
  }
  return part;
}

// Values of all columns from those of parts, merged by the header's formulas. sizes: columns of the parts.
template <class Run>
RowOutputs values_from_parts(const TwoHeads& p, const std::vector<int64_t>& sizes, Run run) {
  std::vector<TwoHeads> parts;
  for (int64_t first = 0; const int64_t size : sizes) {
    parts.push_back(part_of(p, first, size));
    parts.back().stages = {LOGITLESS_DIVERGENCE_SUMS};
    first += size;
  }
  std::vector<RowOutputs> sums;
  for (const TwoHeads& part : parts) sums.push_back(run(part));
  const auto rows = static_cast<size_t>(p.rows);
  const auto lse_of = [&](Values RowOutputs::*lse, size_t i) {
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (const RowOutputs& each : sums) max = std::max(max, (each.*lse)[i]);
    for (const RowOutputs& each : sums) sum += std::exp((each.*lse)[i] - max);
    return rounded(max + std::log(sum), p.dtype);
  };
  RowOutputs all;
  all.student_kl = all.divergence = all.entropy = Values(rows, 0);
  for (size_t i = 0; i < rows; ++i) {
    all.student_lse.push_back(lse_of(&RowOutputs::student_lse, i));
    all.teacher_lse.push_back(lse_of(&RowOutputs::teacher_lse, i));
    for (const RowOutputs& each : sums) {
      const double share = std::exp(each.student_lse[i] - all.student_lse[i]);
      if (share > 0) all.entropy[i] += share * (each.entropy[i] + all.student_lse[i] - each.student_lse[i]);
    }
  }
  for (TwoHeads& part : parts) {
    part.stages = {LOGITLESS_DIVERGENCE_TERMS};
    part.student_lse = all.student_lse;
    part.teacher_lse = all.teacher_lse;
    const RowOutputs terms = run(part);
    for (size_t i = 0; i < rows; ++i) {
      all.student_kl[i] += terms.student_kl[i];
      all.divergence[i] += terms.divergence[i];
    }
  }
  return all;
}

// A row by the header's formulas, in T. The truth is float64, or long double for float64 logits. The naive
// computation is float32.
template <class T>
class PlainRow {
 public:
  PlainRow(const TwoHeads& p, int64_t row) : beta(static_cast<T>(p.beta)) {
    lse_p = log_probs(p, p.student, row, &log_p);
    lse_q = log_probs(p, p.teacher, row, &log_q);
    const T none = -std::numeric_limits<T>::infinity();
    T of_p = 0, of_q = 0;
    for (size_t j = 0; j < log_p.size(); ++j) {
      const T a = log_p[j], b = log_q[j], high = std::max(a, b);
      T mixed = p.beta == 0 ? a : p.beta == 1 ? b : high;
      if (p.beta > 0 && p.beta < 1 && high > none) {
        mixed += std::log((1 - beta) * std::exp(a - high) + beta * std::exp(b - high));
      }
      ratio_p.push_back(a == mixed ? 0 : a - mixed);
      ratio_q.push_back(b == mixed ? 0 : b - mixed);
      of_p += times_log(std::exp(a), ratio_p[j]);
      of_q += times_log(std::exp(b), ratio_q[j]);
      entropy -= times_log(std::exp(a), a);
    }
    student_kl = of_p;
    divergence = p.beta == 0 ? of_q : p.beta == 1 ? of_p : beta * of_q + (1 - beta) * of_p;
    const T grad = static_cast<T>(p.grad[static_cast<size_t>(row)]);
    for (size_t j = 0; j < log_p.size(); ++j) {
      const T pj = std::exp(log_p[j]), part = p.beta == 1 ? T(1) : 1 - beta;
      const T slope = p.beta == 0 ? pj - std::exp(log_q[j]) : times_log(pj, part * (ratio_p[j] - student_kl));
      gradient.push_back(grad == 0 ? 0 : grad * slope * slopes_[j] / static_cast<T>(p.temperature));
    }
  }

  T beta, lse_p = 0, lse_q = 0, student_kl = 0, divergence = 0, entropy = 0;
  T size = 0;  // the largest finite logit's size before softcaps
  std::vector<T> log_p, log_q, ratio_p, ratio_q, gradient;

 private:
  static T times_log(T x, T log_y) { return x == 0 ? T(0) : x * log_y; }

  T log_probs(const TwoHeads& p, const Head& head, int64_t row, std::vector<T>* out) {
    const auto cap = static_cast<T>(head.softcap), temperature = static_cast<T>(p.temperature);
    T max = -std::numeric_limits<T>::infinity(), sum = 0;
    slopes_.resize(static_cast<size_t>(p.columns), 1);
    for (int64_t j = 0; j < p.columns; ++j) {
      T z = static_cast<T>(head.scale) * static_cast<T>(p.product(head, row, j));
      if (!head.bias.empty()) z += static_cast<T>(head.bias[static_cast<size_t>(j)]);
      if (std::isfinite(z)) size = std::max(size, std::fabs(z) / temperature);
      const T bounded = cap == 0 ? T(0) : std::tanh(z / cap);
      if (&head == &p.student) slopes_[static_cast<size_t>(j)] = 1 - bounded * bounded;
      out->push_back((cap == 0 ? z : cap * bounded) / temperature);
      max = std::max(max, out->back());
    }
    for (const T z : *out) sum += std::exp(z - max);
    const T lse = max + std::log(sum);
    for (T& z : *out) z -= lse;
    return lse;
  }

  std::vector<T> slopes_;  // slopes of the student's softcap
};

// Expects every number within twice the error of the naive computation in float32, of its row, and the
// rounding of logits.
// A logit of size Z is off by eps Z, and so is lse, which all columns share. So a probability has that
// relative error, and the log of a ratio twice that absolute error.
template <class Truth>
void expect_near(const TwoHeads& p, const RowOutputs& got) {
  const double eps = p.dtype == LOGITLESS_F64 ? 0x1p-52 : 0x1p-23;
  const auto distance = [](double a, double b) { return std::isfinite(a - b) ? std::fabs(a - b) : 0; };
  for (int64_t i = 0; i < p.rows; ++i) {
    const auto row = static_cast<size_t>(i);
    const PlainRow<Truth> truth(p, i);
    const PlainRow<float> naive_row(p, i);
    const auto fair = [&](double naive, double exact) {
      return p.dtype == LOGITLESS_F64 ? 0 : 2 * distance(naive, exact);
    };
    const double unit = eps * (4 + truth.size);
    double value = 0, largest_ratio = 0, naive_gradient = 0;
    for (size_t j = 0; j < truth.log_p.size(); ++j) {
      const double ratios = distance(truth.ratio_p[j], 0) + distance(truth.ratio_q[j], 0);
      value += unit * (std::exp(truth.log_p[j]) + std::exp(truth.log_q[j])) * (8 + 2 * ratios);
      largest_ratio = std::max(largest_ratio, distance(truth.ratio_p[j], 0));
      naive_gradient = std::max(naive_gradient, fair(naive_row.gradient[j], truth.gradient[j]));
    }
    const auto expect = [&](const char* name, const Values& all, double exact, double naive, double bound) {
      EXPECT_TRUE(is_close(all[row], exact, bound + fair(naive, exact), p.dtype))
          << name << " of row " << i << ": got " << all[row] << ", expected " << exact << " +- " << bound;
    };
    expect("student_lse", got.student_lse, truth.lse_p, naive_row.lse_p, unit);
    expect("teacher_lse", got.teacher_lse, truth.lse_q, naive_row.lse_q, unit);
    expect("student_kl", got.student_kl, truth.student_kl, naive_row.student_kl, value);
    expect("divergence", got.divergence, truth.divergence, naive_row.divergence, value);
    expect("entropy", got.entropy, truth.entropy, naive_row.entropy, unit * (1 + truth.size));
    if (got.gradient.empty()) continue;
    for (size_t j = 0; j < truth.gradient.size(); ++j) {
      const double pj = std::exp(truth.log_p[j]), qj = std::exp(truth.log_q[j]);
      const double parts = 2 * (pj + qj) + pj * (8 + 2 * distance(truth.ratio_p[j], 0) + 2 * largest_ratio);
      const double bound = std::fabs(p.grad[row]) / p.temperature * unit * parts;
      const double element = got.gradient[row * truth.gradient.size() + j];
      ASSERT_TRUE(is_close(element, truth.gradient[j], bound + naive_gradient,
                           p.in_place ? p.dtype : p.gradient_dtype))
          << "gradient of row " << i << ", column " << j << ": got " << element << ", expected "
          << truth.gradient[j] << " +- " << bound;
    }
  }
}

inline void expect_near_truth(const TwoHeads& p, const RowOutputs& got) {
  p.dtype == LOGITLESS_F64 ? expect_near<long double>(p, got) : expect_near<double>(p, got);
}

}  // namespace logitless_test
