#pragma once

#include <vector>

#include "plot/chart.h"

namespace logitless::plot {

// Maps values of an axis to pixels, and says where its ticks are.
class Scale {
 public:
  // Fits the axis to values in [low, high], widened to round ticks; `from` and `to` are the pixels of its
  // ends.
  Scale(const Axis& axis, double low, double high, double from, double to);

  bool shows(double value) const;
  double pixel(double value) const;
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  void fit_linear(const Axis& axis, double low, double high);
  void fit_log(const Axis& axis, double low, double high);

  bool log_;
  double min_ = 0.0;
  double max_ = 1.0;
  double from_;
  double to_;
  std::vector<double> ticks_;
};

}  // namespace logitless::plot
