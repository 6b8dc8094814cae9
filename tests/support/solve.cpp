#include "solve.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <string_view>

#include "device_memory.h"
#include "formats.h"
#include "row_fields.h"

namespace logitless_test {
namespace {

std::vector<double> slice(const std::vector<double>& values, int64_t begin, int64_t count) {
  if (values.empty()) return {};
  const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

// The tensors of one run.
class Run {
 public:
  Run(const logitless::Problem& problem, const Case& c, bool only_losses)
      : p_(problem), c_(c), stats_(stats_dtype(problem)), only_losses_(only_losses) {}

  Outputs run(const logitless::Context& context, const Outputs* known, const logitless::Communicator* group) {
    group_ = group;
    const logitless::Plan plan(context, p_);
    const logitless::PlanInfo info = plan.info();
    const bool on_device = std::string_view(info.backend) == "cuda";
    add_inputs();
    if (p_.has.draws && p_.tokens > 0) add_draws(static_cast<int64_t>(info.draws_bytes), known);
    if (on_device) b_.invalid_targets = count_output("invalid_targets", 2, &out_.invalid_targets);
    if (p_.pass == LOGITLESS_BACKWARD) {
      add_known(*known);
    } else {
      add_forward_outputs();
    }
    if (p_.pass != LOGITLESS_FORWARD) add_gradients();
    out_.workspace_bytes = info.workspace_bytes;
    if (p_.max_workspace_bytes != 0) {
      EXPECT_LE(out_.workspace_bytes, p_.max_workspace_bytes);
    }
    if (on_device) {
      run_on_device(plan);
    } else {
      run_on_host(plan);
    }
    check_and_read();
    return out_;
  }

 private:
  void run_plan(const logitless::Plan& plan, const logitless::Buffers& buffers,
                std::span<std::byte> workspace, void* stream) const {
    if (group_ == nullptr) return plan.run(buffers, workspace, stream);
    logitless::run_group(plan, buffers, workspace, *group_, stream);
  }

  void run_on_host(const logitless::Plan& plan) {
    GuardedMemory workspace(out_.workspace_bytes);
    workspace.fill(std::byte{0xff});
    run_plan(plan, b_, {workspace.data(), workspace.size()}, nullptr);
    EXPECT_EQ(workspace.violation(), "") << "workspace";
  }

  void run_on_device(const logitless::Plan& plan) {
    DeviceMirror mirror;
    for (auto* tensors : {&inputs_, &outputs_}) {
      for (Named& each : *tensors) mirror.add(each.tensor.memory());
    }
    mirror.upload(out_.workspace_bytes);
    logitless::Buffers b = b_;
#define LOGITLESS_TENSOR(name, ...) b.name = static_cast<decltype(b.name)>(mirror.of(b.name));
#include <logitless/tensors.def>
    run_plan(plan, b, mirror.workspace(), mirror.stream());
    mirror.download();
    EXPECT_EQ(mirror.workspace_violation(), "") << "workspace";
  }

  struct Named {
    Named(const char* its_name, logitless_dtype dtype, int64_t rows, int64_t columns, Layout layout,
          std::vector<double>* where = nullptr)
        : name(its_name), tensor(dtype, rows, columns, layout), values(where) {}
    const char* name;
    Tensor tensor;
    std::vector<double>* values;  // of an output
  };

  const Tensor& input(const char* name, logitless_dtype dtype, int64_t rows, int64_t columns,
                      const std::vector<double>& values, Layout layout) {
    Tensor& tensor = inputs_.emplace_back(name, dtype, rows, columns, layout).tensor;
    tensor.fill(values);
    tensor.remember();
    return tensor;
  }

  const void* vector_input(const char* name, logitless_dtype dtype, const std::vector<double>& values) {
    if (values.empty()) return nullptr;
    return input(name, dtype, static_cast<int64_t>(values.size()), 1, values, {0, c_.skew}).data();
  }

  Tensor& output(const char* name, logitless_dtype dtype, int64_t rows, int64_t columns,
                 std::vector<double>* values, Layout layout) {
    return outputs_.emplace_back(name, dtype, rows, columns, layout, values).tensor;
  }

  void* vector_output(const char* name, int64_t rows, std::vector<double>* values) {
    return output(name, stats_, rows, 1, values, {0, c_.skew}).data();
  }

  int64_t* count_output(const char* name, int64_t rows, std::vector<double>* values) {
    return static_cast<int64_t*>(output(name, LOGITLESS_I64, rows, 1, values, {0, c_.skew}).data());
  }

  void add_inputs() {
    const int64_t d = p_.hidden;
    const Tensor& hidden =
        input("hidden", as_dtype(p_.dtype.hidden), p_.tokens, d, c_.hidden, c_.hidden_layout);
    b_.hidden = hidden.data();
    b_.hidden_stride = c_.hidden_layout.padding == 0 ? 0 : hidden.stride();
    const Tensor& classifier =
        input("classifier", as_dtype(p_.dtype.classifier), p_.vocab, d,
              slice(c_.classifier, p_.vocab_start * d, p_.vocab * d), c_.classifier_layout);
    b_.classifier = classifier.data();
    b_.classifier_stride = classifier.stride();
    if (p_.has.bias)
      b_.bias = vector_input("bias", as_dtype(p_.dtype.bias), slice(c_.bias, p_.vocab_start, p_.vocab));
    b_.targets = vector_input("targets", as_dtype(p_.dtype.targets), {c_.targets.begin(), c_.targets.end()});
    b_.target_weight = vector_input("target_weight", stats_, c_.target_weight);
#define LOGITLESS_STATS_INPUT(name) \
  if (p_.has.name) b_.name = vector_input(#name, stats_, c_.name)
    LOGITLESS_STATS_INPUT(class_weight);
    LOGITLESS_STATS_INPUT(token_weight);
    LOGITLESS_STATS_INPUT(temperature);
    if (!c_.seed_in_memory.empty()) {
      b_.seed = input("seed", LOGITLESS_I64, 1, 1, {static_cast<double>(c_.seed_in_memory[0])}, {}).data();
    }
    if (p_.pass == LOGITLESS_FORWARD) return;
    b_.grad_loss = vector_input("grad_loss", stats_, c_.grad_loss);
    LOGITLESS_STATS_INPUT(grad_nll);
    LOGITLESS_STATS_INPUT(grad_lse);
    LOGITLESS_STATS_INPUT(grad_entropy);
    LOGITLESS_STATS_INPUT(grad_target_logit);
#undef LOGITLESS_STATS_INPUT
  }

  void add_known(const Outputs& known) {
    b_.lse = const_cast<void*>(vector_input("lse", stats_, known.lse));
    if (!known.lse_low.empty()) {
      b_.lse_low = const_cast<void*>(vector_input("lse_low", stats_, known.lse_low));
    }
    if (p_.has.grad_entropy) b_.entropy = const_cast<void*>(vector_input("entropy", stats_, known.entropy));
  }

  void add_draws(int64_t bytes, const Outputs* known) {
    const auto words = bytes / static_cast<int64_t>(sizeof(int32_t));
    Tensor* draws = nullptr;
    if (p_.pass == LOGITLESS_BACKWARD) {
      EXPECT_EQ(words, static_cast<int64_t>(known->draws.size()));
      draws = &inputs_.emplace_back("draws", LOGITLESS_I32, words, 1, Layout{}).tensor;
      draws->fill(known->draws);
      draws->remember();
    } else {
      draws = &output("draws", LOGITLESS_I32, words, 1, &out_.draws, {});
    }
    b_.draws = draws->data();
  }

  void add_forward_outputs() {
    const int64_t n = p_.tokens;
    if (only_losses_) {
      b_.loss = vector_output("loss", p_.reduction == LOGITLESS_REDUCTION_NONE ? n : 1, &out_.loss);
      b_.lse = vector_output("lse", n, &out_.lse);
      b_.lse_low = vector_output("lse_low", n, &out_.lse_low);
      return;
    }
    b_.max = vector_output("max", n, &out_.max);
    add_row_fields(kRowSums);
    if (p_.has.argmax) b_.argmax = count_output("argmax", n, &out_.argmax);
    b_.valid_count = count_output("valid_count", 1, &out_.valid_count);
    if (p_.top_k > 0) {
      b_.top_ids = count_output("top_ids", n * p_.top_k, &out_.top_ids);
      b_.top_log_probs = vector_output("top_log_probs", n * p_.top_k, &out_.top_log_probs);
    }
    if (p_.targets_per_row > 0) {
      b_.target_log_probs = vector_output("target_log_probs", n * p_.targets_per_row, &out_.target_log_probs);
    }
    if (p_.vocab_total != 0 && p_.vocab != p_.vocab_total && p_.group_size == 0) return;
    b_.loss = vector_output("loss", p_.reduction == LOGITLESS_REDUCTION_NONE ? n : 1, &out_.loss);
    add_row_fields(kRowOutputs);
    b_.lse_low = vector_output("lse_low", n, &out_.lse_low);
    if (!p_.has.argmax || p_.targets_per_row > 0) return;
    b_.correct_count = count_output("correct_count", 1, &out_.correct_count);
    Tensor& is_top1 = output("is_top1", LOGITLESS_I32, words_of_bytes(n), 1, &out_.is_top1, {0, c_.skew});
    b_.is_top1 = static_cast<uint8_t*>(is_top1.data());
  }

  template <size_t kCount>
  void add_row_fields(const RowField (&fields)[kCount]) {
    for (const RowField& each : fields) {
      if (!each.is_wanted(p_)) continue;
      b_.*each.field = vector_output(each.name, p_.tokens, &(out_.*each.values));
    }
  }

  void add_gradients() {
    const int64_t d = p_.hidden;
    if (p_.gradient != LOGITLESS_EXACT && p_.group_size == 0) {
      b_.draw_variance = vector_output("draw_variance", p_.tokens, &out_.draw_variance);
      b_.kept_count = static_cast<int32_t*>(
          output("kept_count", LOGITLESS_I32, p_.tokens, 1, &out_.kept_count, {0, c_.skew}).data());
    }
    if (p_.has.d_hidden) {
      Tensor& t =
          output("d_hidden", as_dtype(p_.dtype.d_hidden), p_.tokens, d, &out_.d_hidden, c_.d_hidden_layout);
      if (p_.accumulate.d_hidden) t.fill(c_.d_hidden_start);
      b_.d_hidden = t.data();
      b_.d_hidden_stride = t.stride();
    }
    if (p_.has.d_classifier) {
      Tensor& t = output("d_classifier", as_dtype(p_.dtype.d_classifier), p_.vocab, d, &out_.d_classifier,
                         c_.d_classifier_layout);
      if (p_.accumulate.d_classifier) t.fill(slice(c_.d_classifier_start, p_.vocab_start * d, p_.vocab * d));
      b_.d_classifier = t.data();
      b_.d_classifier_stride = t.stride();
    }
    if (p_.has.d_bias) {
      Tensor& t = output("d_bias", as_dtype(p_.dtype.d_bias), p_.vocab, 1, &out_.d_bias, {0, c_.skew});
      if (p_.accumulate.d_bias) t.fill(slice(c_.d_bias_start, p_.vocab_start, p_.vocab));
      b_.d_bias = t.data();
    }
  }

  void check_and_read() {
    for (Named& each : inputs_) {
      EXPECT_EQ(each.tensor.violation(), "") << each.name;
      EXPECT_TRUE(each.tensor.unchanged()) << "the input " << each.name << " was written to";
    }
    for (Named& each : outputs_) {
      EXPECT_EQ(each.tensor.violation(), "") << each.name;
      *each.values = each.tensor.values();
    }
    if (b_.is_top1 != nullptr) out_.is_top1 = bytes_of_words(out_.is_top1, p_.tokens);
  }

  const logitless::Problem& p_;
  const logitless::Communicator* group_ = nullptr;
  const Case& c_;
  logitless_dtype stats_;
  const bool only_losses_;
  std::deque<Named> inputs_;  // deque: the tensors never move
  std::deque<Named> outputs_;
  logitless::Buffers b_;
  Outputs out_;
};

// Whether rows of a whole number of 16 bytes do not all begin at a multiple of them.
bool is_unaligned(int32_t dtype, int64_t columns, const Layout& layout) {
  const auto size = static_cast<int64_t>(size_of(as_dtype(dtype)));
  return columns * size % 16 == 0 && (layout.skew * size % 16 != 0 || layout.padding * size % 16 != 0);
}

}  // namespace

logitless::Problem pass_problem(const Case& c, logitless::Pass pass) {
  logitless::Problem p = c.problem;
  p.pass = static_cast<int32_t>(pass);
  p.unaligned_rows = is_unaligned(p.dtype.hidden, p.hidden, c.hidden_layout) ||
                     is_unaligned(p.dtype.classifier, p.hidden, c.classifier_layout) ||
                     (pass != logitless::Pass::forward && p.has.d_hidden != 0 &&
                      is_unaligned(p.dtype.d_hidden, p.hidden, c.d_hidden_layout));
  if (pass == logitless::Pass::forward_backward) p.has.draws = 0;
  if (pass != logitless::Pass::forward || p.has.draws) p.top_k = 0;
  if (pass != logitless::Pass::backward) {
    p.has.grad_nll = p.has.grad_lse = p.has.grad_entropy = p.has.grad_target_logit = 0;
  }
  if (pass == logitless::Pass::forward) {
    p.has.d_hidden = p.has.d_classifier = p.has.d_bias = 0;
    p.accumulate.d_hidden = p.accumulate.d_classifier = p.accumulate.d_bias = 0;
  }
  return p;
}

Outputs run_pass(const logitless::Context& context, const logitless::Problem& problem, const Case& c,
                 const Outputs* known, const logitless::Communicator* group, bool only_losses) {
  return Run(problem, c, only_losses).run(context, known, group);
}

Outputs solve(const logitless::Context& context, const Case& c, size_t max_workspace_bytes) {
  const auto run = [&](logitless::Pass pass, const Outputs* known) {
    logitless::Problem problem = pass_problem(c, pass);
    problem.max_workspace_bytes = max_workspace_bytes;
    return run_pass(context, problem, c, known);
  };
  if (c.mode == Mode::kForwardBackward) return run(logitless::Pass::forward_backward, nullptr);
  Outputs out = run(logitless::Pass::forward, nullptr);
  if (c.mode == Mode::kForward) return out;
  Outputs gradients = run(logitless::Pass::backward, &out);
  out.d_hidden = std::move(gradients.d_hidden);
  out.d_classifier = std::move(gradients.d_classifier);
  out.d_bias = std::move(gradients.d_bias);
  out.kept_count = std::move(gradients.kept_count);
  out.draw_variance = std::move(gradients.draw_variance);
  return out;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

const char* first_difference(const Outputs& a, const Outputs& b) {
  const auto differ = [](std::string_view name, const std::vector<double>& x, const std::vector<double>& y) {
    // These outputs exist in only one of the two ways to the results.
    if (name == "lse_low" || name == "draws" || name == "invalid_targets") return false;
    return !same_bits(x, y);
  };
#define LOGITLESS_TENSOR(name, ...) \
  if (differ(#name, a.name, b.name)) return #name;
#include <logitless/tensors.def>
  return "";
}

}  // namespace logitless_test
