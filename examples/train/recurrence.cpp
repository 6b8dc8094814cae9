#include "train/recurrence.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace logitless::train {
namespace {

// Channels scanned together: their carried state stays in registers or the first cache.
constexpr int64_t kChannels = 64;

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

}  // namespace

void recurrence_forward(const RecurrenceShape& shape, float* projected, float* state, float* output) {
  const int64_t inner = shape.inner;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t sequence = 0; sequence < shape.batch; ++sequence) {
    for (int64_t first = 0; first < inner; first += kChannels) {
      const int64_t width = std::min(kChannels, inner - first);
      std::array<float, kChannels> carried{};
      for (int64_t t = 0; t < shape.length; ++t) {
        const int64_t row = sequence * shape.length + t;
        float* in = projected + row * kProjectedGroups * inner + first;
        for (int64_t c = 0; c < width; ++c) {
          const float input = sigmoid(in[kInputGate * inner + c]);
          const float keep = sigmoid(in[kForgetGate * inner + c]);
          const float gate = in[kOutputGate * inner + c];
          float& h = carried[static_cast<size_t>(c)];
          h = keep * h + (1.0F - keep) * input * in[kValue * inner + c];
          in[kInputGate * inner + c] = input;
          in[kForgetGate * inner + c] = keep;
          state[row * inner + first + c] = h;
          output[row * inner + first + c] = h * gate * sigmoid(gate);
        }
      }
    }
  }
}

void recurrence_backward(const RecurrenceShape& shape, const float* projected, const float* state,
                         const float* d_output, float* d_projected) {
  const int64_t inner = shape.inner;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t sequence = 0; sequence < shape.batch; ++sequence) {
    for (int64_t first = 0; first < inner; first += kChannels) {
      const int64_t width = std::min(kChannels, inner - first);
      std::array<float, kChannels> carried{};  // d loss / d h_t through h_(t+1)
      for (int64_t t = shape.length - 1; t >= 0; --t) {
        const int64_t row = sequence * shape.length + t;
        const float* in = projected + row * kProjectedGroups * inner + first;
        float* d_in = d_projected + row * kProjectedGroups * inner + first;
        const float* h = state + row * inner + first;
        const float* d_y = d_output + row * inner + first;
        for (int64_t c = 0; c < width; ++c) {
          const float value = in[kValue * inner + c];
          const float input = in[kInputGate * inner + c];
          const float keep = in[kForgetGate * inner + c];
          const float gate = in[kOutputGate * inner + c];
          const float before = t > 0 ? h[c - inner] : 0.0F;
          const float open = sigmoid(gate);
          const float d_h = carried[static_cast<size_t>(c)] + d_y[c] * gate * open;
          d_in[kOutputGate * inner + c] = d_y[c] * h[c] * open * (1.0F + gate * (1.0F - open));
          d_in[kForgetGate * inner + c] = d_h * (before - input * value) * keep * (1.0F - keep);
          d_in[kValue * inner + c] = d_h * (1.0F - keep) * input;
          d_in[kInputGate * inner + c] = d_h * (1.0F - keep) * value * input * (1.0F - input);
          carried[static_cast<size_t>(c)] = d_h * keep;
        }
      }
    }
  }
}

}  // namespace logitless::train
