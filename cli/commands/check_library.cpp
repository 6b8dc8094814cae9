#include "commands/check_library.h"

#include <algorithm>
#include <cstring>

#include "commands/loss_options.h"
#include "io/real_element.h"

namespace logitless::cli {
namespace {

std::vector<std::byte> encode(const std::vector<double>& values, logitless_dtype dtype) {
  const auto size = static_cast<size_t>(dtype_bytes(dtype));
  std::vector<std::byte> out(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto narrow = static_cast<float>(values[i]);
    const uint16_t half = dtype == LOGITLESS_BF16 ? float_to_bf16(narrow) : float_to_f16(narrow);
    const void* from = size == 8   ? static_cast<const void*>(&values[i])
                       : size == 4 ? static_cast<const void*>(&narrow)
                                   : &half;
    std::memcpy(&out[i * size], from, size);
  }
  return out;
}

std::vector<double> decode(const std::vector<std::byte>& bytes, logitless_dtype dtype) {
  TensorView view;
  view.dtype = element_from_dtype(dtype);
  view.data = bytes;
  std::vector<double> out(bytes.size() / static_cast<size_t>(dtype_bytes(dtype)));
  for (size_t i = 0; i < out.size(); ++i) out[i] = real_element(view, static_cast<int64_t>(i));
  return out;
}

std::vector<std::byte> space(int64_t count, logitless_dtype dtype) {
  // Never computed bytes would show as NaN.
  return std::vector<std::byte>(static_cast<size_t>(count * dtype_bytes(dtype)), std::byte{0xff});
}

}  // namespace

CheckRunner::CheckRunner(const CheckCase& c, const CheckData& data, bool float64)
    : case_(c),
      hidden_dtype_(float64 ? LOGITLESS_F64 : c.hidden_dtype),
      classifier_dtype_(float64 ? LOGITLESS_F64 : c.classifier_dtype),
      stats_dtype_(float64 ? LOGITLESS_F64 : LOGITLESS_F32),
      hidden_(encode(data.hidden, hidden_dtype_)),
      classifier_(encode(data.classifier, classifier_dtype_)),
      bias_(encode(data.bias, classifier_dtype_)),
      class_weight_(encode(data.class_weight, stats_dtype_)),
      token_weight_(encode(data.token_weight, stats_dtype_)),
      temperature_(encode(data.temperature, stats_dtype_)),
      targets_(data.targets) {}

Problem CheckRunner::make_problem(size_t budget) const {
  const CheckCase& c = case_;
  Problem problem;
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.reduction = c.sum ? LOGITLESS_REDUCTION_SUM : LOGITLESS_REDUCTION_MEAN;
  problem.tokens = c.tokens;
  problem.vocab = c.vocab;
  problem.hidden = c.dim;
  problem.hidden_dtype = problem.d_hidden_dtype = hidden_dtype_;
  problem.classifier_dtype = problem.d_classifier_dtype = classifier_dtype_;
  problem.bias_dtype = problem.d_bias_dtype = classifier_dtype_;
  problem.has_bias = c.bias;
  problem.has_class_weight = c.class_weight;
  problem.has_token_weight = c.token_weight;
  problem.has_temperature = c.token_temperature;
  problem.scale = c.scale;
  problem.softcap = c.softcap;
  problem.temperature = c.temperature;
  problem.label_smoothing = c.label_smoothing;
  problem.z_loss = c.z_loss;
  problem.num_items = c.num_items;
  problem.ignore_index = kCheckIgnoreIndex;
  problem.shift = c.shift;
  problem.sequence_length = c.sequence_length;
  problem.want_entropy = problem.want_argmax = 1;
  problem.want_d_hidden = c.grad_hidden;
  problem.want_d_classifier = c.grad_classifier;
  problem.want_d_bias = c.bias && c.grad_classifier;
  problem.max_workspace_bytes = budget;
  return problem;
}

std::vector<size_t> CheckRunner::workspaces(const Context& context) const {
  std::vector<size_t> sizes;
  for (const size_t budget : {size_t{0}, size_t{1}}) {
    for (const PlanInfo& plan : context.plans(make_problem(budget))) sizes.push_back(plan.workspace_bytes);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

CheckOutputs CheckRunner::run(Runner& runner, size_t budget) const {
  const CheckCase& c = case_;
  CheckOutputs out;
  Buffers buffers;
  buffers.hidden = hidden_.data();
  buffers.classifier = classifier_.data();
  buffers.bias = c.bias ? bias_.data() : nullptr;
  buffers.class_weight = c.class_weight ? class_weight_.data() : nullptr;
  buffers.token_weight = c.token_weight ? token_weight_.data() : nullptr;
  buffers.temperature = c.token_temperature ? temperature_.data() : nullptr;
  buffers.targets = targets_.data();
  std::vector<std::byte> loss = space(1, stats_dtype_);
  std::vector<std::byte> nll = space(c.tokens, stats_dtype_), lse = nll, entropy = nll, row_loss = nll;
  std::vector<std::byte> d_hidden = space(c.grad_hidden ? c.tokens * c.dim : 0, hidden_dtype_);
  std::vector<std::byte> d_classifier = space(c.grad_classifier ? c.vocab * c.dim : 0, classifier_dtype_);
  std::vector<std::byte> d_bias = space(c.bias && c.grad_classifier ? c.vocab : 0, classifier_dtype_);
  out.argmax.resize(static_cast<size_t>(c.tokens));
  buffers.loss = loss.data();
  buffers.nll = nll.data();
  buffers.lse = lse.data();
  buffers.entropy = entropy.data();
  buffers.argmax = out.argmax.data();
  buffers.d_hidden = d_hidden.empty() ? nullptr : d_hidden.data();
  buffers.d_classifier = d_classifier.empty() ? nullptr : d_classifier.data();
  buffers.d_bias = d_bias.empty() ? nullptr : d_bias.data();
  runner.run(make_problem(budget), buffers);

  // The losses of the rows come from a forward pass without a reduction.
  Problem forward = make_problem(budget);
  forward.pass = LOGITLESS_FORWARD;
  forward.reduction = LOGITLESS_REDUCTION_NONE;
  forward.num_items = 0;
  forward.want_entropy = forward.want_argmax = 0;
  forward.want_d_hidden = forward.want_d_classifier = forward.want_d_bias = 0;
  forward.max_workspace_bytes = 0;
  Buffers rows = buffers;
  rows.loss = row_loss.data();
  rows.nll = rows.lse = rows.entropy = nullptr;
  rows.argmax = nullptr;
  rows.d_hidden = rows.d_classifier = rows.d_bias = nullptr;
  runner.run(forward, rows);

  out.loss = decode(loss, stats_dtype_).front();
  out.row_loss = decode(row_loss, stats_dtype_);
  out.nll = decode(nll, stats_dtype_);
  out.lse = decode(lse, stats_dtype_);
  out.entropy = decode(entropy, stats_dtype_);
  out.d_hidden = decode(d_hidden, hidden_dtype_);
  out.d_classifier = decode(d_classifier, classifier_dtype_);
  out.d_bias = decode(d_bias, classifier_dtype_);
  return out;
}

}  // namespace logitless::cli
