#include <algorithm>
#include <string>
#include <type_traits>

#include "core/status.h"
#include "cuda/engines/logits.h"
#include "cuda/rows/rows.h"
#include "cuda/run/bound_plan.h"
#include "cuda/run/candidates/candidates.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {
namespace {

// A slice of the weight that stays in L2 while all rows read it, as in gather_hidden.cu.
constexpr int64_t kSliceBytes = int64_t{40} << 20;
// Slices pay where each row of the weight is read several times.
constexpr int64_t kReadsOfSlices = 2;
// Sums of slices that one launch makes. More launches would wait for their last blocks more often.
constexpr int64_t kPartialBytes = int64_t{16} << 20;

ProductSlices product_slices(const Candidates& c) {
  ProductSlices s;
  const auto size = static_cast<int64_t>(size_of(c.weight_dtype));
  if (c.lists.elements >= kReadsOfSlices * c.lists.vocab) {
    s.lanes = 16 * 8 * size * c.lists.vocab > kSliceBytes ? 8 : 16;
    s.columns = int64_t{8} * s.lanes;
  } else {
    s.columns = int64_t{8} * s.lanes * (c.weight_dtype == DType::kF64 ? 2 : 4);
  }
  s.count = (c.hidden_size + s.columns - 1) / s.columns;
  const int64_t bytes = c.lists.elements * static_cast<int64_t>(size_of(c.stats_dtype()));
  s.at_once = std::clamp<int64_t>(kPartialBytes / std::max<int64_t>(bytes, 1), 1, s.count);
  return s;
}

template <class Real>
CandidatesArenaOf<Real> lay_out_candidates(const Candidates& c, Workspace* workspace) {
  CandidatesArenaOf<Real> a;
  const int64_t elements = c.lists.elements;
  const auto take = [&](auto*& to, int64_t count) {
    to = workspace->take<std::remove_reference_t<decltype(*to)>>(count).data();
  };
  take(a.wrong, 1);
  if (c.stage == CandidatesStage::kLogits) {
    a.slices = product_slices(c);
    take(a.column, elements);
    take(a.unit_row, (elements + kUnit - 1) / kUnit);
    take(a.partial, a.slices.at_once * elements);
    return a;
  }
  if (c.d_hidden != nullptr && c.has_products()) {
    take(a.kept, elements);
    take(a.kept_count, c.lists.rows);
  }
  if (!c.needs_columns()) return a;
  take(a.by_element, elements);
  take(a.key, 2 * elements);
  take(a.order, 2 * elements);
  take(a.sorted, elements);
  take(a.start, c.lists.vocab + 1);
  take(a.heavy, 1 + elements / kHeavyColumn);
  a.sort_bytes = elements > 0 ? sort_bytes(elements) : 0;
  a.sort = workspace->take<std::byte>(static_cast<int64_t>(a.sort_bytes)).data();
  return a;
}

Matrix writable(void* data, DType dtype, int64_t stride) {
  return {data, dtype, stride};
}

template <class Real>
void make_logits(const Candidates& c, Workspace workspace, const Queue& queue) {
  const auto arena = lay_out_candidates<Real>(c, &workspace);
  queue.clear(arena.wrong, sizeof(WrongLists));
  if (c.lists.elements > 0) {
    launch_check_offsets(c.lists, arena.wrong, queue);
    launch_columns(c.lists, arena.column, arena.unit_row, arena.wrong, queue);
  }
  launch_candidate_logits(c, arena, queue);
}

template <class Real>
void make_d_hidden(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  const Matrix to = writable(c.d_hidden, c.d_hidden_dtype, c.d_hidden_stride);
  if (!c.has_products()) return launch_zero_rows(to, c.lists.rows, c.hidden_size, queue);
  launch_row_lists(c, arena, queue);
  GatherHiddenOf<Real> g{};
  g.lists = {arena.kept, arena.kept_count, c.lists.per_row, c.lists.offsets, c.lists.rows, c.lists.vocab};
  g.columns = c.hidden_size;
  g.weight = {c.weight, c.weight_dtype, c.weight_stride};
  g.operand_dtype = c.compute_dtype;
  g.to = to;
  launch_gather_hidden(g, queue);
}

template <class Real>
void make_d_weight(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  const Matrix to = writable(c.d_weight, c.d_weight_dtype, c.d_weight_stride);
  if (!c.has_products()) {
    if (!c.accumulate_d_weight) launch_zero_rows(to, c.lists.vocab, c.hidden_size, queue);
    return;
  }
  GatherWeightOf<Real> g{};
  g.lists = {arena.sorted, arena.start, arena.heavy, nullptr, c.lists.vocab};
  g.columns = g.padded = c.hidden_size;
  g.hidden = {c.hidden, c.hidden_dtype, c.hidden_stride};
  g.operand_dtype = c.compute_dtype;
  g.to = to;
  g.accumulate = c.accumulate_d_weight;
  launch_gather_weight(g, queue);
}

template <class Real>
void make_gradients(const Candidates& c, Workspace workspace, const Queue& queue) {
  const auto arena = lay_out_candidates<Real>(c, &workspace);
  queue.clear(arena.wrong, sizeof(WrongLists));
  if (c.lists.elements > 0) launch_check_offsets(c.lists, arena.wrong, queue);
  if (c.d_hidden != nullptr && c.lists.rows > 0) make_d_hidden(c, arena, queue);
  if (c.needs_columns()) launch_column_lists(c, arena, queue);
  if (c.d_weight != nullptr) make_d_weight(c, arena, queue);
}

template <class Real>
void run_stage(const Candidates& c, Workspace workspace, const Queue& queue) {
  c.stage == CandidatesStage::kLogits ? make_logits<Real>(c, workspace, queue)
                                      : make_gradients<Real>(c, workspace, queue);
}

void check_sizes(const Candidates& c) {
  const auto check = [](int64_t size, const char* argument) {
    if (size >= kMostColumns) throw_invalid(argument, "below 2^30 on CUDA", std::to_string(size));
  };
  check(c.lists.rows, "rows");
  check(c.lists.vocab, "vocab");
  check(c.lists.elements, "elements");
}

}  // namespace

uint64_t candidates_bytes(const Candidates& c, const BackendOptions& options) {
  check_sizes(c);
  const DeviceGuard guard(options.device);
  Workspace counted;
  c.stats_dtype() == DType::kF64 ? static_cast<void>(lay_out_candidates<double>(c, &counted))
                                 : static_cast<void>(lay_out_candidates<float>(c, &counted));
  return counted.used();
}

void candidates(const Candidates& c, const BackendOptions& options, Workspace workspace, void* stream) {
  check_sizes(c);
  const DeviceGuard guard(options.device);
  const Queue queue(static_cast<cudaStream_t>(stream));
  c.stats_dtype() == DType::kF64 ? run_stage<double>(c, workspace, queue)
                                 : run_stage<float>(c, workspace, queue);
}

}  // namespace logitless::cuda
