#include "solve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "device_memory.h"
#include "formats.h"

namespace logitless_test {
namespace {

std::vector<double> slice(const std::vector<double>& values, int64_t begin, int64_t count) {
  if (values.empty()) return {};
  const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

// A problem with the functions that the list of tensors calls.
struct ListedProblem : logitless::Problem {
  bool is_sparsified() const { return gradient != LOGITLESS_EXACT; }
  bool screens() const { return screen != LOGITLESS_SCREEN_NONE; }
  bool needs_forward() const { return pass != LOGITLESS_BACKWARD; }
  bool needs_backward() const { return pass != LOGITLESS_FORWARD; }
  bool in_group() const { return group_size > 0; }
};
struct Reduction {
  static constexpr int32_t kMean = LOGITLESS_REDUCTION_MEAN;
};

// Takes is_top1 apart, which has a byte a row and is read as words.
std::vector<double> bytes_of_words(const std::vector<double>& words, int64_t bytes) {
  std::vector<double> out;
  for (int64_t i = 0; i < bytes; ++i) {
    const auto word = static_cast<uint32_t>(static_cast<int32_t>(words[static_cast<size_t>(i / 4)]));
    out.push_back(word >> (8 * (i % 4)) & 0xff);
  }
  return out;
}

// Whether rows of a whole number of 16 bytes do not all begin at a multiple of 16 bytes.
bool is_unaligned(int32_t dtype, int64_t columns, const Layout& layout) {
  const auto size = static_cast<int64_t>(size_of(as_dtype(dtype)));
  return columns * size % 16 == 0 && (layout.skew * size % 16 != 0 || layout.padding * size % 16 != 0);
}

}  // namespace

RunTensors::RunTensors(const logitless::Problem& problem, const Case& c)
    : p_(problem), c_(c), stats_(stats_dtype(problem)) {}

const Tensor& RunTensors::input(const char* name, logitless_dtype dtype, int64_t rows, int64_t columns,
                                const std::vector<double>& values, Layout layout) {
  Tensor& tensor = tensors_.emplace_back(name, dtype, rows, columns, layout, nullptr).tensor;
  tensor.fill(values);
  tensor.remember();
  return tensor;
}

void* RunTensors::vector_input(const char* name, logitless_dtype dtype, const std::vector<double>& values) {
  if (values.empty()) return nullptr;
  const auto rows = static_cast<int64_t>(values.size());
  return const_cast<void*>(input(name, dtype, rows, 1, values, {0, c_.skew}).data());
}

Tensor& RunTensors::output(const char* name, logitless_dtype dtype, int64_t rows, int64_t columns,
                           std::vector<double> Outputs::*values, Layout layout) {
  return tensors_.emplace_back(name, dtype, rows, columns, layout, values).tensor;
}

void RunTensors::add_inputs() {
  const int64_t d = p_.hidden;
  const Tensor& hidden =
      input("hidden", as_dtype(p_.dtype.hidden), p_.tokens, d, c_.hidden, c_.hidden_layout);
  b_.hidden = hidden.data();
  b_.hidden_stride = c_.hidden_layout.padding == 0 ? 0 : hidden.stride();
  const Tensor& weight = input("weight", as_dtype(p_.dtype.weight), p_.vocab, d,
                               slice(c_.weight, p_.vocab_start * d, p_.vocab * d), c_.weight_layout);
  b_.weight = weight.data();
  b_.weight_stride = weight.stride();
  if (p_.has.bias)
    b_.bias = vector_input("bias", as_dtype(p_.dtype.bias), slice(c_.bias, p_.vocab_start, p_.vocab));
  if (c_.has_targets)
    b_.targets = vector_input("targets", as_dtype(p_.dtype.targets), {c_.targets.begin(), c_.targets.end()});
  b_.sample_seed = vector_input("sample_seed", LOGITLESS_I64, {c_.sample_seed.begin(), c_.sample_seed.end()});
  if (!c_.sample_mask.empty()) {
    std::vector<double> words;
    for (int64_t row = 0; row < p_.tokens; ++row) {
      for (int64_t first = 0; first < p_.vocab; first += 32) {
        uint32_t word = 0;
        for (int64_t j = first; j < std::min(first + 32, p_.vocab); ++j) {
          const auto at = static_cast<size_t>(row * c_.problem.vocab + p_.vocab_start + j);
          word |= static_cast<uint32_t>(c_.sample_mask[at] != 0) << (j - first);
        }
        words.push_back(static_cast<int32_t>(word));
      }
    }
    b_.sample_mask = static_cast<const int32_t*>(vector_input("sample_mask", LOGITLESS_I32, words));
  }
  b_.target_weight = vector_input("target_weight", stats_, c_.target_weight);
  if (!c_.seed_in_memory.empty()) {
    b_.seed = input("seed", LOGITLESS_I64, 1, 1, {static_cast<double>(c_.seed_in_memory[0])}, {}).data();
  }
  if (p_.pass != LOGITLESS_FORWARD) b_.grad_loss = vector_input("grad_loss", stats_, c_.grad_loss);
#define LOGITLESS_STATS_INPUT(name) \
  if (p_.has.name) b_.name = vector_input(#name, stats_, c_.name)
  LOGITLESS_STATS_INPUT(class_weight);
  LOGITLESS_STATS_INPUT(token_weight);
  LOGITLESS_STATS_INPUT(temperature);
  LOGITLESS_STATS_INPUT(grad_nll);
  LOGITLESS_STATS_INPUT(grad_lse);
  LOGITLESS_STATS_INPUT(grad_entropy);
  LOGITLESS_STATS_INPUT(grad_target_logit);
#undef LOGITLESS_STATS_INPUT
}

void RunTensors::add_known(const Outputs& known, int64_t saved_bytes) {
  b_.lse = vector_input("lse", stats_, known.lse);
  b_.lse_residual = vector_input("lse_residual", stats_, known.lse_residual);
  if (p_.has.grad_entropy) b_.entropy = vector_input("entropy", stats_, known.entropy);
  if (saved_bytes == 0) return;
  const auto words = static_cast<int64_t>(known.saved.size());
  EXPECT_EQ(saved_bytes, words * 4);
  b_.saved = const_cast<void*>(input("saved", LOGITLESS_I32, words, 1, known.saved, {}).data());
}

void RunTensors::add_screen_weight(int64_t bytes) {
  if (bytes == 0) return;
  const std::vector<double>& known = c_.screen_weight;
  if (p_.screen_weight_bytes == 0) {
    b_.screen_weight =
        output("screen_weight", LOGITLESS_I32, bytes / 4, 1, &Outputs::screen_weight, {}).data();
    return;
  }
  EXPECT_EQ(bytes, static_cast<int64_t>(known.size()) * 4);
  b_.screen_weight = const_cast<void*>(input("screen_weight", LOGITLESS_I32, bytes / 4, 1, known, {}).data());
}

int64_t RunTensors::elements(std::string_view shape) const {
  if (shape == "[N, top_k]") return p_.tokens * p_.top_k;
  if (shape == "[N, num_samples]") return p_.tokens * p_.num_samples;
  if (shape == "[N, K]") return p_.tokens * p_.targets_per_row;
  if (shape == "[2]") return 2;
  return shape == "[N]" || (shape == "[] or [N]" && p_.reduction == LOGITLESS_REDUCTION_NONE) ? p_.tokens : 1;
}

template <class Wanted>
void RunTensors::add_listed(const Wanted& is_wanted) {
  const ListedProblem p{p_};
  const auto add = [&](const ListedTensor& t) {
    const int64_t count = elements(t.shape);
    const Layout layout{0, c_.skew};
    if (t.dtype == TensorDtype::I64) return output(t.name, LOGITLESS_I64, count, 1, t.values, layout).data();
    if (t.dtype == TensorDtype::STATS) return output(t.name, stats_, count, 1, t.values, layout).data();
    const int64_t words = t.dtype == TensorDtype::U8 ? (count + 3) / 4 : count;  // read() takes them apart
    return output(t.name, LOGITLESS_I32, words, 1, t.values, layout).data();
  };
  const ListedTensor* next = kTensors;
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, shape, planned, allowed, ...) \
  if (const ListedTensor& t = *next++; (allowed) && is_wanted(t)) b_.name = static_cast<element*>(add(t));
#include <logitless/tensors.def>
}

void RunTensors::add_outputs(int64_t saved_bytes, bool on_device, bool only_losses) {
  const bool is_backward = p_.pass == LOGITLESS_BACKWARD;
  const bool is_shard = p_.vocab_total != 0 && p_.vocab != p_.vocab_total && p_.group_size == 0;
  add_listed([&](const ListedTensor& t) {
    const std::string_view name = t.name;
    if (t.dtype == TensorDtype::BYTES) return false;  // their sizes are the plan's
    if (name == "invalid_targets") return on_device;
    if (name == "kept_count" || name == "draw_variance") return true;
    if (name == "sum_exp" && p_.screen != LOGITLESS_SCREEN_NONE) return false;  // refused
    if (only_losses && !is_backward) return name == "loss" || name == "lse" || name == "lse_residual";
    return !is_backward && (t.role == TensorRole::STATISTIC || (t.role == TensorRole::OUTPUT && !is_shard));
  });
  if (saved_bytes > 0 && !is_backward) {
    b_.saved = output("saved", LOGITLESS_I32, saved_bytes / 4, 1, &Outputs::saved, {}).data();
  }
  if (p_.pass != LOGITLESS_FORWARD) add_gradients();
}

void RunTensors::add_statistics(const Outputs& from) {
  add_listed([&](const ListedTensor& t) { return t.is_merged() && !(from.*t.values).empty(); });
  for (Named& each : tensors_) {
    if (each.values != nullptr) each.tensor.fill(from.*each.values);
  }
}

void RunTensors::add_losses() {
  add_listed([](const ListedTensor& t) { return t.role == TensorRole::OUTPUT; });
}

void RunTensors::add_gradients() {
  const int64_t d = p_.hidden;
  if (p_.has.d_hidden) {
    Tensor& t =
        output("d_hidden", as_dtype(p_.dtype.d_hidden), p_.tokens, d, &Outputs::d_hidden, c_.d_hidden_layout);
    if (p_.accumulate.d_hidden) t.fill(c_.d_hidden_start);
    b_.d_hidden = t.data();
    b_.d_hidden_stride = t.stride();
  }
  if (p_.has.d_weight) {
    Tensor& t =
        output("d_weight", as_dtype(p_.dtype.d_weight), p_.vocab, d, &Outputs::d_weight, c_.d_weight_layout);
    if (p_.accumulate.d_weight) t.fill(slice(c_.d_weight_start, p_.vocab_start * d, p_.vocab * d));
    b_.d_weight = t.data();
    b_.d_weight_stride = t.stride();
  }
  if (p_.has.d_bias) {
    Tensor& t = output("d_bias", as_dtype(p_.dtype.d_bias), p_.vocab, 1, &Outputs::d_bias, {0, c_.skew});
    if (p_.accumulate.d_bias) t.fill(slice(c_.d_bias_start, p_.vocab_start, p_.vocab));
    b_.d_bias = t.data();
  }
}

std::vector<GuardedMemory*> RunTensors::memory() {
  std::vector<GuardedMemory*> out;
  for (Named& each : tensors_) out.push_back(each.tensor.memory());
  return out;
}

Outputs RunTensors::read() {
  Outputs out;
  for (Named& each : tensors_) {
    EXPECT_EQ(each.tensor.violation(), "") << each.name;
    if (each.values != nullptr) {
      out.*each.values = each.tensor.values();
    } else {
      EXPECT_TRUE(each.tensor.unchanged()) << "the input " << each.name << " was written to";
    }
  }
  if (b_.is_top1 != nullptr) out.is_top1 = bytes_of_words(out.is_top1, p_.tokens);
  return out;
}

logitless::Problem pass_problem(const Case& c, logitless::Pass pass) {
  logitless::Problem p = c.problem;
  p.pass = static_cast<int32_t>(pass);
  p.unaligned_rows = is_unaligned(p.dtype.hidden, p.hidden, c.hidden_layout) ||
                     is_unaligned(p.dtype.weight, p.hidden, c.weight_layout) ||
                     (pass != logitless::Pass::forward && p.has.d_hidden != 0 &&
                      is_unaligned(p.dtype.d_hidden, p.hidden, c.d_hidden_layout));
  if (pass == logitless::Pass::forward_backward) p.has.saved = 0;
  if (p.has.saved == 0) p.saved_bytes = 0;
  if (pass != logitless::Pass::forward || p.has.saved) p.top_k = p.num_samples = 0;
  if (pass != logitless::Pass::backward) {
    p.has.grad_nll = p.has.grad_lse = p.has.grad_entropy = p.has.grad_target_logit = 0;
  }
  if (pass == logitless::Pass::forward) {
    p.has.d_hidden = p.has.d_weight = p.has.d_bias = 0;
    p.accumulate.d_hidden = p.accumulate.d_weight = p.accumulate.d_bias = 0;
  }
  return p;
}

Outputs run_pass(const logitless::Context& context, const logitless::Problem& problem, const Case& c,
                 const Outputs* known, const logitless::Communicator* group, bool only_losses) {
  const logitless::Plan plan(context, problem);
  const logitless::PlanInfo info = plan.info();
  const bool on_device = std::string_view(info.backend) == "cuda";
  const auto saved_bytes =
      static_cast<int64_t>(problem.has.saved && problem.tokens > 0 ? info.saved_bytes : 0);
  if (problem.max_workspace_bytes != 0) {
    EXPECT_LE(info.workspace_bytes + info.screen_weight_bytes, problem.max_workspace_bytes);
  }
  RunTensors tensors(problem, c);
  tensors.add_inputs();
  if (problem.pass == LOGITLESS_BACKWARD) tensors.add_known(*known, saved_bytes);
  tensors.add_outputs(saved_bytes, on_device, only_losses);
  tensors.add_screen_weight(static_cast<int64_t>(info.screen_weight_bytes));
  const auto run = [&](const logitless::Buffers& buffers, std::span<std::byte> workspace, void* stream) {
    if (group == nullptr) return plan.run(buffers, workspace, stream);
    logitless::run_group(plan, buffers, workspace, *group, stream);
  };
  if (on_device) {
    run_on_device(tensors.memory(), info.workspace_bytes, [&](const OnDevice& device) {
      logitless::Buffers b = tensors.buffers();
#define LOGITLESS_TENSOR(name, ...) b.name = static_cast<decltype(b.name)>(device.of(b.name));
#include <logitless/tensors.def>
      run(b, device.workspace, device.stream);
    });
  } else {
    GuardedMemory workspace(info.workspace_bytes);
    workspace.fill(std::byte{0xff});
    run(tensors.buffers(), {workspace.data(), workspace.size()}, nullptr);
    EXPECT_EQ(workspace.violation(), "") << "workspace";
  }
  Outputs out = tensors.read();
  out.workspace_bytes = info.workspace_bytes;
  return out;
}

Outputs solve_passes(const Case& c,
                     const std::function<Outputs(logitless::Pass, const Outputs* known)>& run) {
  if (c.mode == Mode::kForwardBackward) return run(logitless::Pass::forward_backward, nullptr);
  Outputs out = run(logitless::Pass::forward, nullptr);
  if (c.mode == Mode::kForward) return out;
  const Outputs gradients = run(logitless::Pass::backward, &out);
  for (const auto member : {&Outputs::d_hidden, &Outputs::d_weight, &Outputs::d_bias, &Outputs::kept_count,
                            &Outputs::draw_variance}) {
    out.*member = gradients.*member;
  }
  return out;
}

Outputs solve(const logitless::Context& context, const Case& c, size_t max_workspace_bytes) {
  const auto problem_of = [&](logitless::Pass pass) {
    logitless::Problem problem = pass_problem(c, pass);
    problem.max_workspace_bytes = max_workspace_bytes;
    return problem;
  };
  uint64_t saved_bytes = c.problem.saved_bytes;
  if (saved_bytes == INT64_MAX && c.mode == Mode::kForwardThenBackward) {
    saved_bytes = logitless::Plan(context, problem_of(logitless::Pass::backward)).info().saved_bytes;
  }
  return solve_passes(c, [&](logitless::Pass pass, const Outputs* known) {
    logitless::Problem problem = problem_of(pass);
    if (problem.has.saved != 0) problem.saved_bytes = saved_bytes;
    return run_pass(context, problem, c, known);
  });
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

const char* first_difference(const Outputs& a, const Outputs& b) {
  for (const ListedTensor& each : kTensors) {
    const std::string_view name = each.name;
    // These outputs exist in only one of the two ways to the results.
    if (name == "lse_residual" || name == "invalid_targets" || each.dtype == TensorDtype::BYTES) continue;
    if (!same_bits(a.*each.values, b.*each.values)) return each.name;
  }
  return "";
}

}  // namespace logitless_test
