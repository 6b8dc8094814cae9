#include "train/model.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "train/gemm.h"
#include "train/recurrence.h"
#include "train/rms_norm.h"

namespace logitless::train {
namespace {

// sums [columns] = column sums of m [rows, columns]; a block of columns belongs to one thread.
void column_sums(int64_t rows, int64_t columns, const float* m, float* sums) {
  constexpr int64_t kBlock = 128;
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t stop = std::min(columns, first + kBlock);
    std::fill(sums + first, sums + stop, 0.0F);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = first; c < stop; ++c) sums[c] += m[row * columns + c];
    }
  }
}

}  // namespace

Model::Model(const ModelConfig& config, uint64_t seed)
    : config_(config),
      parameters_(initial_parameters(config, seed)),
      activations_(static_cast<size_t>(config.layers)) {}

void Model::resize(int64_t batch, int64_t length) {
  batch_ = batch;
  length_ = length;
  const auto rows = static_cast<size_t>(batch * length);
  const auto dim = static_cast<size_t>(config_.dim);
  const auto inner = static_cast<size_t>(config_.inner);
  for (LayerActivations& layer : activations_) {
    layer.in.resize(rows * dim);
    layer.inverse_rms.resize(rows);
    layer.normed.resize(rows * dim);
    layer.projected.resize(rows * kProjectedGroups * inner);
    layer.state.resize(rows * inner);
    layer.output.resize(rows * inner);
  }
  last_.resize(rows * dim);
  last_inverse_rms_.resize(rows);
  hidden_.resize(rows * dim);
  d_residual_.resize(rows * dim);
  d_normed_.resize(rows * dim);
  d_output_.resize(rows * inner);
  d_projected_.resize(rows * kProjectedGroups * inner);
}

std::span<const float> Model::forward(std::span<const int32_t> tokens, int64_t batch, int64_t length) {
  const int64_t rows = batch * length;
  const int64_t dim = config_.dim;
  tokens_.assign(tokens.begin(), tokens.end());
  check_tokens(config_, tokens_, rows);
  resize(batch, length);
  std::vector<float>& first = activations_.empty() ? last_ : activations_.front().in;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = embedding().value.data() + tokens_[static_cast<size_t>(row)] * dim;
    std::copy(from, from + dim, first.data() + row * dim);
  }
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const bool is_last = layer + 1 == config_.layers;
    layer_forward(layer, is_last ? last_ : activations_[static_cast<size_t>(layer + 1)].in);
  }
  rms_norm(rows, dim, last_.data(), final_norm().value.data(), hidden_.data(), last_inverse_rms_.data());
  return hidden_;
}

void Model::layer_forward(int64_t layer, std::vector<float>& out) {
  LayerActivations& act = activations_[static_cast<size_t>(layer)];
  const int64_t rows = batch_ * length_;
  const auto [vocab, dim, inner, layers] = config_;
  const int64_t width = kProjectedGroups * inner;
  rms_norm(rows, dim, act.in.data(), of_layer(layer, kNormGain).value.data(), act.normed.data(),
           act.inverse_rms.data());
  const std::vector<float>& bias = of_layer(layer, kInBias).value;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    std::copy(bias.begin(), bias.end(), act.projected.data() + row * width);
  }
  gemm(Op::kNone, Op::kTranspose, rows, width, dim, act.normed.data(), dim,
       of_layer(layer, kInProjection).value.data(), dim, 1.0F, act.projected.data(), width);
  recurrence_forward({batch_, length_, inner}, act.projected.data(), act.state.data(), act.output.data());
  std::copy(act.in.begin(), act.in.end(), out.begin());
  gemm(Op::kNone, Op::kTranspose, rows, dim, inner, act.output.data(), inner,
       of_layer(layer, kOutProjection).value.data(), inner, 1.0F, out.data(), dim);
}

void Model::backward(std::span<const float> d_hidden) {
  const int64_t rows = batch_ * length_;
  const int64_t dim = config_.dim;
  if (static_cast<int64_t>(d_hidden.size()) != rows * dim) {
    throw std::invalid_argument("d_hidden: expected " + std::to_string(rows * dim) + " values, got " +
                                std::to_string(d_hidden.size()));
  }
  std::fill(d_residual_.begin(), d_residual_.end(), 0.0F);
  rms_norm_backward(rows, dim, last_.data(), final_norm().value.data(), last_inverse_rms_.data(),
                    d_hidden.data(), d_residual_.data(), final_norm().gradient.data());
  for (int64_t layer = config_.layers - 1; layer >= 0; --layer) layer_backward(layer, d_residual_);
  std::vector<float>& d_embedding = embedding().gradient;
  std::fill(d_embedding.begin(), d_embedding.end(), 0.0F);
  for (int64_t row = 0; row < rows; ++row) {
    float* into = d_embedding.data() + tokens_[static_cast<size_t>(row)] * dim;
    const float* from = d_residual_.data() + row * dim;
    for (int64_t d = 0; d < dim; ++d) into[d] += from[d];
  }
}

void Model::layer_backward(int64_t layer, std::vector<float>& d_residual) {
  LayerActivations& act = activations_[static_cast<size_t>(layer)];
  const int64_t rows = batch_ * length_;
  const auto [vocab, dim, inner, layers] = config_;
  const int64_t width = kProjectedGroups * inner;
  Parameter& in_projection = of_layer(layer, kInProjection);
  Parameter& out_projection = of_layer(layer, kOutProjection);
  Parameter& gain = of_layer(layer, kNormGain);

  gemm(Op::kTranspose, Op::kNone, dim, inner, rows, d_residual.data(), dim, act.output.data(), inner, 0.0F,
       out_projection.gradient.data(), inner);
  gemm(Op::kNone, Op::kNone, rows, inner, dim, d_residual.data(), dim, out_projection.value.data(), inner,
       0.0F, d_output_.data(), inner);
  recurrence_backward({batch_, length_, inner}, act.projected.data(), act.state.data(), d_output_.data(),
                      d_projected_.data());
  gemm(Op::kTranspose, Op::kNone, width, dim, rows, d_projected_.data(), width, act.normed.data(), dim, 0.0F,
       in_projection.gradient.data(), dim);
  column_sums(rows, width, d_projected_.data(), of_layer(layer, kInBias).gradient.data());
  gemm(Op::kNone, Op::kNone, rows, dim, width, d_projected_.data(), width, in_projection.value.data(), dim,
       0.0F, d_normed_.data(), dim);
  rms_norm_backward(rows, dim, act.in.data(), gain.value.data(), act.inverse_rms.data(), d_normed_.data(),
                    d_residual.data(), gain.gradient.data());
}

}  // namespace logitless::train
