#include "train/demonstration.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "io/atomic_file.h"
#include "support/format.h"
#include "support/interrupt.h"
#include "support/process_memory.h"
#include "support/progress.h"
#include "train/checkpoint.h"
#include "train/clock.h"
#include "train/trainer.h"
#include "train/vocabulary.h"

namespace logitless::train {
namespace {

using Say = std::function<void(const std::string&)>;

constexpr int64_t kValidations = 10;     // over the run
constexpr int64_t kStepsToPlan = 5;      // timed before the number of steps is set
constexpr double kLongestOverrun = 1.3;  // of the time asked for, when steps become slower

class Demonstration {
 public:
  Demonstration(const Settings& settings, Device& device, const Say& say)
      : settings_(settings), device_(device), say_(say) {}

  Results run(Context context) {
    // A budget or folder that cannot work is to be known before the vocabulary is learned.
    check_budget(context, settings_.trainer.batch.tokens(), settings_.vocab, settings_.trainer.model.dim,
                 settings_.max_workspace_bytes, settings_.gradient);
    std::filesystem::create_directories(settings_.output);
    std::unique_ptr<Head> fused =
        device_.fused_head(std::move(context), settings_.max_workspace_bytes, settings_.gradient);
    results_.device = {device_.name(), device_.matrix_library(), device_.peak_name()};
    say_("device      " + results_.device.name +
         (settings_.device_note.empty() ? "" : " (" + settings_.device_note + ")"));
    const TokenizedCorpus corpus = prepare_text();
    settings_.trainer.model.vocab = corpus.vocabulary.size();
    cli::release_free_memory();
    cli::write_text_file((settings_.output / "tokenizer.json").string(), corpus.vocabulary.to_json());
    check_stop();
    if (settings_.compare_steps > 0) run_materialized(corpus);
    check_stop();
    cli::release_free_memory();
    run_fused(corpus, std::move(fused));
    results_.stop_signal = stop_.signal();
    results_.total_seconds = seconds_since(start_);
    return std::move(results_);
  }

 private:
  // Before the first step of the fused head there is nothing to keep.
  void check_stop() const {
    if (stop_.received())
      throw cli::Interrupted(stop_.signal(), "interrupted before there was a model to write");
  }

  TokenizedCorpus prepare_text() {
    const Clock::time_point start = Clock::now();
    const Corpus corpus = read_corpus(settings_.corpus);
    cli::Progress progress(settings_.quiet, "learning the vocabulary",
                           settings_.vocab - Vocabulary::kFirstMerged);
    TokenizedCorpus tokenized = tokenize(corpus, settings_.vocab, [&](int64_t merges) {
      progress.update(merges);
      check_stop();
    });
    progress.finish();
    TextFacts& text = results_.text;
    text.source = corpus.source;
    text.files = corpus.files;
    text.bytes = corpus.bytes;
    text.validation_bytes = corpus.validation_bytes;
    text.train_tokens = static_cast<int64_t>(tokenized.train.size());
    text.validation_tokens = static_cast<int64_t>(tokenized.validation.size());
    text.vocabulary = tokenized.vocabulary.size();
    text.seconds = seconds_since(start);
    const double bytes_per_token =
        static_cast<double>(text.bytes) / static_cast<double>(text.train_tokens + text.validation_tokens);
    say_("text        " + text.source);
    say_("            " + cli::format_count(text.files) + " files, " +
         cli::format_bytes(static_cast<double>(text.bytes)) + ", of which " +
         cli::format_bytes(static_cast<double>(text.validation_bytes)) + " held back for validation");
    say_("vocabulary  " + cli::format_count(text.vocabulary) + " entries, byte-level BPE in " +
         cli::format_fixed(text.seconds, 1) + " s; " + cli::format_count(text.train_tokens) +
         " training tokens of " + cli::format_fixed(bytes_per_token, 2) + " bytes");
    if (text.vocabulary < settings_.vocab) {
      say_("            (the text has no more pairs that occur twice: fewer entries than the " +
           cli::format_count(settings_.vocab) + " asked for)");
    }
    return tokenized;
  }

  void describe_model(Trainer& trainer) {
    const ModelConfig& model = settings_.trainer.model;
    const int64_t tokens = settings_.trainer.batch.tokens();
    results_.parameters = parameter_count(trainer.network().parameters());
    results_.tokens_per_step = tokens;
    say_("model       " + cli::format_count(results_.parameters) + " parameters: D " +
         std::to_string(model.dim) + ", " + std::to_string(model.layers) + " gated linear recurrences of " +
         std::to_string(model.inner) + " channels");
    say_("step        " + std::to_string(settings_.trainer.batch.batch) + " sequences of " +
         std::to_string(settings_.trainer.batch.length) + " tokens; their logits would be " +
         cli::format_count(tokens) + " x " + cli::format_count(model.vocab) + " = " +
         cli::format_bytes(static_cast<double>(tokens * model.vocab) * sizeof(float)) + " in fp32");
  }

