#include <sys/resource.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <random>

#include "commands/bench.h"
#include "commands/options.h"
#include "device_memory.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

constexpr int kWarmUps = 2;

// The most memory this process has had resident since the last reset, or since its start where the system
// cannot reset it (only Linux can); 0 where it cannot say.
int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::strtoll(line.c_str() + 6, nullptr, 10) * 1024;
  }
  rusage usage{};
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_maxrss * 1024 : 0;
}

// From what is resident now on, without memory that was freed.
void reset_peak_resident_bytes() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
  std::ofstream("/proc/self/clear_refs") << "5\n";
}

// `count` normal numbers as the dtype holds them; from a pool read at a stride, as drawing each would take
// longer than the measurement. `wide`: the same numbers in float32, where not null.
std::vector<std::byte> normal_numbers(int64_t count, double std, logitless_dtype dtype, uint64_t seed,
                                      std::vector<float>* wide) {
  std::vector<float> pool(1 << 16);
  std::vector<uint16_t> bits(pool.size());
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(std));
  for (size_t i = 0; i < pool.size(); ++i) {
    pool[i] = normal(random);
    bits[i] = dtype == LOGITLESS_BF16 ? float_to_bf16(pool[i]) : float_to_f16(pool[i]);
    if (dtype != LOGITLESS_F32)
      pool[i] = dtype == LOGITLESS_BF16 ? bf16_to_float(bits[i]) : f16_to_float(bits[i]);
  }
  const auto size = static_cast<size_t>(dtype_bytes(dtype)), elements = static_cast<size_t>(count);
  std::vector<std::byte> out(elements * size);
  if (wide != nullptr) wide->resize(elements);
  for (size_t i = 0; i < elements; ++i) {
    const size_t slot = (i * 40503 + i / 65537) % pool.size();
    if (wide != nullptr) (*wide)[i] = pool[slot];
    std::memcpy(&out[i * size], size == sizeof(float) ? static_cast<const void*>(&pool[slot]) : &bits[slot],
                size);
  }
  return out;
}

Problem make_problem(const BenchRequest& request, const BenchResult& method) {
  Problem problem;
  problem.tokens = request.shape.tokens;
  problem.vocab = request.shape.vocab;
  problem.hidden = request.shape.dim;
  problem.dtype.hidden = problem.dtype.classifier = request.dtype;
  problem.dtype.targets = LOGITLESS_I32;
  problem.dtype.d_hidden = problem.dtype.d_classifier = request.dtype;
  if (method.gradients) {
    problem.pass = LOGITLESS_FORWARD_BACKWARD;
    problem.has.d_hidden = problem.has.d_classifier = 1;
  }
  problem.max_workspace_bytes = *method.budget_bytes;
  if (method.threshold) set_gradient(problem, Gradient::thinned, *method.threshold);
  return problem;
}

void describe(const PlanInfo& info, double loss, BenchResult& result) {
  result.loss = loss;
  result.workspace_bytes = static_cast<int64_t>(info.workspace_bytes);
  result.detail = std::string(logitless_plan_kind_name(static_cast<logitless_plan_kind>(info.kind))) + ", " +
                  info.backend + " " + info.config;
}

// Hidden states, a classifier whose logits deviate by 2, targets, and room for gradients: the same numbers on
// the host and on a device.
class Bench {
 public:
  Bench(const GlobalOptions& globals, const BenchRequest& request, const DeviceChoice& device)
      : request_(request), threads_(globals.threads), context_(make_context(globals, {}, device)) {
    const auto& [tokens, vocab, dim] = request.shape;
    const bool on_device = device.ordinal != LOGITLESS_HOST_MEMORY;
    const bool widens = !on_device && why_not_materialized().empty();
    hidden_ = normal_numbers(tokens * dim, 1, request.dtype, 1, widens ? &wide_hidden_ : nullptr);
    classifier_ = normal_numbers(vocab * dim, 2 / std::sqrt(static_cast<double>(dim)), request.dtype, 2,
                                 widens ? &wide_classifier_ : nullptr);
    std::mt19937_64 random(3);
    std::uniform_int_distribution<int32_t> ids(0, static_cast<int32_t>(vocab - 1));
    targets_.resize(static_cast<size_t>(tokens));
    for (int32_t& target : targets_) target = ids(random);
    buffers_.hidden = hidden_.data();
    buffers_.classifier = classifier_.data();
    buffers_.targets = targets_.data();
    buffers_.loss = &loss_;
    if (on_device) {
      move_to(device.ordinal);
    } else {  // written before the clock starts, so that its pages exist
      d_hidden_.assign(static_cast<size_t>(tokens * dim), 1.0F);
      d_classifier_.assign(static_cast<size_t>(vocab * dim), 1.0F);
      d_hidden_at_ = d_hidden_.data(), d_classifier_at_ = d_classifier_.data();
    }
  }

  // One timed run.
  void measure(BenchResult& result) {
    buffers_.d_hidden = result.gradients ? d_hidden_at_ : nullptr;
    buffers_.d_classifier = result.gradients ? d_classifier_at_ : nullptr;
    device_ ? measure_on_device(result) : measure_on_host(result);
  }

