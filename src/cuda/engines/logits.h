#pragma once
#include <cstdint>
#include <type_traits>
#include <variant>

#include "core/dtype.h"
#include "core/logit_transform.h"
#include "core/row_lists.h"
#include "core/sampling.h"

namespace logitless::cuda {

// The one product that needs care: logits z = t(scale * E C^T + bias) / T, tile by tile, and the reduction of
// each tile. sm90 does it in one fused kernel; portable uses a plain product into scratch and row kernels.
enum class Epilogue : int {
  kStats,      // row statistics; nothing of the size of a tile is stored
  kExpLogits,  // A_ij = exp(z_ij - offset_i) is stored, and its row sums are made
  kGradient,   // dz_ij is stored, from known lse and coefficients
  kDraw,       // exp(z_ij - offset_i) is summed, and elements for sparsified gradients are drawn
  kTop,        // row statistics, and the largest logits of each row
  kSample,     // row statistics, and samples of each row
};

// kIgnoredRow is the target of an ignored row: its exp logits and gradients are 0, whatever its hidden row
// holds. Columns are below kMostColumns, so that target less an offset never overflows.
inline constexpr int32_t kMostColumns = 1 << 30;
inline constexpr int32_t kIgnoredRow = -kMostColumns;

// Running row statistics: [partials][stride] each, several partials for each row. Every (partial, row) has
// one writer, so sums do not depend on the order of blocks. Windows of the vocabulary (launches) add to the
// same partials, unless the launch is batch_invariant.
template <class Real>
struct PartialStatsOf {
  int64_t partials = 0;
  int64_t stride = 0;
  Real* max = nullptr;
  Real* sum = nullptr;  // sum_j exp(z_ij - max); kExpLogits: sum_j exp(z_ij - offset_i)
  // Optional sums or null. They are relative to max, or with kExpLogits and kDraw to the logit offset.
#define LOGITLESS_MEMBER(name, part, ...) Real* part = nullptr;
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  int32_t* argmax = nullptr;  // column of the shard, the first of equals, or null
  float* expected = nullptr;  // kDraw: the expected number of kept elements, times threshold

  constexpr bool has_options() const {
    bool any = argmax != nullptr;
#define LOGITLESS_ANY(name, part, ...) any = any || part != nullptr;
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_ANY)
#undef LOGITLESS_ANY
    return any;
  }
  PartialStatsOf without_options() const {
    PartialStatsOf without = *this;
    without.argmax = nullptr;
#define LOGITLESS_CLEAR(name, part, ...) without.part = nullptr;
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_CLEAR)
#undef LOGITLESS_CLEAR
    return without;
  }
};
using PartialStats = PartialStatsOf<float>;

// An element that the first draw kept.
struct alignas(8) Draw {  // one load or store
  // 2 column + 1 if it was certain to be kept, else 2 column; column of the shard.
  int32_t column_and_certain;
  float logit;
};

// The inputs and outputs of kDraw, see core/sparsification.h. The lse estimate is the logit offset.
struct Draws {
  const uint64_t* seed = nullptr;  // scalar
  uint32_t first_stream = 0;       // global number of column 0
  // [V] of the shard; columns with a role >= 0 are done by a dense product and not kept.
  const int32_t* role = nullptr;
  const int32_t* row = nullptr;      // [rows] number of each row for seed and lists; null: its index
  const float* threshold = nullptr;  // [rows]; infinity: nothing is kept
  const float* lse_estimate_residual = nullptr;  // of each list's row, added to its logit offset; null: 0
  float certain_share = 1;   // of the threshold; elements above this share are certain to be kept
  int32_t* count = nullptr;  // [rows] kept so far; exceeds capacity only if the lse estimate was too low
  Draw* elements = nullptr;  // [rows, capacity], in any order
  int32_t capacity = 0;
};

// A logit and its column of the shard.
template <class T>
struct alignas(2 * sizeof(T)) TopEntry {  // one load or store
  T z;
  int32_t column;
};

// The outputs of kTop. An engine whose traits have no groups keeps the best logits of each row, over windows
// in ascending order; the first window starts the lists.
//
// An engine with groups lists the logits that are not below a threshold, NaN included, except -inf. At least
// k logits of the row are not below it. The engine also helps to find thresholds: with group_max it only
// computes the maxima of groups of columns.
template <class Real>
struct TopLogitsOf {
  int64_t k = 0;
  TopEntry<Real>* best = nullptr;     // [rows, k] in order
  const float* threshold = nullptr;   // [rows] finite, or +inf
  int32_t* count = nullptr;           // [rows] listed so far; exceeds capacity if a list has no room
  TopEntry<float>* listed = nullptr;  // [rows, capacity], in any order
  int32_t capacity = 0;
  float* group_max = nullptr;  // [rows, groups] of the window's groups; -inf for a group without columns
  int64_t groups = 0;          // floats between rows
};
using TopLogits = TopLogitsOf<float>;

