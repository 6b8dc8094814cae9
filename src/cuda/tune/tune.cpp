#include "cuda/tune/tune.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>

#include "core/number_text.h"
#include "core/status.h"
#include "cuda/engines/kernel_times.h"
#include "cuda/plan/sizes.h"
#include "cuda/run/sparsified/sizes.h"
#include "cuda/runtime/captures.h"
#include "cuda/runtime/gemm.h"
#include "cuda/runtime/queue.h"
#include "cuda/tune/head.h"
#include "cuda/tune/self_check.h"

namespace logitless::cuda {
namespace {

constexpr DType kDType = DType::kBF16;
constexpr double kDefaultSeconds = 60;
// Heads of Llama 3 8B, Qwen 3 1.7B, Gemma 2 2B, Gemma 3 1B and GPT-2.
const std::vector<TuneHead> kCommonHeads{{4096, 128256, 4096},
                                         {4096, 151936, 2048},
                                         {4096, 256000, 2304},
                                         {4096, 262144, 1152},
                                         {4096, 50304, 768}};
// A slower engine that comes first in engines() is preferred within this share: it takes less memory.
constexpr double kTie = 1.01;

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

class Deadline {
 public:
  explicit Deadline(double seconds) : seconds_(seconds) {}
  double elapsed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  double left() const { return seconds_ - elapsed(); }
  double share() const { return std::min(elapsed() / seconds_, 1.0); }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const double seconds_;
};

// An engine with one kind of work on one head.
struct Cell {
  const Engine* engine;
  Work work;
  Head::Planned planned;
  std::vector<double> seconds = {};
};

class Tuner {
 public:
  Tuner(const TuneOptions& options, const Device& device)
      : options_(options),
        device_(device),
        deadline_(options.seconds > 0 ? options.seconds : kDefaultSeconds) {
    for (const Engine* engine : engines()) {
      if (!engine->why_not(device, kDType).empty() || device.untrusted_engine == engine->name()) continue;
      if (engine->is_untried_on(device) && !self_check(*engine, device).passed()) continue;
      engines_.push_back(engine);
    }
  }

  DeviceRecord record() {
    const std::vector<TuneHead>& heads = options_.heads.empty() ? kCommonHeads : options_.heads;
    std::string why_not;
    prepare_rates();
    for (size_t i = 0; i < heads.size(); ++i) {
      // Each head gets its share of the time that is left, so that one which does not fit costs none.
      const double until = deadline_.elapsed() + deadline_.left() / static_cast<double>(heads.size() - i);
      try {
        Head head({heads[i].tokens, heads[i].vocab, heads[i].hidden}, kDType, device_, stream_);
        time_head(head, until);
      } catch (const Error& error) {
        if (error.status() != Status::kOutOfMemory) throw;
        why_not = error.what();
      }
    }
    if (record_.runs.empty()) {
      throw Error(Status::kOutOfMemory, ErrorInfo{.argument = "heads",
                                                  .expected = "some that fit the device's free memory",
                                                  .got = "none (" + why_not + ")"});
    }
    record_.device.name = device_.name;
    record_.device.capability = device_.capability;
    record_.device.processors = device_.processors;
    Measured& measured = record_.device.measured;
    measured.matmul_flops = rate(2 * std::pow(static_cast<double>(square_.m), 3), median(products_));
    measured.mma_share = mma_share();
    for (size_t i = 0; i < kWorkNames.size(); ++i) measured.engines[i] = fastest(static_cast<Work>(i));
    return record_;
  }

 private:
  void report() const {
    if (options_.progress && !options_.progress(deadline_.share())) {
      throw_invalid("progress", "0 to go on", "another value, which stops");
    }
  }

