#pragma once
#include <cstdint>
#include <logitless/logitless.hpp>
#include <string>
#include <vector>

namespace logitless::cli {

// One problem of the grid.
struct CheckCase {
  std::string options;  // name of the set of options
  int64_t tokens = 0;
  int64_t vocab = 0;
  int64_t dim = 0;
  logitless_dtype hidden_dtype = LOGITLESS_F32;
  logitless_dtype classifier_dtype = LOGITLESS_F32;
  double logit_std = 2;  // of the logits before the options
  double scale = 1;
  double softcap = 0;
  double temperature = 1;
  double label_smoothing = 0;
  double z_loss = 0;
  double num_items = 0;
  bool sum = false;
  bool bias = false;
  bool class_weight = false;
  bool token_weight = false;
  bool token_temperature = false;
  bool ignored_rows = false;
  int64_t shift = 0;
  int64_t sequence_length = 0;
  bool grad_hidden = true;
  bool grad_classifier = true;

  std::string name() const;  // "64x1000x64 bf16 softcap"
};

// Shapes of every kind of remainder x dtypes x options; `full` adds larger shapes.
std::vector<CheckCase> check_grid(bool full);

// Operands of a case as float64 numbers that its dtypes hold exactly.
struct CheckData {
  std::vector<double> hidden;        // [N, D]
  std::vector<double> classifier;    // [V, D]
  std::vector<double> bias;          // [V] or empty, in the classifier's dtype
  std::vector<double> class_weight;  // [V] or empty, float32
  std::vector<double> token_weight;  // [N] or empty, float32
  std::vector<double> temperature;   // [N] or empty, float32
  std::vector<int64_t> targets;      // [N]
};
CheckData make_data(const CheckCase& c);

// What the logits of a row are divided by.
inline double temperature_of(const CheckCase& c, const CheckData& data, int64_t row) {
  return data.temperature.empty() ? c.temperature : data.temperature[static_cast<size_t>(row)];
}

inline constexpr int64_t kCheckIgnoreIndex = -100;

// The target of a row after the shift, or kCheckIgnoreIndex.
int64_t shifted_target(const CheckCase& c, const CheckData& data, int64_t row);
// What the sum of the rows' losses is divided by, a sum of T: float or double; 0 when no row counts.
template <class T>
T loss_divisor(const CheckCase& c, const CheckData& data);

// dz_ij = p_ij a_i - c_ij - g_i [j = y_i], and a float32 computation rounds each of the three before they
// cancel. Here the sum of their magnitudes goes through the gradients' products in the place of dz_ij;
// elements add up in squares, as independent roundings do. Times a rounding unit: the 2-norm of what those
// roundings do.
struct GradientTerms {
  double d_hidden = 0, d_classifier = 0, d_bias = 0;
};

// What a computation of a case gives, as float64 numbers. Rows that are ignored hold 0.
struct CheckOutputs {
  double loss = 0;
  std::vector<double> row_loss;      // [N], before the reduction
  std::vector<double> nll;           // [N]
  std::vector<double> lse;           // [N]
  std::vector<double> entropy;       // [N]
  std::vector<int64_t> argmax;       // [N]
  std::vector<double> d_hidden;      // [N, D] or empty
  std::vector<double> d_classifier;  // [V, D] or empty
  std::vector<double> d_bias;        // [V] or empty
  GradientTerms terms;               // only of the naive computation
};

// A number as it is after storing it in the dtype.
double rounded(double value, logitless_dtype dtype);

}  // namespace logitless::cli