// The inputs and outputs of kSample, see core/sampling.h. Launches raise `best` of their rows.
struct Samples {
  int64_t count = 0;                   // of a row
  uint32_t first_column = 0;           // global number of column 0
  const SampleKey* key = nullptr;      // [rows, count]
  unsigned long long* best = nullptr;  // [rows, count] packed_sample(), with global columns
};

// The parts that all epilogues share: the product, the transform of a dot product, and which rows exist.
// Matrices are row-major, strides are in elements, pointers are on the device.
template <class Real>
struct LogitsProductOf {
  // Both operands' dtype. With kE4M3 (EngineTraits::has_e4m3) products are multiplied by the factors of their
  // row and column.
  DType dtype = DType::kBF16;
  const float* row_factor = nullptr;     // [rows] powers of two, with e4m3
  const float* column_factor = nullptr;  // [columns] of the window, likewise
  bool allow_tf32 = false;               // fp32 operands may be rounded to TF32
  // Every EngineTraits::partial_columns columns of the shard have their own partial, and a logit's bits
  // depend only on its row and column. So a row's sums do not depend on other rows, launches or devices.
  bool batch_invariant = false;
  // Nearly always no row exists, which only the device knows. Then the launch must cost next to nothing. Not
  // with batch_invariant.
  bool seldom = false;
  const void* hidden = nullptr;
  int64_t hidden_stride = 0;  // [rows, depth]
  const void* weight = nullptr;
  int64_t weight_stride = 0;  // [columns, depth], a window of the vocabulary
  int64_t rows = 0, columns = 0, depth = 0;
  const int32_t* row_count = nullptr;  // scalar: rows from here on do not exist; null: all `rows` exist
  // One flag for 128 rows; 0: these rows stay as they are. Null: all are active.
  const uint8_t* row_block_active = nullptr;
  LogitTransform<Real> transform;
  // [rows] column of the shard, -1 if it is in another shard, or kIgnoredRow. May be null with kStats,
  // kDraw, kTop and kSample: then no row has a target.
  const int32_t* target = nullptr;
  int64_t column_offset = 0;  // of the window in the shard
  // Only with kTop and kSample. column_offset is a column of the mask, the first of a word.
  ColumnMask mask;
  const int32_t* mask_row = nullptr;  // [rows] of the mask; null: their indices

  // The words of a row's mask; null: no column is masked.
  LOGITLESS_HD const int32_t* mask_of_row(int64_t row) const {
    if (mask.words == nullptr) return nullptr;
    return mask.of_row(mask_row != nullptr ? mask_row[row] : row);
  }
};
using LogitsProduct = LogitsProductOf<float>;

// The parts shared by the epilogues that sum rows: all but kGradient.
template <class Real>
struct RowSumsOf {
  PartialStatsOf<Real> stats;
  const Real* class_weight = nullptr;  // [columns]; null: ones
  Real* target_logit = nullptr;        // [rows], written if the target is in the window
};
using RowSums = RowSumsOf<float>;

template <class Real>
struct StatsArgsOf : RowSumsOf<Real> {};
using StatsArgs = StatsArgsOf<float>;

// The dtype of what a launch stores.
constexpr DType stored_dtype(DType operands) {
  return operands == DType::kE4M3 ? DType::kBF16 : operands;
}

// A matrix [rows, columns] for a launch's first columns. Columns up to the next multiple of 16 bytes may be
// written as well: stores clip there.
struct StoredColumns {
  void* data = nullptr;
  int64_t columns = 0;
  int64_t stride = 0;
};

// float16 cannot hold the range of exp logits. So the stored ones of a row in kExponentColumns columns share
// an exponent, a byte: they are the exp logits times 2^exponent, and the largest is in [2^14, 2^15).
inline constexpr int kExponentColumns = 192;
struct Exponents {
  int8_t* data = nullptr;  // [rows, groups of columns]
  int64_t stride = 0;      // bytes between rows
};

