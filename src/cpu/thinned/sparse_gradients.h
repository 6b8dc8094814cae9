#pragma once
#include "core/host_loss.h"
#include "cpu/run/runner.h"

namespace logitless::cpu {

// row_gradients.cpp: the kept elements' gradients of the chunk's rows, their d_hidden and what they were made
// of.
void finish_rows(const Runner& run, const HostLoss& loss, const Chunk& chunk);

// column_gradients.cpp: d_classifier and d_bias, from the elements of all rows.
void finish_columns(const Runner& run);

// smoothing_sums.cpp: label smoothing's part of the gradients, c_i w_j for every i and j, is added exactly:
// as the rank one matrix that it is.
void sum_classifier(const Runner& run);  // sum_j w_j C_j, before the rows
void sum_hidden(const Runner& run);      // sum_i c_i E_i, after them

// w_j
float class_weight(const Runner& run, int64_t column);
MatrixView hidden_matrix(const Runner& run);
MatrixView classifier_matrix(const Runner& run);
// sums += value * row, one fp32 row.
void add_row(const Runner& run, std::span<const float> row, float value, std::span<float> sums);

}  // namespace logitless::cpu
