#pragma once
// Lists of candidates as the input of logitless_candidates_run, the header's formulas beside it, and the
// error that is allowed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <logitless/candidates.hpp>
#include <numeric>
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

struct CandidateCase {
  int64_t rows = 3, vocab = 50, hidden_size = 40;
  logitless_dtype hidden_dtype = LOGITLESS_F32, weight_dtype = LOGITLESS_F32, bias_dtype = LOGITLESS_F32;
  logitless_dtype compute_dtype = LOGITLESS_F32;
  logitless_dtype d_hidden_dtype = LOGITLESS_F32, d_weight_dtype = LOGITLESS_F32,
                  d_bias_dtype = LOGITLESS_F32;
  logitless_dtype id_dtype = LOGITLESS_I64;
  Values hidden, weight, bias, temperatures;  // as they are stored; bias and temperatures may be empty
  Values ids, offsets;                        // offsets may be empty
  Values grad;                                // [E]
  Values old_d_weight;                        // [V, D]: d_weight is added to it; empty: it is overwritten
  double scale = 1, softcap = 0, temperature = 1;
  int64_t ignore_id = -1;
  size_t max_workspace_bytes = 0;
  Layout hidden_layout, weight_layout, d_hidden_layout, d_weight_layout;
  bool wants_d_hidden = true, wants_d_weight = true;

  int64_t elements() const { return static_cast<int64_t>(ids.size()); }
  logitless_dtype stats_dtype() const {
    return hidden_dtype == LOGITLESS_F64 ? LOGITLESS_F64 : LOGITLESS_F32;
  }
  void set_dtypes(logitless_dtype dtype) {
    hidden_dtype = weight_dtype = bias_dtype = d_hidden_dtype = d_weight_dtype = d_bias_dtype = dtype;
  }
  // The row of each element.
  std::vector<int64_t> rows_of_elements() const {
    std::vector<int64_t> of(ids.size());
    for (int64_t e = 0; e < elements(); ++e) {
      int64_t row = 0;
      if (offsets.empty()) {
        row = e / (elements() / rows);
      } else {
        while (static_cast<double>(e) >= offsets[static_cast<size_t>(row) + 1]) ++row;
      }
      of[static_cast<size_t>(e)] = row;
    }
    return of;
  }
};

struct CandidateOutputs {
  Values logits, d_hidden, d_weight, d_bias, invalid;
};

// Names the first output with other bits; empty for none.
inline std::string difference(const CandidateOutputs& a, const CandidateOutputs& b) {
  if (!same_bits(a.logits, b.logits)) return "logits";
  if (!same_bits(a.d_hidden, b.d_hidden)) return "d_hidden";
  if (!same_bits(a.d_weight, b.d_weight)) return "d_weight";
  return same_bits(a.d_bias, b.d_bias) ? "" : "d_bias";
}

// Values of tensors for the lists that `c` has.
inline void fill_tensors(CandidateCase* c, uint64_t seed, bool has_bias = true) {
  Random random(seed);
  const double deviation = 1 / std::sqrt(std::sqrt(static_cast<double>(c->hidden_size)));
  c->hidden = normal_values(random, c->rows * c->hidden_size, deviation, c->hidden_dtype);
  c->weight = normal_values(random, c->vocab * c->hidden_size, deviation, c->weight_dtype);
  if (has_bias) c->bias = normal_values(random, c->vocab, 1, c->bias_dtype);
  c->grad = normal_values(random, c->elements(), 1, c->stats_dtype());
}

// A case without lists.
inline CandidateCase sized_case(int64_t rows, int64_t vocab, int64_t hidden_size, logitless_dtype dtype) {
  CandidateCase c;
  c.rows = rows;
  c.vocab = vocab;
  c.hidden_size = hidden_size;
  c.set_dtypes(dtype);
  return c;
}

// Lists of equal length of random ids, some of them several times.
inline CandidateCase even_lists(uint64_t seed, int64_t rows, int64_t per_row, int64_t vocab,
                                int64_t hidden_size, logitless_dtype dtype = LOGITLESS_F32) {
  Random random(seed);
  CandidateCase c = sized_case(rows, vocab, hidden_size, dtype);
  for (int64_t e = 0; e < rows * per_row; ++e) {
    c.ids.push_back(static_cast<double>(random.integer(0, vocab - 1)));
  }
  fill_tensors(&c, seed + 1);
  return c;
}