 private:
  void move_to(int ordinal) {
    device_ = std::make_unique<CudaDevice>(ordinal);
    const auto allocate = [&](size_t bytes) {
      memory_.push_back(std::make_unique<DeviceMemory>(*device_, bytes));
      return memory_.back()->data();
    };
    const auto copy = [&](std::span<const std::byte> from) {
      std::byte* to = allocate(from.size());
      device_->upload(to, from);
      return to;
    };
    buffers_.hidden = copy(hidden_);
    buffers_.classifier = copy(classifier_);
    buffers_.targets = copy(std::as_bytes(std::span(targets_)));
    buffers_.loss = allocate(sizeof loss_);
    d_hidden_at_ = allocate(hidden_.size());
    d_classifier_at_ = allocate(classifier_.size());
    hidden_ = classifier_ = {};
  }

  void measure_on_device(BenchResult& result) {
    const Plan plan(context_, make_problem(request_, result));
    const PlanInfo info = plan.info();
    if (!workspace_ || workspace_->size() < info.workspace_bytes) {
      workspace_.reset();
      workspace_ = std::make_unique<DeviceMemory>(*device_, static_cast<size_t>(info.workspace_bytes));
    }
    const auto run = [&] { plan.run(buffers_, {workspace_->data(), workspace_->size()}, device_->stream()); };
    for (int i = 0; result.seconds.empty() && i < kWarmUps; ++i) run();
    run();  // the device is busy while the next is queued
    result.seconds.push_back(device_->seconds_of(run));
    device_->download(std::as_writable_bytes(std::span(&loss_, 1)), buffers_.loss);
    describe(info, static_cast<double>(loss_), result);
  }

  void measure_on_host(BenchResult& result) {
    reset_peak_resident_bytes();
    const int64_t before = peak_resident_bytes();
    const auto start = std::chrono::steady_clock::now();
    if (result.budget_bytes) {
      const PlanInfo info = run_once(context_, make_problem(request_, result), buffers_);
      describe(info, static_cast<double>(loss_), result);
    } else {
      float* d_hidden = result.gradients ? d_hidden_.data() : nullptr;
      result.loss = materialized_loss(request_.shape, wide_hidden_.data(), wide_classifier_.data(),
                                      targets_.data(), d_hidden, d_classifier_.data(), threads_);
      result.workspace_bytes = request_.shape.tokens * (request_.shape.vocab * 4 + 8);
      result.detail = "fp32 logits in memory, " + materialized_by();
    }
    result.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    result.peak_extra_bytes = std::max(result.peak_extra_bytes.value_or(0), peak_resident_bytes() - before);
  }

  const BenchRequest& request_;
  int threads_;
  Context context_;
  std::vector<std::byte> hidden_, classifier_;
  std::vector<float> wide_hidden_, wide_classifier_;  // for the materialized computation
  std::vector<int32_t> targets_;
  std::vector<float> d_hidden_, d_classifier_;  // room for any dtype
  float loss_ = 0;
  Buffers buffers_;
  void* d_hidden_at_ = nullptr;
  void* d_classifier_at_ = nullptr;
  std::unique_ptr<CudaDevice> device_;  // null: on the host
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::unique_ptr<DeviceMemory> workspace_;
};

}  // namespace

std::string BenchShape::text() const {
  return std::to_string(tokens) + " x " + std::to_string(vocab) + " x " + std::to_string(dim);
}

double BenchResult::median_seconds() const {
  if (seconds.empty()) return NAN;
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

std::vector<BenchResult> bench_methods(const BenchRequest& request, bool materialized) {
  std::vector<BenchResult> methods;
  const auto add = [&](bool gradients, std::string name) -> BenchResult& {
    BenchResult& method = methods.emplace_back();
    method.gradients = gradients;
    method.method = std::move(name);
    return method;
  };
  for (const bool gradients : {false, true}) {
    if (materialized) add(gradients, "materialized");
    for (const size_t budget : request.budgets) {
      add(gradients, budget == 0 ? "logitless, no budget"
                     : budget == LOGITLESS_FASTEST
                         ? "logitless, fastest"
                         : "logitless, " + format_bytes(static_cast<double>(budget)))
          .budget_bytes = budget;
    }
    for (const double threshold : request.thresholds) {
      if (!gradients) continue;
      BenchResult& method = add(true, "logitless, thinned " + format_number(threshold, 3));
      method.budget_bytes = 0;
      method.threshold = threshold;
    }
  }
  return methods;
}

std::vector<BenchResult> run_bench(const GlobalOptions& globals, const BenchRequest& request,
                                   const DeviceChoice& device,
                                   const std::function<void(const std::string&)>& step) {
  Bench bench(globals, request, device);
  const bool on_device = device.ordinal != LOGITLESS_HOST_MEMORY;
  std::vector<BenchResult> results = bench_methods(request, !on_device && why_not_materialized().empty());
  for (int repeat = 0; repeat < request.repeats; ++repeat) {
    for (BenchResult& result : results) {
      if (!result.refusal.empty()) continue;
      try {
        bench.measure(result);
      } catch (const Error& error) {
        if (error.status() != LOGITLESS_BUDGET_TOO_SMALL) throw;
        result.refusal = error.what();
      } catch (const std::bad_alloc&) {
        result.refusal = on_device ? "not enough memory on the device" : "not enough memory";
      }
      step(request.shape.text() + ", " + result.method);
    }
  }
  return results;
}

}  // namespace logitless::cli