  // Chooses square matrices that are large enough for the rates, whatever the heads, and times copies of
  // them.
  void prepare_rates() {
    constexpr double kLongEnough = 5e-4;
    constexpr int64_t kMostRows = 16384;
    constexpr int kRepeats = 5;
    square_.transpose_b = true;
    size_t bytes = 0;
    do {
      square_.m = square_.n = square_.k = std::max<int64_t>(2 * square_.m, 128);
      // Two of them are more than the L2 holds.
      const int64_t elements = std::max(square_.m * square_.m, device_.l2_bytes);
      bytes = static_cast<size_t>(elements) * size_of(kDType);
      for (DeviceMemory& matrix : matrices_) matrix = DeviceMemory(bytes);
      launch_fill(matrices_[0].get(), kDType, elements, 1, 1, stream_);
      launch_fill(matrices_[1].get(), kDType, elements, 1, 2, stream_);
      square_.a = {matrices_[0].get(), kDType, square_.m};
      square_.b = {matrices_[1].get(), kDType, square_.m};
      square_.c = {matrices_[2].get(), kDType, square_.m};
      multiply();  // loads kernels
    } while (stream_.seconds_of([&] { multiply(); }) < kLongEnough && square_.m < kMostRows);
    std::vector<double> copies;
    for (int i = 0; i < kRepeats; ++i) {
      copies.push_back(stream_.seconds_of([&] {
        check(
            cudaMemcpyAsync(matrices_[2].get(), matrices_[0].get(), bytes, cudaMemcpyDeviceToDevice, stream_),
            "cudaMemcpyAsync");
      }));
    }
    record_.device.measured.bytes_per_second = rate(2 * static_cast<double>(bytes), median(copies));
  }

  void multiply() const { gemm(square_, nullptr, 0, Queue(stream_)); }

  static double rate(double of_work, double seconds) {
    return of_work / seconds >= kLeastRate ? of_work / seconds : 0;
  }

  // Runs all cells of a head in turn until its time is up, each at least once.
  void time_head(Head& head, double until) {
    std::vector<Cell> cells;
    for (const Work work : {Work::kLoss, Work::kExact, Work::kSparsified}) {
      const Problem problem = head.problem(work);
      if (work == Work::kSparsified && !why_not_sparsified(problem, device_.capability).empty()) continue;
      for (const Engine* engine : engines_) cells.push_back({engine, work, head.plan(problem, *engine)});
    }
    for (const Cell& cell : cells) head.run(cell.planned);  // loads kernels
    stream_.wait();
    const auto seconds_after_one = [&](const auto& run) {
      report();
      run();  // keeps the device busy while the timed run is queued
      return stream_.seconds_of(run);
    };
    do {
      // Among the engines' runs, as the clocks of back-to-back products are lower.
      products_.push_back(seconds_after_one([&] { multiply(); }));
      for (Cell& cell : cells) cell.seconds.push_back(seconds_after_one([&] { head.run(cell.planned); }));
    } while (deadline_.elapsed() < until);
    const auto& [tokens, vocab, hidden] = head.sizes();
    for (const Cell& cell : cells) {
      record_.runs.push_back(
          {tokens, vocab, hidden, cell.engine->name(), cell.work, median(cell.seconds),
           static_cast<int64_t>(cell.seconds.size()),
           std::string(plan_kind_name(cell.planned.plan.kind)) + ", " + cell.planned.plan.config});
    }
  }

  // Returns the engine with the least geometric mean of its times; empty if no head ran this kind of work.
  // All engines ran on the same heads.
  std::string fastest(Work work) const {
    std::string best;
    double least = 0;
    for (const Engine* engine : engines_) {
      double sum = 0, count = 0;
      for (const TimedRun& run : record_.runs) {
        if (run.work != work || run.engine != engine->name()) continue;
        sum += std::log(run.median_seconds);
        ++count;
      }
      if (count == 0) return "";
      const double mean = std::exp(sum / count);
      if (best.empty() || mean * kTie < least) best = engine->name(), least = mean;
    }
    return best;
  }

