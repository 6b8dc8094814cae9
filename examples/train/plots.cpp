#include <cmath>

#include "io/atomic_file.h"
#include "plot/chart.h"
#include "support/format.h"
#include "train/report.h"

namespace logitless::train {
namespace {

std::string about(const Results& results) {
  return results.text.source + "; vocabulary " + cli::format_count(results.text.vocabulary) + ", " +
         cli::format_count(results.tokens_per_step) + " tokens a step";
}

std::vector<double> steps(size_t count) {
  std::vector<double> x;
  for (size_t k = 0; k < count; ++k) x.push_back(static_cast<double>(k + 1));
  return x;
}

std::string loss_chart(const Results& results) {
  plot::LineChart chart;
  chart.title = "Training with the fused head";
  chart.subtitle = about(results);
  chart.x.label = "training step";
  chart.x.whole = true;
  chart.x.max = static_cast<double>(results.fused.loss.size());
  chart.y.label = "loss (nats per token)";
  plot::Series fused{"training, fused head", steps(results.fused.loss.size()), results.fused.loss};
  fused.width = 1.6;
  fused.color = 0;
  plot::Series validation{"validation", {}, results.fused.validation_loss, plot::Stroke::kSolidWithPoints};
  for (const int64_t step : results.fused.validation_step) validation.x.push_back(static_cast<double>(step));
  validation.color = 1;
  chart.series = {fused, validation};
  if (results.materialized) {
    const std::vector<double>& loss = results.materialized->loss;
    plot::Series other{"training, materialized head", steps(loss.size()), loss, plot::Stroke::kPoints};
    other.color = 2;
    chart.series.push_back(other);
  }
  return to_svg(chart);
}

std::string memory_chart(const Results& results) {
  plot::BarChart chart;
  chart.title = "Memory of a training step";
  chart.subtitle = about(results);
  chart.y.label = "memory";
  chart.y.unit = plot::Unit::kBytes;
  chart.categories = {"head: workspace", "head: with gradients", results.device.peak_name};
  const auto bars = [&](const std::string& label, const HeadRun& run) {
    const auto peak = static_cast<double>(run.peak_bytes);
    chart.series.push_back({label,
                            {static_cast<double>(run.workspace_bytes), static_cast<double>(run.head_bytes()),
                             results.peaks_are_separate ? peak : NAN}});
  };
  if (results.materialized) bars("materialized head", *results.materialized);
  bars("fused head", results.fused);
  return to_svg(chart);
}

std::string agreement_chart(const Results& results) {
  const Agreement& agreement = *results.agreement;
  plot::LineChart chart;
  chart.title = "Difference of the two heads' training losses";
  chart.subtitle = "same start and data; the tolerance follows from fp32 rounding";
  chart.x.label = "training step";
  chart.x.whole = true;
  chart.y.label = "|fused - materialized| (nats)";
  chart.y.log = true;
  plot::Series tolerance{"tolerance", steps(agreement.tolerance.size()), agreement.tolerance,
                         plot::Stroke::kDashed};
  tolerance.color = 1;
  plot::Series difference{"difference (equal losses are not drawn)", steps(agreement.difference.size()),
                          agreement.difference, plot::Stroke::kSolidWithPoints};
  difference.color = 0;
  chart.series = {difference, tolerance};
  return to_svg(chart);
}

}  // namespace

std::vector<std::filesystem::path> write_plots(const Results& results, const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  const auto write = [&](const char* name, const std::string& svg) {
    paths.push_back(folder / name);
    cli::write_text_file(paths.back().string(), svg);
  };
  write("loss.svg", loss_chart(results));
  write("memory.svg", memory_chart(results));
  if (results.agreement) write("agreement.svg", agreement_chart(results));
  return paths;
}

}  // namespace logitless::train
