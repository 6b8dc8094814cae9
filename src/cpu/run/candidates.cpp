// Logits at lists of columns and their gradients: dot products and sums of gathered rows, without any block
// of logits.
#include "core/candidates.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/status.h"
#include "cpu/backend.h"
#include "cpu/simd/kernels.h"

namespace logitless::cpu {
namespace {

constexpr int64_t kElementsAtOnce = 64;  // elements of a task, and of one call of a kernel
constexpr int64_t kRowsAtOnce = 8, kColumnsAtOnce = 64;

const Kernels& candidate_kernels(const BackendOptions& options) {
  const Kernels& kernels = select_kernels(Problem{}, options.engine);
  if (kernels.dot_rows == nullptr) throw Error(Status::kUnsupported, "this build has no kernels");
  return kernels;
}

MatrixView operand_view(const Candidates& c, const void* data, DType dtype, int64_t stride) {
  return {data, dtype, stride, c.rounds_to(dtype)};
}

MatrixView at_row(MatrixView view, int64_t row) {
  view.data = static_cast<const std::byte*>(view.data) +
              row * view.stride * static_cast<int64_t>(size_of(view.dtype));
  return view;
}

std::byte* row_of(void* data, DType dtype, int64_t stride, int64_t row) {
  return static_cast<std::byte*>(data) + row * stride * static_cast<int64_t>(size_of(dtype));
}

// Runs body(first, end) for parts of [0, count).
template <class F>
void in_parts(const BackendOptions& options, int64_t count, int64_t part, const F& body) {
  options.parallel_for((count + part - 1) / part, [&](int64_t task, int worker) {
    body(task * part, std::min(count, (task + 1) * part), worker);
  });
}

void write_logits(const Candidates& c, const BackendOptions& options) {
  const Kernels& kernels = candidate_kernels(options);
  const MatrixView hidden = operand_view(c, c.hidden, c.hidden_dtype, c.hidden_stride);
  const MatrixView weight = operand_view(c, c.weight, c.weight_dtype, c.weight_stride);
  in_parts(options, c.lists.elements, kElementsAtOnce, [&](int64_t first, int64_t end, int) {
    for (int64_t e = first; e < end; ++e) {
      const CandidateElement element = element_at(c, e);
      double z = -std::numeric_limits<double>::infinity();
      if (element.column >= 0) {
        const float dot =
            kernels.dot_rows(at_row(hidden, element.row), at_row(weight, element.column), c.hidden_size);
        z = candidate_logit(c, element, double{dot});
      }
      store_from_double(c.logits, DType::kF32, e, z);
    }
  });
}

// A worker's sums of one row of a gradient. Elements are added in their order.
class RowSum {
 public:
  RowSum(const Kernels& kernels, const MatrixView& matrix, std::span<float> sums)
      : kernels_(kernels), matrix_(matrix), sums_(sums) {}

  void clear() { std::fill(sums_.begin(), sums_.end(), 0.0f); }
  // Adds an element's term: its gradient times the matrix's row of this place.
  void add(const Candidates& c, int64_t e, int64_t CandidateElement::*place) {
    if (c.factors.scale == 0) return;
    const CandidateElement element = element_at(c, e);
    const double value = c.product_scale * candidate_gradient(c, element, e);
    if (value == 0) return;
    list_[count_++] = {static_cast<int32_t>(element.*place), static_cast<float>(value)};
    if (count_ == kElementsAtOnce) flush();
  }
  // Stores the sums, or adds them to what is there.
  void store(bool accumulate, DType dtype, void* out) {
    flush();
    const auto columns = static_cast<int64_t>(sums_.size());
    if (accumulate && dtype != DType::kF32) {
      for (int64_t d = 0; d < columns; ++d) {
        sums_[static_cast<size_t>(d)] += static_cast<float>(load_as_double(out, dtype, d));
      }
    }
    kernels_.store_row(sums_.data(), columns, 1, accumulate && dtype == DType::kF32, dtype, out);
  }

 private:
  void flush() {
    if (count_ > 0) {
      kernels_.add_rows({matrix_, list_, count_, static_cast<int64_t>(sums_.size()), sums_.data()});
    }
    count_ = 0;
  }

