#pragma once

#include <cstdint>

namespace logitless::train {

// A gated linear recurrence over `batch` sequences of `length` tokens, `inner` channels each on its own:
//
//   a_t = sigmoid(forget_t),  i_t = sigmoid(input_t)
//   h_t = a_t * h_(t-1) + (1 - a_t) * i_t * value_t,  h_(-1) = 0
//   y_t = h_t * silu(output_t)
struct RecurrenceShape {
  int64_t batch;
  int64_t length;
  int64_t inner;  // H
};

// The four columns groups of `projected` [batch * length, 4H], in this order.
enum ProjectedGroup { kValue, kInputGate, kForgetGate, kOutputGate, kProjectedGroups };

// Reads `projected` and writes `state` h and `output` y, both [batch * length, H]. The logits of the input
// and forget gates are replaced by the gates, which the backward needs.
void recurrence_forward(const RecurrenceShape& shape, float* projected, float* state, float* output);

// `projected` and `state` as the forward left them. Writes `d_projected` [batch * length, 4H], the gradient
// with respect to the logits that the forward was given.
void recurrence_backward(const RecurrenceShape& shape, const float* projected, const float* state,
                         const float* d_output, float* d_projected);

}  // namespace logitless::train