  static void record(const StepResult& step, HeadRun& run) {
    run.loss.push_back(step.loss);
    run.seconds.push_back(step.seconds);
    run.head_seconds.push_back(step.head_seconds);
  }

  Trainer make_trainer(const TokenizedCorpus& corpus, std::unique_ptr<Head> head) {
    return {settings_.trainer, corpus.train, corpus.validation,
            device_.network(settings_.trainer, std::move(head))};
  }

  void finish_head(Trainer& trainer, HeadRun& run) {
    const Head& head = trainer.network().head();
    run.name = head.name();
    run.description = head.description();
    run.workspace_bytes = head.workspace_bytes();
    run.gradient_bytes = trainer.head_gradient_bytes();
    run.peak_bytes = device_.peak_bytes();
  }

  void run_materialized(const TokenizedCorpus& corpus) {
    results_.peaks_are_separate = device_.reset_peak();
    Trainer trainer = make_trainer(corpus, device_.materialized_head());
    describe_model(trainer);
    HeadRun run;
    cli::Progress progress(settings_.quiet, "materialized head", settings_.compare_steps);
    for (int64_t k = 0; k < settings_.compare_steps && !stop_.received(); ++k) {
      const double rate = settings_.schedule.learning_rate(k);
      const StepResult step = trainer.step(rate, true);
      record(step, run);
      bounds_.push_back({step.loss, rate, step.gradient_norm, step.logit_bound});
      if (k == 0) {
        const std::span<const float> d_hidden = trainer.network().d_hidden();
        first_d_hidden_.assign(d_hidden.begin(), d_hidden.end());
        first_d_classifier_ = trainer.network().parameters().back().gradient;
      }
      progress.update(k + 1, "loss " + cli::format_fixed(step.loss, 4));
    }
    finish_head(trainer, run);
    results_.materialized = std::move(run);
  }

  // Compares the gradients of the first step, where both heads had the same input, bit by bit.
  void start_agreement(Trainer& trainer) {
    Agreement agreement;
    const int64_t tokens = settings_.trainer.batch.tokens();
    const HeadSize size{tokens, settings_.trainer.model.vocab, settings_.trainer.model.dim};
    agreement.tolerance = curve_tolerances(size, bounds_);
    agreement.gradient_tolerance = gradient_tolerance(size, bounds_.front().logit_bound);
    agreement.d_hidden_difference = relative_difference(trainer.network().d_hidden(), first_d_hidden_);
    agreement.d_classifier_difference =
        relative_difference(trainer.network().parameters().back().gradient, first_d_classifier_);
    first_d_hidden_ = {};
    first_d_classifier_ = {};
    results_.agreement = std::move(agreement);
  }

  void finish_agreement() {
    const std::vector<double>& other = results_.materialized->loss;
    const size_t count = std::min(other.size(), results_.fused.loss.size());
    for (size_t k = 0; k < count; ++k) {
      results_.agreement->difference.push_back(std::abs(results_.fused.loss[k] - other[k]));
    }
    results_.agreement->tolerance.resize(count);
  }

  // How many steps fill the time, from those done so far; the validations to come are counted too.
  int64_t plan_steps(int64_t done, double elapsed, double validation_seconds) const {
    const double rest = settings_.minutes * 60.0 - elapsed - kValidations * validation_seconds;
    const double step_seconds = median_step_seconds(results_.fused.seconds);
    return done + std::max<int64_t>(0, static_cast<int64_t>(rest / step_seconds));
  }

  // The row of the table.
  std::string validate(Trainer& trainer, int64_t step, HeadRun& run, double& validation_seconds) {
    const Validation validation = trainer.validate();
    run.validation_step.push_back(step);
    run.validation_loss.push_back(validation.loss);
    validation_seconds = validation.seconds;
    const double step_seconds = step == 0 ? 0.0 : median_step_seconds(run.seconds);
    const double rate = step_seconds > 0 ? static_cast<double>(results_.tokens_per_step) / step_seconds : 0.0;
    return row(std::to_string(step), step == 0 ? "-" : cli::format_fixed(mean_since_last(run), 4),
               cli::format_fixed(validation.loss, 4),
               step == 0 ? "-" : cli::format_count(std::llround(rate)));
  }

  // Mean training loss of the steps since the validation before the last.
  static double mean_since_last(const HeadRun& run) {
    const size_t count = run.validation_step.size();
    const auto from = static_cast<size_t>(count < 2 ? 0 : run.validation_step[count - 2]);
    double sum = 0.0;
    for (size_t k = from; k < run.loss.size(); ++k) sum += run.loss[k];
    return sum / static_cast<double>(std::max<size_t>(1, run.loss.size() - from));
  }

