#pragma once
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/problem.h"

namespace logitless {

// Turns dot products into logits: z = t(scale * dot + bias) / T.
template <class T>
struct LogitTransform {
  T scale = 1;
  T softcap = 0;                           // 0: none
  const T* bias = nullptr;                 // [columns], null: none
  const T* inverse_temperature = nullptr;  // [rows] 1 / T, null: ones

  // Returns the transform of the rows and columns from these on.
  LogitTransform from(int64_t row, int64_t column) const {
    LogitTransform rest = *this;
    if (bias != nullptr) rest.bias += column;
    if (inverse_temperature != nullptr) rest.inverse_temperature += row;
    return rest;
  }

  LOGITLESS_HD T bias_of(int64_t column) const { return bias != nullptr ? bias[column] : T(0); }
  LOGITLESS_HD T inverse_temperature_of(int64_t row) const {
    return inverse_temperature != nullptr ? inverse_temperature[row] : T(1);
  }

  // The definition, for scalar code. of_column: bias_of(); of_row: inverse_temperature_of().
  LOGITLESS_HD T logit(T dot, T of_column, T of_row) const {
    T z = scale * dot + of_column;
    if (softcap != 0) z = softcap * std::tanh(z / softcap);
    return z * of_row;
  }
  // Returns t'(z) of such a logit. It uses a division, so that it is 0 where z has reached the softcap.
  template <class Z>
  LOGITLESS_HD Z slope(Z z, T of_row) const {
    if (softcap == 0) return 1;
    const T cap = softcap * of_row;
    const Z ratio = z / cap;
    return 1 - ratio * ratio;
  }
};

// Numbers of logits, with the temperature of all rows divided out of them.
struct LogitFactors {
  double scale = 1;
  double softcap = 0;  // 0: none
  double bias_scale = 1;

  LOGITLESS_HD bool is_linear() const { return softcap == 0; }
  template <class T>
  LOGITLESS_HD T logit(T dot, T bias, T of_row) const {
    return transform<T>().logit(dot, static_cast<T>(bias_scale) * bias, of_row);
  }
  // Returns the gradient before the scale, from that of the logit z.
  template <class T>
  LOGITLESS_HD T gradient(T grad, T z, T of_row) const {
    return grad * of_row * static_cast<T>(bias_scale) * transform<T>().slope(z, of_row);
  }

 private:
  template <class T>
  LOGITLESS_HD LogitTransform<T> transform() const {
    return {static_cast<T>(scale), static_cast<T>(softcap)};
  }
};

// Whether logits are dot products times a number, plus a bias.
inline bool is_linear(const Problem& problem) {
  return problem.softcap == 0;
}

// bias: already multiplied by bias_scale. bias and inverse_temperature are not used if the problem has none.
template <class T>
LogitTransform<T> logit_transform(const Problem& problem, const T* bias = nullptr,
                                  const T* inverse_temperature = nullptr) {
  return {static_cast<T>(problem.scale), static_cast<T>(problem.softcap), problem.has.bias ? bias : nullptr,
          problem.has.temperature ? inverse_temperature : nullptr};
}

}  // namespace logitless
