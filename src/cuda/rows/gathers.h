#pragma once
// Products of a sparse matrix with hidden states or the weight, by gathering their rows. The elements are in
// lists of rows or of columns, and a sum has a fixed order. Every launcher only queues.
#include <cstdint>

#include "cuda/rows/rows.h"

namespace logitless::cuda {

class Queue;

// An element in the list of its row. Real: the type of computation, double for float64 operands alone.
template <class Real>
struct alignas(2 * sizeof(Real)) KeptOf {  // one load or store
  int32_t column;
  Real value;
};
using Kept = KeptOf<float>;
// An element in the list of its column.
template <class Real>
struct alignas(2 * sizeof(Real)) KeptRowOf {
  int32_t row;
  Real value;
};
using KeptRow = KeptRowOf<float>;

// Columns with more elements are listed apart, and may be done by all warps of a block.
inline constexpr int64_t kHeavyColumn = 256;

template <class Real>
struct RowListsOf {
  const KeptOf<Real>* elements;
  const int32_t* count;    // [rows]
  int64_t capacity;        // elements from the begin of a row's list to the next
  const int64_t* offsets;  // [rows] begins of lists of any capacity; null: equal ones
  int64_t rows, columns;
};

template <class Real>
struct ColumnListsOf {
  const KeptRowOf<Real>* elements;
  const int32_t* start;  // [columns + 1]
  const int32_t* heavy;  // the number of columns with more than kHeavyColumn elements, and these columns
  const int32_t* role;   // [columns] only those below 0 are gathered; null: all
  int64_t columns;
};

// ---- gather_hidden.cu: d_hidden_i = base_i + sum of value * weight row
template <class Real>
struct GatherHiddenOf {
  RowListsOf<Real> lists;
  int64_t columns;           // of hidden states
  const int32_t* zero_rows;  // [rows] rows of kIgnoredRow become 0; null: none
  ConstMatrix weight;
  DType operand_dtype;  // fp32 rows are rounded to it
  ConstMatrix base;     // to add to, of the dtype of `to` or float32; without data: nothing
  Matrix to;
  Smoothing smoothing;  // not in double
};
template <class Real>
void launch_gather_hidden(const GatherHiddenOf<Real>& g, const Queue& queue);

// ---- gather_weight.cu: d_weight_j (+)= sum of value * hidden row
template <class Real>
struct GatherWeightOf {
  ColumnListsOf<Real> lists;
  int64_t columns;  // of hidden states
  ConstMatrix hidden;
  DType operand_dtype;  // fp32 rows are rounded to it
  int64_t padded;       // zeros from `columns` up to padded
  int64_t rows;         // of hidden
  Matrix to;
  bool accumulate;
  Smoothing smoothing;  // row: a column of the vocabulary; not in double
};
template <class Real>
void launch_gather_weight(const GatherWeightOf<Real>& g, const Queue& queue);

}  // namespace logitless::cuda