// Lists of any length, some of them empty.
inline CandidateCase uneven_lists(uint64_t seed, int64_t rows, int64_t most, int64_t vocab,
                                  int64_t hidden_size, logitless_dtype dtype = LOGITLESS_F32) {
  Random random(seed);
  CandidateCase c = sized_case(rows, vocab, hidden_size, dtype);
  c.offsets = {0};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = random.chance(0.3) ? 0 : random.integer(0, most);
    for (int64_t k = 0; k < count; ++k) {
      c.ids.push_back(static_cast<double>(random.chance(0.1) ? -1 : random.integer(0, vocab - 1)));
    }
    c.offsets.push_back(static_cast<double>(c.ids.size()));
  }
  fill_tensors(&c, seed + 1);
  return c;
}

// Runs both stages on an engine. Memory between and beside the elements must stay as it was.
class CandidateRun {
 public:
  explicit CandidateRun(const CandidateCase& c)
      : c_(c),
        hidden_(c.hidden_dtype, c.rows, c.hidden_size, c.hidden_layout),
        weight_(c.weight_dtype, c.vocab, c.hidden_size, c.weight_layout),
        bias_(c.bias_dtype, static_cast<int64_t>(c.bias.size()), 1),
        temperatures_(c.stats_dtype(), static_cast<int64_t>(c.temperatures.size()), 1),
        ids_(c.id_dtype, c.elements(), 1),
        offsets_(LOGITLESS_I64, static_cast<int64_t>(c.offsets.size()), 1),
        grad_(c.stats_dtype(), c.elements(), 1),
        logits_(c.stats_dtype(), c.elements(), 1),
        d_hidden_(c.d_hidden_dtype, c.rows, c.hidden_size, c.d_hidden_layout),
        d_weight_(c.d_weight_dtype, c.vocab, c.hidden_size, c.d_weight_layout),
        d_bias_(c.d_bias_dtype, static_cast<int64_t>(c.bias.size()), 1),
        invalid_(LOGITLESS_I64, 2, 1) {
    hidden_.fill(c.hidden);
    weight_.fill(c.weight);
    bias_.fill(c.bias);
    temperatures_.fill(c.temperatures);
    ids_.fill(c.ids);
    offsets_.fill(c.offsets);
    grad_.fill(c.grad);
    if (!c.old_d_weight.empty()) d_weight_.fill(c.old_d_weight);
  }

  CandidateOutputs on(const logitless::Context& context, bool is_device) {
    std::vector<Tensor*> all = {&hidden_, &weight_, &bias_,     &temperatures_, &ids_,    &offsets_,
                                &grad_,   &logits_, &d_hidden_, &d_weight_,     &d_bias_, &invalid_};
    const size_t bytes = workspace_bytes(context, is_device);
    const auto run = [&](auto place, std::span<std::byte> workspace, void* stream) {
      for (const auto stage : kStages) {
        logitless::run_candidates(context, arguments(stage, place, is_device), workspace, stream);
      }
    };
    if (is_device) {
      std::vector<GuardedMemory*> memory;
      for (Tensor* each : all) memory.push_back(each->memory());
      run_on_device(memory, bytes, [&](const OnDevice& device) {
        run([&](Tensor& t) { return device.of(t.data()); }, device.workspace, device.stream);
      });
    } else {
      GuardedMemory workspace(bytes);
      run(on_host_, {workspace.data(), bytes}, nullptr);
      EXPECT_EQ(workspace.violation(), "");
    }
    for (Tensor* each : all) EXPECT_EQ(each->violation(), "");
    CandidateOutputs out;
    out.logits = logits_.values();
    if (c_.wants_d_hidden) out.d_hidden = d_hidden_.values();
    if (c_.wants_d_weight) out.d_weight = d_weight_.values();
    out.d_bias = d_bias_.values();
    if (is_device) out.invalid = invalid_.values();
    return out;
  }

  CandidateOutputs on(const Engine& engine, int threads = 0) {
    return on(make_context(engine, threads), engine.is_device());
  }

  // Returns the bytes of workspace for either stage.
  size_t workspace_bytes(const logitless::Context& context, bool is_device) {
    size_t bytes = 0;
    for (const auto stage : kStages) {
      bytes = std::max(bytes, logitless::workspace_bytes(context, arguments(stage, on_host_, is_device)));
    }
    return bytes;
  }

 private:
  static constexpr logitless_candidates_stage kStages[] = {LOGITLESS_CANDIDATES_LOGITS,
                                                           LOGITLESS_CANDIDATES_GRADIENT};
  static constexpr auto on_host_ = [](Tensor& t) { return t.data(); };