  // Returns the share of the product rate with which the model predicts the measured losses of the mma
  // engine. The predicted time is a / share + b.
  double mma_share() const {
    const Engine& mma = *engine_named("mma");
    std::vector<double> shares;
    for (const TimedRun& run : record_.runs) {
      if (run.engine != mma.name() || run.work != Work::kLoss) continue;
      Problem problem;
      problem.dtype.hidden = problem.dtype.weight = kDType;
      LogitsArgs args;
      args.dtype = kDType;
      args.rows = run.tokens, args.columns = run.vocab, args.depth = run.hidden;
      const auto predicted = [&](double share) {
        Device device = device_;
        device.measured = record_.device.measured;
        device.measured.mma_share = share;
        return mma.seconds(args, {}, 0, KernelTimes(problem, device));
      };
      const double a = predicted(0.5) - predicted(1), b = predicted(1) - a;
      shares.push_back(a / std::max(run.median_seconds - b, 0.1 * a));
    }
    const double share = median(shares);
    return share >= kLeastShare ? share : 0;
  }

  const TuneOptions& options_;
  const Device& device_;
  const TimedStream stream_;
  const Deadline deadline_;
  std::vector<const Engine*> engines_;
  Gemm square_;
  std::array<DeviceMemory, 3> matrices_;
  std::vector<double> products_;  // seconds of square_
  DeviceRecord record_;
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[16];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d", &utc)};
}

// Returns the file that a link names, which may not exist.
std::filesystem::path linked(const std::filesystem::path& link) {
  std::error_code error;
  return std::filesystem::weakly_canonical(link.parent_path() / std::filesystem::read_symlink(link, error),
                                           error);
}

// A file beside the record's, which no other process uses, so that no reader sees half of it. It takes the
// record's place in commit(); without that, nothing is left of it.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(path) {
    static std::atomic<int> number = 0;
    std::error_code error;
    // A link stays: the file that it names is replaced.
    const std::filesystem::path target =
        std::filesystem::is_symlink(path, error) ? linked(path) : std::filesystem::path(path);
    if (target.has_parent_path()) std::filesystem::create_directories(target.parent_path(), error);
    if (!target.has_filename() ||
        (std::filesystem::exists(target, error) && !std::filesystem::is_regular_file(target, error))) {
      refuse("no regular file");  // a rename would replace a device such as /dev/null
    }
    target_ = target;
    beside_ = target_ + "." + std::to_string(getpid()) + "-" + std::to_string(number++) + ".new";
    file_.open(beside_, std::ios::binary);
    if (!file_) refuse("");
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() {
    std::error_code error;
    std::filesystem::remove(beside_, error);
  }
  void commit(const std::string& text) {
    file_ << text;
    file_.close();
    std::error_code error;
    if (file_) std::filesystem::rename(beside_, target_, error);
    if (!file_ || error) refuse(error ? error.message() : "");
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw_invalid("path", "a file that can be written", path_ + (why.empty() ? "" : " (" + why + ")"));
  }

  const std::string path_;
  std::string target_, beside_;
  std::ofstream file_;
};

}  // namespace

std::string tune(const TuneOptions& options) {
  if (const std::string why = why_no_records(); !why.empty()) throw Error(Status::kUnsupported, why);
  const Device device = checked_device(options.device, "");
  if (!device.why_not.empty()) throw Error(Status::kBackendUnavailable, "device: " + device.why_not);
  const std::string path = options.path.empty() ? record_path(device) : options.path;
  if (path.empty()) {
    throw_invalid("path", "a file, as LOGITLESS_DEVICE_RECORDS, XDG_CONFIG_HOME and HOME name no folder",
                  "none");
  }
  { const NewFile possible(path); }  // or it throws, before the measurements
  const DeviceGuard guard(device.ordinal);
  const BesideCaptures beside_captures;
  DeviceRecord record = Tuner(options, device).record();
  int runtime = 0;
  query_versions(&record.driver_version, &runtime);
  record.library_version = options.library_version;
  record.date = today();
  record.device.measured.source = std::filesystem::absolute(path).string();
  const std::string text = text_of(record);
  NewFile(path).commit(text);
  return text;
}

}  // namespace logitless::cuda
