#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "core/status.h"
#include "cuda/engines/logits.h"
#include "cuda/rows/rows.h"
#include "cuda/run/bound_plan.h"
#include "cuda/run/candidates/candidates.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/gemm.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {
namespace {

// A slice of the weight that stays in L2 while all rows read it, as in gather_hidden.cu.
constexpr int64_t kSliceBytes = int64_t{40} << 20;
// Slices pay where each row of the weight is read several times.
constexpr int64_t kReadsOfSlices = 2;

// Gathers are bound by reading rows from L2, products by arithmetic. The ratios of their times, for an
// element and for a column, are those of an H100's rates: tensor cores have a higher one than those of
// float32 and float64.
constexpr int64_t kColumnsOfLogit = 160, kColumnsOfGradient = 120, kColumnsOfWideElement = 16;
constexpr int64_t kLeastRows = 128;  // of products

// The most bytes of the largest buffers. A budget halves them until they fit.
struct BufferBytes {
  int64_t whole = int64_t{512} << 20;   // of products with the whole weight; 0: rows are gathered
  int64_t partial = int64_t{16} << 20;  // of sums of slices; less takes more launches
};
// Each window of dz reads and writes fp32 sums of d_hidden. In bf16 that takes up to a fortieth of the
// products' time with so many bytes of a row. More columns save little.
constexpr int64_t kLeastWindowBytes = 32 << 10, kMostWindow = 32768;
constexpr int64_t kLeastWindow = 1024;  // columns, with a budget

bool is_aligned(const void* data, DType dtype, int64_t stride, int64_t columns) {
  const uint64_t bytes = static_cast<uint64_t>(stride) * size_of(dtype);
  return columns % 8 == 0 && (reinterpret_cast<uintptr_t>(data) | bytes) % 16 == 0;
}

// float16 is left out: its dz would need a scale.
bool multiplies_whole(const Candidates& c) {
  const bool is_short = c.weight_dtype == DType::kBF16;
  const bool is_logit = c.stage == CandidatesStage::kLogits;
  const int64_t columns = !is_short ? kColumnsOfWideElement : is_logit ? kColumnsOfLogit : kColumnsOfGradient;
  if (c.hidden_dtype != c.weight_dtype || c.weight_dtype == DType::kF16 ||
      c.rounds_to(c.weight_dtype) != DType::kF32)
    return false;
  if (c.lists.rows < kLeastRows || c.lists.elements < c.lists.vocab || !c.has_products()) return false;
  if (c.lists.elements / c.lists.rows < c.lists.vocab / columns) return false;
  const auto takes = [&](const void* gradient, DType dtype, int64_t stride) {
    return gradient == nullptr || ((dtype == c.weight_dtype || dtype == c.stats_dtype()) &&
                                   is_aligned(gradient, dtype, stride, c.hidden_size));
  };
  return takes(c.d_hidden, c.d_hidden_dtype, c.d_hidden_stride) &&
         takes(c.d_weight, c.d_weight_dtype, c.d_weight_stride) &&
         is_aligned(c.hidden, c.hidden_dtype, c.hidden_stride, c.hidden_size) &&
         is_aligned(c.weight, c.weight_dtype, c.weight_stride, c.hidden_size);
}

int64_t rounded_down(int64_t count, int64_t unit) {
  return std::max(count / unit * unit, unit);
}
int64_t parts(int64_t count, int64_t part) {
  return (count + part - 1) / part;
}

// Windows have equal columns, and so have their tiles. Rows of dz begin at multiples of 128 bytes.
WholeProducts whole_products(const Candidates& c, int64_t bytes) {
  WholeProducts w;
  if (bytes == 0 || !multiplies_whole(c)) return w;
  const int64_t vocab = c.lists.vocab;
  w.stride = parts(vocab, 8) * 8;
  const auto size = static_cast<int64_t>(size_of(c.stats_dtype()));
  w.rows = std::min(c.lists.rows, rounded_down(bytes / (size * w.stride), kLeastRows));
  const auto element = static_cast<int64_t>(size_of(c.weight_dtype));
  const int64_t least = bytes < BufferBytes{}.whole ? element * kLeastWindow : kLeastWindowBytes;
  const int64_t most = std::min(std::max(bytes / c.lists.rows, least) / element, kMostWindow);
  const int64_t columns = parts(vocab, parts(vocab, most));
  w.window_tiles = parts(columns, kTileWarps * kTileBytes / size) * kTileWarps;
  w.tile = parts(parts(columns, w.window_tiles), kTileUnit) * kTileUnit;
  w.tiles = parts(vocab, w.tile);
  return w.tiles <= kMostTiles ? w : WholeProducts{};
}

ProductSlices product_slices(const Candidates& c, int64_t partial_bytes) {
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
  s.at_once = std::clamp<int64_t>(partial_bytes / std::max<int64_t>(bytes, 1), 1, s.count);
  return s;
}

template <class Real>
CandidatesArenaOf<Real> lay_out(const Candidates& c, const BufferBytes& bytes, Workspace* workspace) {
  CandidatesArenaOf<Real> a;
  const int64_t elements = c.lists.elements;
  const auto take = [&](auto*& to, int64_t count) {
    to = workspace->take<std::remove_reference_t<decltype(*to)>>(count).data();
  };
  take(a.wrong, 1);
  a.whole = whole_products(c, bytes.whole);
  const auto take_products = [&](int64_t count, DType dtype) {
    a.gemm = workspace->take<std::byte>(static_cast<int64_t>(kGemmScratchBytes)).data();
    a.products = workspace->take<std::byte>(count * static_cast<int64_t>(size_of(dtype))).data();
  };
  if (c.stage == CandidatesStage::kLogits) {
    if (a.whole.used()) take_products(a.whole.rows * a.whole.stride, c.stats_dtype());
    a.slices = a.whole.used() ? ProductSlices{.at_once = 1} : product_slices(c, bytes.partial);
    take(a.column, elements);
    take(a.unit_row, (elements + kUnit - 1) / kUnit);
    take(a.partial, a.slices.at_once * elements);
    return a;
  }
  if (a.whole.used()) {
    take(a.kept, elements);
    take(a.tile_start, c.lists.rows * (a.whole.tiles + 1));
    if (c.d_bias != nullptr) take(a.bias_sums, kBiasGroups * c.lists.vocab);
    if (c.d_hidden == nullptr && c.d_weight == nullptr) return a;
    take_products(c.lists.rows * a.whole.window(), c.weight_dtype);
    const bool one_window = a.whole.tiles <= a.whole.window_tiles;
    if (c.d_hidden != nullptr && c.d_hidden_dtype != c.stats_dtype() && !one_window) {
      take(a.d_hidden, c.lists.rows * c.hidden_size);
    }
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

// Takes the largest buffers that fit the budget, or the least bytes if none do.
template <class Real>
CandidatesArenaOf<Real> lay_out_candidates(const Candidates& c, Workspace* workspace) {
  BufferBytes bytes, smallest;
  for (uint64_t least = std::numeric_limits<uint64_t>::max();;) {
    Workspace counted;
    const bool is_whole = lay_out<Real>(c, bytes, &counted).whole.used();
    if (c.max_workspace_bytes == 0 || counted.used() <= c.max_workspace_bytes) {
      smallest = bytes;
      break;
    }
    if (counted.used() < least) {
      least = counted.used();
      smallest = bytes;
    }
    if (is_whole) {
      bytes.whole /= 2;
    } else if (bytes.partial > 0) {
      bytes = {.whole = 0, .partial = bytes.partial / 2};
    } else {
      break;
    }
  }
  return lay_out<Real>(c, smallest, workspace);
}

Matrix writable(void* data, DType dtype, int64_t stride) {
  return {data, dtype, stride};
}

// Dot products of all elements out of products of rows with all columns.
template <class Real>
void multiply_rows(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  const ConstMatrix hidden{c.hidden, c.hidden_dtype, c.hidden_stride};
  const ConstMatrix weight{c.weight, c.weight_dtype, c.weight_stride};
  const Matrix products{arena.products, c.stats_dtype(), arena.whole.stride};
  for (int64_t row = 0; row < c.lists.rows; row += arena.whole.rows) {
    const int64_t rows = std::min(arena.whole.rows, c.lists.rows - row);
    gemm({.m = rows,
          .n = c.lists.vocab,
          .k = c.hidden_size,
          .a = hidden.from(row),
          .b = weight,
          .transpose_b = true,
          .c = products},
         arena.gemm, kGemmScratchBytes, queue);
    launch_pick_products(c.lists, arena.column, row, rows, products, arena.partial, queue);
  }
}

// All gradients by products of dz, a window of its columns at a time.
template <class Real>
void multiply_windows(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  launch_tile_lists(c, arena, queue);
  if (c.d_bias != nullptr) launch_whole_bias(c, arena, queue);
  if (c.d_hidden == nullptr && c.d_weight == nullptr) return;
  const ConstMatrix hidden{c.hidden, c.hidden_dtype, c.hidden_stride};
  const ConstMatrix weight{c.weight, c.weight_dtype, c.weight_stride};
  const WholeProducts& whole = arena.whole;
  const Matrix dz{arena.products, c.weight_dtype, whole.window()};
  const Matrix to{c.d_hidden, c.d_hidden_dtype, c.d_hidden_stride};
  const Matrix sums = arena.d_hidden == nullptr ? to : Matrix{arena.d_hidden, c.stats_dtype(), c.hidden_size};
  for (int64_t tile = 0; tile < whole.tiles; tile += whole.window_tiles) {
    const int64_t tiles = std::min(whole.window_tiles, whole.tiles - tile), column = tile * whole.tile;
    const int64_t columns = std::min(tiles * whole.tile, c.lists.vocab - column);
    launch_spread(c, arena, tile, tiles, dz, queue);
    if (c.d_hidden != nullptr) {
      gemm({.m = c.lists.rows,
            .n = c.hidden_size,
            .k = columns,
            .a = dz,
            .b = weight.from(column),
            .c = sums,
            .beta = column > 0 ? 1.0f : 0.0f},
           arena.gemm, kGemmScratchBytes, queue);
    }
    if (c.d_weight != nullptr) {
      gemm({.m = columns,
            .n = c.hidden_size,
            .k = c.lists.rows,
            .a = dz,
            .transpose_a = true,
            .b = hidden,
            .c = Matrix{c.d_weight, c.d_weight_dtype, c.d_weight_stride}.from(column),
            .beta = c.accumulate_d_weight ? 1.0f : 0.0f},
           arena.gemm, kGemmScratchBytes, queue);
    }
  }
  if (arena.d_hidden != nullptr) launch_store_matrix(sums, to, c.lists.rows, c.hidden_size, false, queue);
}

template <class Real>
void make_logits(const Candidates& c, Workspace workspace, const Queue& queue) {
  const auto arena = lay_out_candidates<Real>(c, &workspace);
  queue.clear(arena.wrong, sizeof(WrongLists));
  if (c.lists.elements > 0) {
    launch_check_offsets(c.lists, arena.wrong, queue);
    launch_columns(c.lists, arena.column, arena.unit_row, arena.wrong, queue);
    arena.whole.used() ? multiply_rows(c, arena, queue) : launch_products(c, arena, queue);
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
  g.rows = c.lists.rows;
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
  if (arena.whole.used()) return multiply_windows(c, arena, queue);
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