  template <class Place>
  logitless::Candidates arguments(logitless_candidates_stage stage, Place place, bool is_device) {
    logitless::Candidates a;
    a.stage = stage;
    a.hidden_dtype = c_.hidden_dtype;
    a.weight_dtype = c_.weight_dtype;
    a.bias_dtype = c_.bias_dtype;
    a.id_dtype = c_.id_dtype;
    a.compute_dtype = c_.compute_dtype;
    a.rows = c_.rows;
    a.hidden_size = c_.hidden_size;
    a.vocab = c_.vocab;
    a.elements = c_.elements();
    a.scale = c_.scale;
    a.softcap = c_.softcap;
    a.temperature = c_.temperature;
    a.ignore_id = c_.ignore_id;
    a.max_workspace_bytes = c_.max_workspace_bytes;
    a.hidden = place(hidden_);
    a.hidden_stride = hidden_.stride();
    a.weight = place(weight_);
    a.weight_stride = weight_.stride();
    a.bias = place(bias_);
    a.row_temperature = place(temperatures_);
    a.ids = place(ids_);
    a.offsets = static_cast<const int64_t*>(place(offsets_));
    a.logits = place(logits_);
    if (is_device) a.invalid_ids = static_cast<int64_t*>(place(invalid_));
    if (stage == LOGITLESS_CANDIDATES_LOGITS) return a;
    a.grad = place(grad_);
    if (c_.wants_d_hidden) a.d_hidden = place(d_hidden_);
    a.d_hidden_stride = d_hidden_.stride();
    if (c_.wants_d_weight) a.d_weight = place(d_weight_);
    a.d_weight_stride = d_weight_.stride();
    a.d_bias = place(d_bias_);
    a.d_hidden_dtype = c_.d_hidden_dtype;
    a.d_weight_dtype = c_.d_weight_dtype;
    a.d_bias_dtype = c_.d_bias_dtype;
    a.accumulate_d_weight = c_.old_d_weight.empty() ? 0 : 1;
    return a;
  }

  const CandidateCase& c_;
  Tensor hidden_, weight_, bias_, temperatures_, ids_, offsets_, grad_, logits_, d_hidden_, d_weight_,
      d_bias_, invalid_;
};

// The header's formulas in T, one sum after the other. The truth is float64, or long double for float64
// logits. The naive computation is float32.
template <class T>
struct PlainCandidates {
  explicit PlainCandidates(const CandidateCase& c)
      : d_hidden(size(c.rows * c.hidden_size)),
        d_weight(size(c.vocab * c.hidden_size)),
        d_bias(size(c.bias.empty() ? 0 : c.vocab)) {
    if (!c.old_d_weight.empty()) d_weight.assign(c.old_d_weight.begin(), c.old_d_weight.end());
    const std::vector<int64_t> rows = c.rows_of_elements();
    std::vector<T> hidden_sums(d_hidden.size()), weight_sums(d_weight.size());
    const auto operand = [&](const Values& values, logitless_dtype dtype, int64_t row, int64_t d) {
      const double x = values[size(row * c.hidden_size + d)];
      return static_cast<T>(dtype == LOGITLESS_F32 ? rounded(x, c.compute_dtype) : x);
    };
    const auto scale = static_cast<T>(c.scale), cap = static_cast<T>(c.softcap);
    for (int64_t e = 0; e < c.elements(); ++e) {
      const int64_t row = rows[size(e)], id = static_cast<int64_t>(c.ids[size(e)]);
      if (id == c.ignore_id) {
        logits.push_back(-std::numeric_limits<T>::infinity());
        continue;
      }
      const auto t = static_cast<T>(c.temperatures.empty() ? c.temperature : c.temperatures[size(row)]);
      T z = 0;
      for (int64_t d = 0; d < c.hidden_size; ++d) {
        const T term = operand(c.hidden, c.hidden_dtype, row, d) * operand(c.weight, c.weight_dtype, id, d);
        z += term;
        largest_logit_term = std::max(largest_logit_term, std::fabs(scale * term / t));
      }
      z = scale * z + (c.bias.empty() ? T(0) : static_cast<T>(c.bias[size(id)]));
      largest_logit_term = std::max(largest_logit_term, std::fabs(z / t));
      const T bounded = cap == 0 ? T(0) : std::tanh(z / cap);
      logits.push_back((cap == 0 ? z : cap * bounded) / t);
      const T u = static_cast<T>(c.grad[size(e)]) * (1 - bounded * bounded) / t;
      if (u == 0) continue;
      for (int64_t d = 0; d < c.hidden_size; ++d) {
        const T to_hidden = scale * u * operand(c.weight, c.weight_dtype, id, d);
        const T to_weight = scale * u * operand(c.hidden, c.hidden_dtype, row, d);
        d_hidden[size(row * c.hidden_size + d)] += to_hidden;
        d_weight[size(id * c.hidden_size + d)] += to_weight;
        T& hidden_sum = hidden_sums[size(row * c.hidden_size + d)] += std::fabs(to_hidden);
        T& weight_sum = weight_sums[size(id * c.hidden_size + d)] += std::fabs(to_weight);
        largest_hidden_sum = std::max(largest_hidden_sum, hidden_sum);
        largest_weight_sum = std::max(largest_weight_sum, weight_sum);
        // The slope's own error is one of units of 1, whatever the slope is.
        const T whole = std::fabs(scale * static_cast<T>(c.grad[size(e)]) / t);
        largest_hidden_term =
            std::max(largest_hidden_term, whole * std::fabs(operand(c.weight, c.weight_dtype, id, d)));
        largest_weight_term =
            std::max({largest_weight_term, whole * std::fabs(operand(c.hidden, c.hidden_dtype, row, d)),
                      std::fabs(d_weight[size(id * c.hidden_size + d)])});
      }
      if (!d_bias.empty()) d_bias[size(id)] += u;
      largest_bias_term = std::max(largest_bias_term, std::fabs(static_cast<T>(c.grad[size(e)]) / t));
    }
  }

