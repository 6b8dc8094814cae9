#include "cuda/tune/self_check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/number_text.h"
#include "core/status.h"
#include "cuda/runtime/captures.h"
#include "cuda/tune/head.h"

namespace logitless::cuda {
namespace {

// More than one tile in each direction, the last ones partly filled.
constexpr HeadSizes kSizes{300, 1000, 136};
// Both engines round dz and the gradients to the operands' dtype, so they may differ by four units of
// rounding: 2^-9 each in bf16, less in fp16. Twice that, as the terms of a row may cancel.
constexpr double kMostOfGradients = 0x1p-6;
// Float32 sums of 136 products of at most 4 units, and of 1000 exponentials.
constexpr double kMostOfLogs = 0x1p-12;

// Results of a run, on the host.
struct Results {
  std::vector<double> lse, top_log_probs, sampled_keys, d_hidden, d_weight;
};

std::vector<double> fetch(const void* data, DType dtype, int64_t count, const TimedStream& stream) {
  std::vector<double> out;
  if (data == nullptr) return out;
  std::vector<std::byte> bytes(static_cast<size_t>(count) * size_of(dtype));
  check(cudaMemcpyAsync(bytes.data(), data, bytes.size(), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  stream.wait();
  out.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) out.push_back(load_as_double(bytes.data(), dtype, i));
  return out;
}

Results results_of(Head& head, const TimedStream& stream, const Problem& problem, const Engine& engine,
                   bool smallest) {
  const Head::Planned planned = head.plan(problem, engine, smallest);
  head.run(planned);
  const Buffers& b = planned.buffers;
  const auto& [tokens, vocab, hidden] = head.sizes();
  return {fetch(b.lse, DType::kF32, tokens, stream),
          fetch(b.top_log_probs, DType::kF32, tokens * Head::kTop, stream),
          fetch(b.sampled_keys, DType::kF32, tokens * Head::kSamples, stream),
          fetch(b.d_hidden, problem.dtype.d_hidden, tokens * hidden, stream),
          fetch(b.d_weight, problem.dtype.d_weight, vocab * hidden, stream)};
}

// NaN for different sizes or NaN elements, so that comparisons with it are false.
double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : NAN;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double difference = std::fabs(a[i] - b[i]);
    if (!(difference <= largest)) largest = difference;
    if (std::isnan(largest)) break;
  }
  return largest;
}

// Returns the largest norm of a row's difference over that of b's row. In most rows of d_weight no target's
// element covers errors of the others.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t first = 0; first < a.size(); first += kSizes.hidden) {
    double difference = 0, size = 0;
    for (size_t i = first; i < first + kSizes.hidden; ++i) {
      difference += (a[i] - b[i]) * (a[i] - b[i]);
      size += b[i] * b[i];
    }
    const double share = std::sqrt(difference / size);
    if (!(share <= largest)) largest = share;
    if (std::isnan(largest)) break;
  }
  return largest;
}

std::string difference_of(const Results& a, const Results& b) {
  const auto beyond = [](const char* name, double difference, double most) {
    return difference <= most ? std::string()
                              : std::string(name) + " differs by " + number_text(difference, 3);
  };
  for (const std::string& text :
       {beyond("lse", largest_difference(a.lse, b.lse), kMostOfLogs),
        beyond("top_log_probs", largest_difference(a.top_log_probs, b.top_log_probs), kMostOfLogs),
        beyond("sampled_keys", largest_difference(a.sampled_keys, b.sampled_keys), kMostOfLogs),
        beyond("d_hidden", relative_difference(a.d_hidden, b.d_hidden), kMostOfGradients),
        beyond("d_weight", relative_difference(a.d_weight, b.d_weight), kMostOfGradients)}) {
    if (!text.empty()) return text;
  }
  return "";
}

// Problems that use all epilogues, plain and general.
std::vector<Problem> problems_of(const Head& head, DType dtype) {
  std::vector<Problem> all{head.problem(Work::kLoss), head.problem(Work::kExact), head.problem(Work::kExact)};
  all[2].softcap = 5;
  if (dtype != DType::kBF16) return all;
  all.push_back(head.problem(Work::kSparsified));
  all.back().threshold = 0x1p-126;  // keeps everything, so the gradient is exact
  all.push_back(head.problem(Work::kLoss));
  all.back().top_k = Head::kTop;
  all.push_back(head.problem(Work::kLoss));
  all.back().num_samples = Head::kSamples;
  return all;
}

}  // namespace

SelfCheck self_check(const Engine& engine, const Device& device) {
  const BesideCaptures beside_captures;
  try {
    const DeviceGuard guard(device.ordinal);
    const TimedStream stream;
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      if (!engine.why_not_of(dtype).empty()) continue;
      Head head(kSizes, dtype, device, stream);
      for (const Problem& problem : problems_of(head, dtype)) {
        const Results right = results_of(head, stream, problem, portable::engine(), false);
        for (const bool smallest : {false, true}) {  // the smallest plan keeps no exp logits
          if (smallest && !problem.needs_backward()) continue;
          const std::string difference =
              difference_of(results_of(head, stream, problem, engine, smallest), right);
          if (difference.empty()) continue;
          return {difference + " from portable's, in a " +
                      (problem.needs_backward() ? "pass with gradients of " : "forward pass of ") +
                      dtype_name(dtype),
                  ""};
        }
      }
    }
    return {};
  } catch (const Error& error) {
    cudaGetLastError();
    return {"", error.what()};
  }
}

namespace {

// Returns why an engine is not trusted on a device, with a warning on stderr the first time; empty if it is.
std::string why_untrusted(const Engine& engine, const Device& device) {
  const SelfCheck check = self_check(engine, device);
  if (check.passed()) return "";
  const bool differs = !check.difference.empty();
  std::string why = engine.name();
  why += differs ? " failed its self-check on this device: " + check.difference
                 : " is not used in this process, as its self-check could not run: " + check.why_not;
  std::fprintf(stderr, "logitless: warning: %s: %s. Other kernels are used.%s\n", device.name.c_str(),
               why.c_str(), differs ? " Please report this line." : "");
  return why;
}

}  // namespace

Device checked_device(int ordinal, const std::string& requested) {
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, std::string> known;  // why_untrusted() by device and engine
  Device device = query_device(ordinal);
  std::string why_not = device.why_not;
  if (why_not.empty()) cublaslt_version(&why_not);
  if (!why_not.empty()) return device;
  for (const Engine* engine : engines()) {
    const bool is_used = engine->opt_in_reason(device).empty() || engine->name() == requested ||
                         std::ranges::count(device.measured.engines, engine->name()) > 0;
    if (!is_used || !engine->is_untried_on(device) || !engine->why_not_on(device).empty()) continue;
    const std::lock_guard lock(mutex);
    const auto [at, is_new] = known.try_emplace({ordinal, engine->name()});
    if (is_new) at->second = why_untrusted(*engine, device);
    if (at->second.empty()) continue;
    device.untrusted_engine = engine->name();
    device.why_untrusted = at->second;
  }
  return device;
}

}  // namespace logitless::cuda