  static std::string row(const std::string& step, const std::string& loss, const std::string& validation,
                         const std::string& rate) {
    char text[128];
    std::snprintf(text, sizeof text, "%8s %12s %12s %12s", step.c_str(), loss.c_str(), validation.c_str(),
                  rate.c_str());
    return text;
  }

  void run_fused(const TokenizedCorpus& corpus, std::unique_ptr<Head> head) {
    Trainer trainer = make_trainer(corpus, std::move(head));
    if (!results_.materialized) {
      results_.peaks_are_separate = device_.reset_peak();
      describe_model(trainer);
    }
    HeadRun& run = results_.fused;
    Schedule& schedule = settings_.schedule;
    const int64_t before_plan = std::max(settings_.compare_steps, kStepsToPlan);
    schedule.decay_from = before_plan;
    schedule.total = settings_.steps;
    say_("");
    say_(row("step", "loss", "validation", "tokens/s"));
    const Clock::time_point start = Clock::now();
    double validation_seconds = 0.0;
    say_(validate(trainer, 0, run, validation_seconds));
    cli::Progress progress(settings_.quiet, "fused head", settings_.steps > 0 ? settings_.steps : 1000);
    int64_t done = 0;
    do {
      const StepResult step = trainer.step(schedule.learning_rate(done));
      record(step, run);
      ++done;
      if (done == 1 && results_.materialized) {
        start_agreement(trainer);
        // From here on nothing of the comparison is in memory.
        cli::release_free_memory();
        results_.peaks_are_separate = device_.reset_peak() && results_.peaks_are_separate;
      }
      if (schedule.total == 0 && done == before_plan) {
        schedule.total = plan_steps(done, seconds_since(start), validation_seconds);
      }
      show_progress(progress, schedule.total, done, seconds_since(start), step.loss);
      const int64_t interval = std::max<int64_t>(1, schedule.total / kValidations);
      const bool last = schedule.total > 0 && done >= schedule.total;
      if (!last && schedule.total > 0 && done % interval == 0 && schedule.total - done >= interval / 2) {
        const std::string line = validate(trainer, done, run, validation_seconds);
        progress.hide();
        say_(line);
      }
      if (last || stop_.received()) break;
    } while (settings_.steps > 0 || seconds_since(start) < kLongestOverrun * settings_.minutes * 60.0);
    progress.finish();
    if (run.validation_step.back() != done) say_(validate(trainer, done, run, validation_seconds));
    results_.planned_steps = schedule.total;
    results_.training_seconds = seconds_since(start);
    finish_head(trainer, run);
    if (results_.agreement) finish_agreement();
    save(trainer, done);
  }

  void show_progress(cli::Progress& progress, int64_t total, int64_t done, double seconds,
                     double loss) const {
    // Until the number of steps is known, the bar shows the time.
    const double share = total > 0 ? static_cast<double>(done) / static_cast<double>(total)
                                   : seconds / (settings_.minutes * 60.0);
    const int64_t scale = settings_.steps > 0 ? settings_.steps : 1000;
    progress.update(static_cast<int64_t>(share * static_cast<double>(scale)),
                    "step " + std::to_string(done) + "  loss " + cli::format_fixed(loss, 4));
  }

  void save(Trainer& trainer, int64_t done) {
    const Batch& batch = trainer.validation_batches().front();
    Network& network = trainer.network();
    results_.checkpoint_loss = network.loss(batch);
    const ModelConfig& model = settings_.trainer.model;
    write_checkpoint(settings_.output / "model.safetensors", network.parameters(), network.hidden(),
                     batch.targets,
                     {{"format", "logitless-train"},
                      {"steps", std::to_string(done)},
                      {"dim", std::to_string(model.dim)},
                      {"inner", std::to_string(model.inner)},
                      {"layers", std::to_string(model.layers)},
                      {"seed", std::to_string(settings_.trainer.seed)},
                      {"loss_of_targets", cli::format_fixed(results_.checkpoint_loss, 6)}});
  }

  Settings settings_;
  Device& device_;
  const Say& say_;
  const Clock::time_point start_ = Clock::now();
  cli::StopRequest stop_;
  Results results_;
  std::vector<StepBounds> bounds_;
  std::vector<float> first_d_hidden_;
  std::vector<float> first_d_classifier_;
};

}  // namespace

Results run_demonstration(const Settings& settings, Device& device, Context context, const Say& say) {
  return Demonstration(settings, device, say).run(std::move(context));
}

}  // namespace logitless::train