  std::vector<T> logits, d_hidden, d_weight, d_bias;
  T largest_hidden_sum = 0, largest_weight_sum = 0;  // of a result's terms' sizes
  T largest_logit_term = 0, largest_hidden_term = 0, largest_weight_term = 0, largest_bias_term = 0;

 private:
  static size_t size(int64_t n) { return static_cast<size_t>(n); }
};

// Expects every number within twice the largest error of the naive computation of the same precision, four
// roundings of the largest term, and one of the output. A gradient's term has the roundings of u.
// rounds_u: products round each u to the operands' format, and the gradient of hidden states twice.
template <class Truth, class Naive>
void expect_near(const CandidateCase& c, const CandidateOutputs& got, bool rounds_u) {
  const PlainCandidates<Truth> truth(c);
  const PlainCandidates<Naive> naive(c);
  const double unit = rounding_unit(c.stats_dtype());
  const double unit_of_u = rounds_u ? rounding_unit(c.weight_dtype) : 0;
  const auto check = [&](const char* name, const Values& values, const std::vector<Truth>& exact,
                         const std::vector<Naive>& fair, Truth term, logitless_dtype dtype, Truth sum = 0) {
    ASSERT_EQ(values.size(), exact.size()) << name;
    Truth error = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      if (std::isfinite(exact[i])) error = std::max(error, std::fabs(static_cast<Truth>(fair[i]) - exact[i]));
    }
    const auto bound = static_cast<double>(2 * error + 4 * static_cast<Truth>(unit) * term +
                                           static_cast<Truth>(unit_of_u) * sum);
    for (size_t i = 0; i < exact.size(); ++i) {
      ASSERT_TRUE(is_close(values[i], static_cast<double>(exact[i]), bound, dtype))
          << name << '[' << i << "]: got " << values[i] << ", expected " << static_cast<double>(exact[i])
          << " +- " << bound;
    }
  };
  check("logits", got.logits, truth.logits, naive.logits, truth.largest_logit_term, c.stats_dtype());
  if (c.wants_d_hidden) {
    check("d_hidden", got.d_hidden, truth.d_hidden, naive.d_hidden, truth.largest_hidden_term,
          c.d_hidden_dtype, truth.largest_hidden_sum);
  }
  if (c.wants_d_weight) {
    check("d_weight", got.d_weight, truth.d_weight, naive.d_weight, truth.largest_weight_term,
          c.d_weight_dtype, truth.largest_weight_sum);
  }
  check("d_bias", got.d_bias, truth.d_bias, naive.d_bias, truth.largest_bias_term, c.d_bias_dtype);
}

inline void expect_near_truth(const CandidateCase& c, const CandidateOutputs& got, bool rounds_u = false) {
  c.stats_dtype() == LOGITLESS_F64 ? expect_near<long double, double>(c, got, rounds_u)
                                   : expect_near<double, float>(c, got, rounds_u);
}

}  // namespace logitless_test
