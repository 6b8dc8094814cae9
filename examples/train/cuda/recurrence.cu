#include "train/cuda/launch.cuh"
#include "train/cuda/layers.h"

namespace logitless::train::cuda {
namespace {

__device__ float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}

// Where a channel of one row lies in `projected`.
struct Gates {
  float value, input, forget, output;
};
__device__ Gates load(const float* projected, int64_t inner) {
  return {projected[kValue * inner], projected[kInputGate * inner], projected[kForgetGate * inner],
          projected[kOutputGate * inner]};
}

// A thread a channel of a sequence. What a token needs is read before the token before it is done with.
__global__ void recurrence_forward_kernel(RecurrenceShape shape, float* projected, float* state,
                                          float* output) {
  const int64_t inner = shape.inner, width = kProjectedGroups * inner;
  for (int64_t i = first_element(); i < shape.batch * inner; i += stride_of_elements()) {
    const int64_t first_row = i / inner * shape.length, channel = i % inner;
    float* in = projected + first_row * width + channel;
    int64_t at = first_row * inner + channel;
    float h = 0.0F;
    Gates next = load(in, inner);
    for (int64_t t = 0; t < shape.length; ++t, in += width, at += inner) {
      const Gates gates = next;
      if (t + 1 < shape.length) next = load(in + width, inner);
      const float input = sigmoid(gates.input), keep = sigmoid(gates.forget);
      h = keep * h + (1.0F - keep) * input * gates.value;
      in[kInputGate * inner] = input;
      in[kForgetGate * inner] = keep;
      state[at] = h;
      output[at] = h * gates.output * sigmoid(gates.output);
    }
  }
}

// The same from the last token to the first. Of `projected` the input and forget gates are gates, no logits.
__global__ void recurrence_backward_kernel(RecurrenceShape shape, const float* projected, const float* state,
                                           const float* d_output, float* d_projected) {
  const int64_t inner = shape.inner, width = kProjectedGroups * inner;
  for (int64_t i = first_element(); i < shape.batch * inner; i += stride_of_elements()) {
    const int64_t last_row = (i / inner + 1) * shape.length - 1, channel = i % inner;
    const float* in = projected + last_row * width + channel;
    float* d_in = d_projected + last_row * width + channel;
    int64_t at = last_row * inner + channel;
    float carried = 0.0F;  // d loss / d h_t through h_(t+1)
    float h = state[at];
    for (int64_t t = shape.length - 1; t >= 0; --t, in -= width, d_in -= width, at -= inner) {
      const Gates gates = load(in, inner);
      const float before = t > 0 ? state[at - inner] : 0.0F;
      const float d_y = d_output[at];
      const float keep = gates.forget, open = sigmoid(gates.output);
      const float d_h = carried + d_y * gates.output * open;
      d_in[kOutputGate * inner] = d_y * h * open * (1.0F + gates.output * (1.0F - open));
      d_in[kForgetGate * inner] = d_h * (before - gates.input * gates.value) * keep * (1.0F - keep);
      d_in[kValue * inner] = d_h * (1.0F - keep) * gates.input;
      d_in[kInputGate * inner] = d_h * (1.0F - keep) * gates.value * gates.input * (1.0F - gates.input);
      carried = d_h * keep;
      h = before;
    }
  }
}

}  // namespace

void recurrence_forward(const RecurrenceShape& shape, float* projected, float* state, float* output,
                        cudaStream_t stream) {
  launch("recurrence_forward", recurrence_forward_kernel, blocks_for(shape.batch * shape.inner), stream,
         shape, projected, state, output);
}

void recurrence_backward(const RecurrenceShape& shape, const float* projected, const float* state,
                         const float* d_output, float* d_projected, cudaStream_t stream) {
  launch("recurrence_backward", recurrence_backward_kernel, blocks_for(shape.batch * shape.inner), stream,
         shape, projected, state, d_output, d_projected);
}

}  // namespace logitless::train::cuda
