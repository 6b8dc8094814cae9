#include "train/cuda/model.h"

#include <algorithm>
#include <numeric>

#include "train/cuda/layers.h"

namespace logitless::train::cuda {

DeviceModel::DeviceModel(Session& session, const TrainerConfig& config, const std::vector<Parameter>& initial)
    : session_(session),
      config_(config.model),
      shape_{config.batch.batch, config.batch.length, config.model.inner},
      rows_(config.batch.tokens()) {
  for (const Parameter& parameter : initial) {
    DeviceParameter& made = parameters_.emplace_back();
    made.value = session.allocate<float>(parameter.size());
    made.gradient = session.allocate<float>(parameter.size());
    session.upload(made.value, parameter.value);
    session.clear(made.gradient.data(), made.gradient.count());
  }
  const int64_t wide = rows_ * config_.dim, inner = rows_ * config_.inner;
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    activations_.push_back({session.allocate<float>(wide), session.allocate<float>(rows_),
                            session.allocate<float>(wide), session.allocate<float>(kProjectedGroups * inner),
                            session.allocate<float>(inner), session.allocate<float>(inner)});
  }
  for (Memory<int32_t>* list : {&tokens_, &token_ids_, &token_places_})
    *list = session.allocate<int32_t>(rows_);
  token_starts_ = session.allocate<int32_t>(rows_ + 1);
  for (Memory<float>* matrix : {&last_, &hidden_, &d_residual_, &d_normed_}) {
    *matrix = session.allocate<float>(wide);
  }
  last_inverse_rms_ = session.allocate<float>(rows_);
  d_output_ = session.allocate<float>(inner);
  d_projected_ = session.allocate<float>(kProjectedGroups * inner);
}

void DeviceModel::group_by_token(const std::vector<int32_t>& tokens) {
  std::vector<int32_t> places(tokens.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(), [&](int32_t a, int32_t b) {
    return tokens[static_cast<size_t>(a)] < tokens[static_cast<size_t>(b)];
  });
  std::vector<int32_t> ids, starts;
  for (size_t k = 0; k < places.size(); ++k) {
    const int32_t token = tokens[static_cast<size_t>(places[k])];
    if (!ids.empty() && ids.back() == token) continue;
    ids.push_back(token);
    starts.push_back(static_cast<int32_t>(k));
  }
  starts.push_back(static_cast<int32_t>(places.size()));
  different_tokens_ = static_cast<int64_t>(ids.size());
  session_.upload(token_ids_, ids);
  session_.upload(token_starts_, starts);
  session_.upload(token_places_, places);
}

void DeviceModel::forward(const std::vector<int32_t>& tokens) {
  check_tokens(config_, tokens, rows_);
  session_.upload(tokens_, tokens);
  group_by_token(tokens);
  const cudaStream_t stream = session_.stream();
  const int64_t dim = config_.dim;
  embed(rows_, dim, tokens_.data(), parameters_[kEmbedding].value.data(), activations_.front().in.data(),
        stream);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const bool is_last = layer + 1 == config_.layers;
    layer_forward(layer, is_last ? last_.data() : activations_[static_cast<size_t>(layer + 1)].in.data());
  }
  rms_norm(rows_, dim, last_.data(), final_norm().value.data(), hidden_.data(), last_inverse_rms_.data(),
           stream);
}

void DeviceModel::layer_forward(int64_t layer, float* out) {
  const LayerActivations& act = activations_[static_cast<size_t>(layer)];
  const cudaStream_t stream = session_.stream();
  const int64_t dim = config_.dim, inner = config_.inner, width = kProjectedGroups * inner;
  rms_norm(rows_, dim, act.in.data(), of_layer(layer, kNormGain).value.data(), act.normed.data(),
           act.inverse_rms.data(), stream);
  fill_rows(rows_, width, of_layer(layer, kInBias).value.data(), act.projected.data(), stream);
  session_.gemm(Op::kNone, Op::kTranspose, rows_, width, dim, act.normed.data(), dim,
                of_layer(layer, kInProjection).value.data(), dim, 1.0F, act.projected.data(), width);
  recurrence_forward(shape_, act.projected.data(), act.state.data(), act.output.data(), stream);
  session_.copy_on_device(out, act.in.data(), rows_ * dim);
  session_.gemm(Op::kNone, Op::kTranspose, rows_, dim, inner, act.output.data(), inner,
                of_layer(layer, kOutProjection).value.data(), inner, 1.0F, out, dim);
}

void DeviceModel::backward(const float* d_hidden) {
  const cudaStream_t stream = session_.stream();
  const int64_t dim = config_.dim;
  session_.clear(d_residual_.data(), d_residual_.count());
  rms_norm_backward(rows_, dim, last_.data(), final_norm().value.data(), last_inverse_rms_.data(), d_hidden,
                    d_residual_.data(), d_normed_.data(), stream);
  column_sums(rows_, dim, d_normed_.data(), final_norm().gradient.data(), stream);
  for (int64_t layer = config_.layers - 1; layer >= 0; --layer) layer_backward(layer);
  const Memory<float>& d_embedding = parameters_[kEmbedding].gradient;
  session_.clear(d_embedding.data(), d_embedding.count());
  embed_backward({different_tokens_, token_ids_.data(), token_starts_.data(), token_places_.data()}, dim,
                 d_residual_.data(), d_embedding.data(), stream);
}

void DeviceModel::layer_backward(int64_t layer) {
  const LayerActivations& act = activations_[static_cast<size_t>(layer)];
  const cudaStream_t stream = session_.stream();
  const int64_t dim = config_.dim, inner = config_.inner, width = kProjectedGroups * inner;
  const DeviceParameter& in_projection = of_layer(layer, kInProjection);
  const DeviceParameter& out_projection = of_layer(layer, kOutProjection);
  const DeviceParameter& gain = of_layer(layer, kNormGain);

  session_.gemm(Op::kTranspose, Op::kNone, dim, inner, rows_, d_residual_.data(), dim, act.output.data(),
                inner, 0.0F, out_projection.gradient.data(), inner);
  session_.gemm(Op::kNone, Op::kNone, rows_, inner, dim, d_residual_.data(), dim, out_projection.value.data(),
                inner, 0.0F, d_output_.data(), inner);
  recurrence_backward(shape_, act.projected.data(), act.state.data(), d_output_.data(), d_projected_.data(),
                      stream);
  session_.gemm(Op::kTranspose, Op::kNone, width, dim, rows_, d_projected_.data(), width, act.normed.data(),
                dim, 0.0F, in_projection.gradient.data(), dim);
  column_sums(rows_, width, d_projected_.data(), of_layer(layer, kInBias).gradient.data(), stream);
  session_.gemm(Op::kNone, Op::kNone, rows_, dim, width, d_projected_.data(), width,
                in_projection.value.data(), dim, 0.0F, d_normed_.data(), dim);
  rms_norm_backward(rows_, dim, act.in.data(), gain.value.data(), act.inverse_rms.data(), d_normed_.data(),
                    d_residual_.data(), d_normed_.data(), stream);
  column_sums(rows_, dim, d_normed_.data(), gain.gradient.data(), stream);
}

}  // namespace logitless::train::cuda