// Sums are relative to the logit offset, and `weighted` is not made. A null max means that it is not wanted;
// argmax and the optional sums are optional as well. If exp logits are kept in base 2, they and the sums are
// relative to rounded_offset(), which is the logit offset up to rounding. The stored values are then
// 2^kKeptExponent times the exp logits, or with float16 those of Exponents.
struct ExpLogitsArgs : RowSums {
  // The offset that exp logits are relative to, for engines with offsets_first. Others may get the
  // targets' logits for a run's first window, as guesses of the maxima.
  const float* logit_offset = nullptr;  // [rows]
  // These choose the logit offset in the first window and write it here, perhaps over that logit. They may
  // choose again: then they also change the exp logits of earlier windows, the `kept_before` columns that end
  // where `exp_logits` begins.
  float* chosen_offset = nullptr;  // [rows]
  int64_t kept_before = 0;
  StoredColumns exp_logits = {};  // in stored_dtype()
  Exponents exponents = {};       // with float16 operands; the launch begins with a group of columns
};

// dz = [p (a + b log p) + c w - g [target]] * slope of t (T times that of z), log p = z - lse - lse_residual
template <class Real>
struct GradientArgsOf {
  const Real* lse = nullptr;                                          // [rows]
  const Real* lse_residual = nullptr;                                 // [rows] lse's rounding error; null: 0
  const Real *a = nullptr, *b = nullptr, *c = nullptr, *g = nullptr;  // [rows]; b and c may be null
  const Real* class_weight = nullptr;                                 // [columns] w; null: ones
  const float* factor = nullptr;                                      // scalar, of dz; null: 1
  StoredColumns dz = {};                                              // in stored_dtype(), all columns
};
using GradientArgs = GradientArgsOf<float>;

// Sums are relative to the logit offset, as with kExpLogits. Null sums are not wanted.
struct DrawArgs : RowSums {
  const float* logit_offset = nullptr;  // [rows]
  Draws draws = {};
};

template <class Real>
struct TopArgsOf : RowSumsOf<Real> {
  TopLogitsOf<Real> top = {};
};
using TopArgs = TopArgsOf<float>;

struct SampleArgs : RowSums {
  Samples samples = {};
};

// In the order of Epilogue. float64 has no kept exp logits, no draws and no samples.
template <class Real>
using EpilogueArgsOf = std::variant<StatsArgsOf<Real>, ExpLogitsArgs, GradientArgsOf<Real>, DrawArgs,
                                    TopArgsOf<Real>, SampleArgs>;
using EpilogueArgs = EpilogueArgsOf<float>;
template <Epilogue kEpilogue>
using ArgsOf = std::variant_alternative_t<static_cast<size_t>(kEpilogue), EpilogueArgs>;
static_assert(std::is_same_v<ArgsOf<Epilogue::kStats>, StatsArgs>);
static_assert(std::is_same_v<ArgsOf<Epilogue::kExpLogits>, ExpLogitsArgs>);
static_assert(std::is_same_v<ArgsOf<Epilogue::kGradient>, GradientArgs>);
static_assert(std::is_same_v<ArgsOf<Epilogue::kDraw>, DrawArgs>);
static_assert(std::is_same_v<ArgsOf<Epilogue::kTop>, TopArgs>);
static_assert(std::is_same_v<ArgsOf<Epilogue::kSample>, SampleArgs>);

// The arguments of a launch.
template <class Real>
struct LogitsArgsOf : LogitsProductOf<Real> {
  EpilogueArgsOf<Real> of_epilogue = {};

  Epilogue epilogue() const { return static_cast<Epilogue>(of_epilogue.index()); }
};
using LogitsArgs = LogitsArgsOf<float>;

// Returns the epilogue of a forward pass that keeps no exp logits.
inline EpilogueArgs forward_epilogue(const Problem& problem) {
  if (problem.top_k > 0) return TopArgs{};
  if (problem.num_samples > 0) return SampleArgs{};
  return StatsArgs{};
}

// Returns a launch's partials; null for kGradient.
inline const PartialStats* stats_of(const LogitsArgs& args) {
  return std::visit(
      [](const auto& of_epilogue) -> const PartialStats* {
        if constexpr (std::is_base_of_v<RowSums, std::decay_t<decltype(of_epilogue)>>) {
          return &of_epilogue.stats;
        } else {
          return nullptr;
        }
      },
      args.of_epilogue);
}

// Returns the columns that a launch stores; null if it stores nothing.
inline const StoredColumns* stored_by(const LogitsArgs& args) {
  if (const auto* exp_logits = std::get_if<ExpLogitsArgs>(&args.of_epilogue)) return &exp_logits->exp_logits;
  if (const auto* gradient = std::get_if<GradientArgs>(&args.of_epilogue)) return &gradient->dz;
  return nullptr;
}

}  // namespace logitless::cuda
