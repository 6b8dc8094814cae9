#pragma once
// Logits at lists of columns (logitless/candidates.h): a backend's inputs, and what all backends need of
// them.
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "core/dtype.h"
#include "core/host_device.h"
#include "core/logit_transform.h"
#include "core/workspace.h"

namespace logitless {

// Numbered as logitless_candidates_stage in the C header.
enum class CandidatesStage : int { kLogits = 0, kGradient = 1 };

// The lists of all rows as one array of elements. Nothing is trusted: on a device they are as the caller left
// them.
struct CandidateLists {
  const void* ids = nullptr;
  bool wide = false;                 // int64, not int32
  const int64_t* offsets = nullptr;  // [rows + 1], null: per_row elements each
  int64_t rows = 0, per_row = 0, elements = 0, vocab = 0;
  int64_t ignore_id = -1;

  LOGITLESS_HD int64_t id(int64_t e) const {
    return wide ? static_cast<const int64_t*>(ids)[e] : int64_t{static_cast<const int32_t*>(ids)[e]};
  }
  LOGITLESS_HD bool is_valid(int64_t id) const { return id == ignore_id || (id >= 0 && id < vocab); }

  // The first element of a row in [0, rows], always within [0, elements].
  LOGITLESS_HD int64_t begin(int64_t row) const {
    const int64_t first = offsets == nullptr ? row * per_row : offsets[row];
    return first < 0 ? 0 : first < elements ? first : elements;
  }
  // The row of an element, always within [0, rows). Rows without elements have none.
  LOGITLESS_HD int64_t row_of(int64_t e) const {
    if (offsets == nullptr) return e / per_row;
    int64_t low = 0, high = rows - 1;  // the last row that begins at e or before
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (offsets[middle] <= e) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// logitless_candidates with its strides filled in and one temperature divided out of the other factors.
struct Candidates {
  CandidatesStage stage = CandidatesStage::kLogits;
  DType hidden_dtype = DType::kF32, weight_dtype = DType::kF32, bias_dtype = DType::kF32;
  DType compute_dtype = DType::kF32;
  DType d_hidden_dtype = DType::kF32, d_weight_dtype = DType::kF32, d_bias_dtype = DType::kF32;
  int64_t hidden_size = 0;
  CandidateLists lists;
  LogitFactors factors;
  double product_scale = 1;  // scale before the temperature: the factor from u to gradients of dot products
  const void* hidden = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  const void* row_temperature = nullptr;
  int64_t hidden_stride = 0, weight_stride = 0, d_hidden_stride = 0, d_weight_stride = 0;
  void* logits = nullptr;
  int64_t* invalid_ids = nullptr;
  const void* grad = nullptr;
  void* d_hidden = nullptr;
  void* d_weight = nullptr;
  void* d_bias = nullptr;
  bool accumulate_d_weight = false;
  uint64_t max_workspace_bytes = 0;  // 0: no limit

  DType stats_dtype() const { return hidden_dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  // The dtype to which elements of an operand are rounded before they are multiplied; float32: as they are.
  DType rounds_to(DType operand) const { return operand == DType::kF32 ? compute_dtype : DType::kF32; }
  // Whether gradients of hidden states and weight have anything to add up.
  bool has_products() const { return lists.elements > 0 && factors.scale != 0; }
  bool needs_columns() const { return d_weight != nullptr || d_bias != nullptr; }
};

// Checks all but the ids and offsets, and fills in strides and factors. For sizes alone no pointer to data is
// needed. Throws Error.
Candidates validated(Candidates candidates, double temperature, bool sizes_only);

// Checks ids and offsets in host memory. Throws Error.
void check_lists(const CandidateLists& lists);

// The numbers of one element on the host, in double.
struct CandidateElement {
  int64_t row = 0, column = -1;  // column -1: no element
};
CandidateElement element_at(const Candidates& candidates, int64_t e);
// z of an element from its dot product.
double candidate_logit(const Candidates& candidates, const CandidateElement& element, double dot);
// u of an element: the gradient before the scale. 0 for no element.
double candidate_gradient(const Candidates& candidates, const CandidateElement& element, int64_t e);

// The elements of each column in their order, on the host: order[start[j]] to order[start[j + 1]].
struct ColumnOrder {
  std::span<int64_t> start;  // [V + 1]
  std::span<int64_t> order;  // [E]

  std::span<const int64_t> of(int64_t column) const {
    const auto first = static_cast<size_t>(start[static_cast<size_t>(column)]);
    return order.subspan(first, static_cast<size_t>(start[static_cast<size_t>(column) + 1]) - first);
  }
};
ColumnOrder take_column_order(const Candidates& candidates, Workspace* workspace);
void sort_by_column(const Candidates& candidates, const ColumnOrder& to);

}  // namespace logitless
