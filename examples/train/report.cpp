#include "train/report.h"

#include <cstdio>

#include "support/format.h"

namespace logitless::train {
namespace {

using nlohmann::ordered_json;

std::string scientific(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1e", value);
  return text;
}

std::string bytes(int64_t value) {
  return cli::format_bytes(static_cast<double>(value));
}

double tokens_per_second(const Results& results, const HeadRun& run) {
  const double seconds = median_step_seconds(run.seconds);
  return seconds > 0 ? static_cast<double>(results.tokens_per_step) / seconds : 0.0;
}

ordered_json run_json(const Results& results, const HeadRun& run) {
  ordered_json json = {{"head", run.name},
                       {"description", run.description},
                       {"steps", run.loss.size()},
                       {"workspace_bytes", run.workspace_bytes},
                       {"gradient_bytes", run.gradient_bytes},
                       {"head_bytes", run.head_bytes()},
                       {"peak_bytes", run.peak_bytes},
                       {"tokens_per_second", tokens_per_second(results, run)},
                       {"step_seconds_median", median_step_seconds(run.seconds)},
                       {"head_seconds_median", median_step_seconds(run.head_seconds)},
                       {"loss", run.loss},
                       {"step_seconds", run.seconds}};
  if (!run.validation_loss.empty()) {
    json["validation_step"] = run.validation_step;
    json["validation_loss"] = run.validation_loss;
  }
  return json;
}

std::string agreement_text(const Agreement& agreement) {
  std::string text = "\nBoth heads, " + std::to_string(agreement.difference.size()) +
                     " steps from the same start on the same data: ";
  text += agreement.holds() ? "the losses agree.\n" : "THE LOSSES DO NOT AGREE.\n";
  text += "  largest difference of the losses  " + scientific(agreement.largest_difference()) +
          "   (tolerance " + scientific(agreement.tolerance.empty() ? 0.0 : agreement.tolerance.back()) +
          " at the last step)\n";
  text += "  first step's d_hidden             " + scientific(agreement.d_hidden_difference) +
          "   (tolerance " + scientific(agreement.gradient_tolerance) + ", relative)\n";
  text += "  first step's d_classifier         " + scientific(agreement.d_classifier_difference) +
          "   (tolerance " + scientific(agreement.gradient_tolerance) + ", relative)\n";
  return text;
}

}  // namespace

std::string summary(const Results& results) {
  std::vector<HeadRun> runs;
  if (results.materialized) runs.push_back(*results.materialized);
  runs.push_back(results.fused);
  std::vector<std::string> header = {""};
  for (const HeadRun& run : runs) header.push_back(run.name);
  cli::Table table(header);
  const auto add = [&](const std::string& label, auto&& value) {
    std::vector<std::string> row = {label};
    for (const HeadRun& run : runs) row.push_back(value(run));
    table.add(row);
  };
  add("steps", [](const HeadRun& r) { return std::to_string(r.loss.size()); });
  if (results.agreement) {
    const size_t last = results.agreement->difference.size();
    add("loss at step " + std::to_string(last),
        [&](const HeadRun& r) { return last > 0 ? cli::format_fixed(r.loss[last - 1], 6) : "-"; });
  }
  add("tokens a second", [&](const HeadRun& r) {
    return cli::format_count(static_cast<int64_t>(tokens_per_second(results, r)));
  });
  add("head, seconds a step",
      [](const HeadRun& r) { return cli::format_fixed(median_step_seconds(r.head_seconds), 3); });
  add("head: workspace", [](const HeadRun& r) { return bytes(r.workspace_bytes); });
  add("head: gradients", [](const HeadRun& r) { return bytes(r.gradient_bytes); });
  add("head: together", [](const HeadRun& r) { return bytes(r.head_bytes()); });
  add(results.device.peak_name + (results.peaks_are_separate ? "" : " so far"),
      [](const HeadRun& r) { return bytes(r.peak_bytes); });

  std::string text = "\n";
  text += table.text();
  text += "\nThe fused head: " + results.fused.description + ".\n";
  if (results.agreement) text += agreement_text(*results.agreement);
  text += '\n';
  text += std::to_string(results.fused.loss.size()) + " steps, " +
          cli::format_count(static_cast<int64_t>(results.fused.loss.size()) * results.tokens_per_step) +
          " tokens in " + cli::format_fixed(results.training_seconds, 0) + " s: validation loss " +
          cli::format_fixed(results.fused.validation_loss.front(), 4) + " -> " +
          cli::format_fixed(results.fused.validation_loss.back(), 4) +
          (results.stop_signal != 0 ? " (interrupted)" : "") + "\n";
  return text;
}

ordered_json to_json(const Results& results, const Settings& settings) {
  const TrainerConfig& trainer = settings.trainer;
  ordered_json json;
  json["device"] = results.device.name;
  json["text"] = {{"source", results.text.source},
                  {"files", results.text.files},
                  {"bytes", results.text.bytes},
                  {"validation_bytes", results.text.validation_bytes},
                  {"train_tokens", results.text.train_tokens},
                  {"validation_tokens", results.text.validation_tokens},
                  {"vocabulary", results.text.vocabulary},
                  {"seconds", results.text.seconds}};
  json["model"] = {{"parameters", results.parameters},
                   {"dim", trainer.model.dim},
                   {"inner", trainer.model.inner},
                   {"layers", trainer.model.layers},
                   {"gemm", results.device.matrix_library}};
  json["training"] = {{"batch", trainer.batch.batch},
                      {"sequence_length", trainer.batch.length},
                      {"tokens_per_step", results.tokens_per_step},
                      {"learning_rate", settings.schedule.peak},
                      {"warmup_steps", settings.schedule.warmup},
                      {"weight_decay", trainer.optimizer.weight_decay},
                      {"seed", trainer.seed},
                      {"planned_steps", results.planned_steps},
                      {"seconds", results.training_seconds},
                      {"interrupted", results.stop_signal != 0},
                      {"max_workspace_bytes", settings.max_workspace_bytes}};
  if (results.materialized) json["materialized"] = run_json(results, *results.materialized);
  json["fused"] = run_json(results, results.fused);
  if (results.agreement) {
    const Agreement& agreement = *results.agreement;
    json["agreement"] = {{"holds", agreement.holds()},
                         {"largest_loss_difference", agreement.largest_difference()},
                         {"loss_difference", agreement.difference},
                         {"loss_tolerance", agreement.tolerance},
                         {"d_hidden_difference", agreement.d_hidden_difference},
                         {"d_classifier_difference", agreement.d_classifier_difference},
                         {"gradient_tolerance", agreement.gradient_tolerance}};
  }
  json["peak_bytes_are_of"] = results.device.peak_name;
  json["peak_bytes_are_separate"] = results.peaks_are_separate;
  json["checkpoint_loss"] = results.checkpoint_loss;
  json["total_seconds"] = results.total_seconds;
  return json;
}

}  // namespace logitless::train