  const Kernels& kernels_;
  MatrixView matrix_;
  std::span<float> sums_;
  SparseElement list_[kElementsAtOnce];
  int64_t count_ = 0;
};

struct CandidatesArena {
  ColumnOrder order;
  std::span<float> sums;  // [threads, padded D]
  int64_t padded = 0;

  std::span<float> of(int worker, int64_t columns) const {
    return sums.subspan(static_cast<size_t>(worker * padded), static_cast<size_t>(columns));
  }
};

CandidatesArena lay_out_candidates(const Candidates& c, const BackendOptions& options, Workspace* workspace) {
  CandidatesArena arena;
  if (c.stage == CandidatesStage::kLogits) return arena;
  arena.order = take_column_order(c, workspace);
  arena.padded = static_cast<int64_t>(align_up(static_cast<uint64_t>(c.hidden_size) * sizeof(float))) /
                 static_cast<int64_t>(sizeof(float));
  arena.sums = workspace->take<float>(options.parallel_for.threads * arena.padded);
  return arena;
}

void write_d_hidden(const Candidates& c, const BackendOptions& options, const CandidatesArena& arena) {
  const Kernels& kernels = candidate_kernels(options);
  const MatrixView weight = operand_view(c, c.weight, c.weight_dtype, c.weight_stride);
  in_parts(options, c.lists.rows, kRowsAtOnce, [&](int64_t first, int64_t end, int worker) {
    RowSum sum(kernels, weight, arena.of(worker, c.hidden_size));
    for (int64_t row = first; row < end; ++row) {
      sum.clear();
      for (int64_t e = c.lists.begin(row); e < c.lists.begin(row + 1); ++e) {
        sum.add(c, e, &CandidateElement::column);
      }
      sum.store(false, c.d_hidden_dtype, row_of(c.d_hidden, c.d_hidden_dtype, c.d_hidden_stride, row));
    }
  });
}

void write_columns(const Candidates& c, const BackendOptions& options, const CandidatesArena& arena) {
  const Kernels& kernels = candidate_kernels(options);
  const MatrixView hidden = operand_view(c, c.hidden, c.hidden_dtype, c.hidden_stride);
  in_parts(options, c.lists.vocab, kColumnsAtOnce, [&](int64_t first, int64_t end, int worker) {
    RowSum sum(kernels, hidden, arena.of(worker, c.hidden_size));
    for (int64_t column = first; column < end; ++column) {
      const std::span<const int64_t> list = arena.order.of(column);
      if (c.d_bias != nullptr) {
        double bias = 0;
        for (const int64_t e : list) bias += candidate_gradient(c, element_at(c, e), e);
        store_from_double(c.d_bias, c.d_bias_dtype, column, bias);
      }
      if (c.d_weight == nullptr || (list.empty() && c.accumulate_d_weight)) continue;
      sum.clear();
      for (const int64_t e : list) sum.add(c, e, &CandidateElement::row);
      sum.store(c.accumulate_d_weight, c.d_weight_dtype,
                row_of(c.d_weight, c.d_weight_dtype, c.d_weight_stride, column));
    }
  });
}

}  // namespace

uint64_t candidates_bytes(const Candidates& c, const BackendOptions& options) {
  Workspace counted;
  lay_out_candidates(c, options, &counted);
  return counted.used();
}

void candidates(const Candidates& c, const BackendOptions& options, Workspace workspace, void* /*stream*/) {
  const int64_t most = std::numeric_limits<int32_t>::max();
  if (c.lists.rows > most) throw_invalid("rows", "at most 2^31 - 1", std::to_string(c.lists.rows));
  if (c.lists.vocab > most) throw_invalid("vocab", "at most 2^31 - 1", std::to_string(c.lists.vocab));
  if (c.stage == CandidatesStage::kLogits) return write_logits(c, options);
  const CandidatesArena arena = lay_out_candidates(c, options, &workspace);
  if (c.d_hidden != nullptr) write_d_hidden(c, options, arena);
  if (!c.needs_columns()) return;
  sort_by_column(c, arena.order);
  write_columns(c, options, arena);
}

}  // namespace logitless::cpu
