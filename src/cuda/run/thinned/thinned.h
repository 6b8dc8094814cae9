#pragma once
// Kernels of thinned gradients (docs/thinning.md). Every launcher only queues; pointers are of the device.
// Rows are the caller's: they are not compacted. N tokens, V columns of the shard, K dense columns, S sampled
// ones.
#include <cstdint>

#include "cuda/rows/rows.h"
#include "cuda/run/arena.h"
#include "cuda/run/thinned/sizes.h"

namespace logitless::cuda {

// What Buffers::draws holds: all that a backward pass needs of the first draw.
struct DrawLists {
  uint64_t* seed = nullptr;    // scalar
  int32_t* dense = nullptr;    // [K] dense columns, ascending
  int32_t* count = nullptr;    // [N]
  float* guess = nullptr;      // [N]
  float* guess_low = nullptr;  // [N] what rounding took off the guess, where that is lse
  // [N] of the product that the sums are of: one of its own would be rounded otherwise than lse
  float* target_logit = nullptr;
  Draw* elements = nullptr;  // [N, capacity]
};

// A kept element with its part of dz.
struct alignas(8) Kept {  // one load or store
  int32_t column;
  float value;
};
// The same in the list of its column.
struct alignas(8) KeptRow {
  int32_t row;
  float value;
};

// ---- chosen_columns.cu: the most frequent targets become dense columns (of equals the first); of the others
// one is sampled of each stretch of the vocabulary Scratch of the choices by count: a histogram, and a number
// for each block of the kernel's threads.
inline constexpr int kCountBins = 1024, kMostCountBlocks = 64;
struct ChooseColumns {
  const int32_t* target;  // [N] as Arena::target
  int64_t tokens, vocab, dense, sampled;
  int32_t* count;          // [V] scratch
  int32_t* bins;           // [kCountBins] scratch
  uint64_t* totals;        // [kMostCountBlocks] scratch
  int32_t* role;           // [V] number of the dense column, -1, or -2 - s for sample s
  int32_t* dense_columns;  // [K]
  int32_t* dense_copy;     // [K] the same, or null
  int32_t* sample;         // [S] column, or kIgnoredRow: no other column in the stretch
  float* sample_others;    // [S] further columns of the stretch that are not dense; -1: no sample, either
  uint64_t* seed;          // scalar: becomes given_seed's (null: known_seed); or null
  const int64_t* given_seed;
  int64_t known_seed;
};
void launch_choose_columns(const ChooseColumns& c, const Queue& queue);
// From the dense columns alone what the gradients need of them, and counts that begin with 0.
struct AssignRoles {
  const int32_t* dense_columns;  // [K] ascending
  int32_t* columns;              // [K] a copy; may be dense_columns
  int64_t dense, vocab, tokens;
  const int32_t* target;  // [N]
  int32_t* role;          // [V] number of the dense column, or -1
  int32_t* dense_target;  // [N] role of the target; -1 or kIgnoredRow
  int32_t* column_count;  // [V + 1] become 0; or null
  int32_t* heavy_count;   // scalar, becomes 0; or null
};
void launch_assign_roles(const AssignRoles& a, const Queue& queue);
// out[k] = vector[columns[k]]
void launch_gather_vector(const float* vector, const int32_t* columns, int64_t count, float* out,
                          const Queue& queue);

// ---- guess.cu
// Range of a row's sum of exps relative to the guess, without optional sums: exp(-60) to exp(60).
inline constexpr SumRange kGuessedRange{8.7e-27, 1.1e26};
struct Guess {
  int64_t rows, sampled;
  const StatSlots* slots;      // of the dense columns, on the host; become those of no column
  const float* logits;         // [N, S] products of the sampled columns
  const int32_t* sample;       // [S] as ChooseColumns
  const float* sample_others;  // [S] below 0: there is no such sample
  LogitTransform<float> transform;
  float threshold;
  const int32_t* target;      // [N]
  const float* target_logit;  // [N]
  const int32_t* role;        // [V]
  float* guess;               // [N]
  float* guess_low;           // [N] becomes 0
  float* anchor;              // [N] the same as guess
  float* row_threshold;       // [N]
  int32_t* count;             // [N] becomes 0
  int32_t* redrawn_count;     // scalar, becomes 0; or null
};
void launch_guess(const Guess& g, const Queue& queue);
// Of a group, whose ranks have guessed of their own columns: guess and anchor of all columns. Of a rank that
// seems to have next to nothing of a row they are lower, so that its sums are in range whatever others guess.
struct MergeGuesses {
  int64_t rows, rank, ranks;
  const StatSlots* slots;  // on the host
  const float* guesses;    // [ranks, N]
  float* guess;            // [N]
  float* anchor;           // [N]
};
void launch_merge_guesses(const MergeGuesses& m, const Queue& queue);
// A guess that is known: lse.
struct KnownGuess {
  int64_t rows;
  const float *lse, *lse_low;  // [N]
  const int32_t* target;       // [N]
  float threshold;
  float *guess, *guess_low, *anchor, *row_threshold;  // [N] as in Guess
  int32_t* count;                                     // [N] becomes 0
};
void launch_known_guess(const KnownGuess& g, const Queue& queue);
// ---- redraw.cu
// After the first draw: rows whose guess was too low or too high are listed, to be drawn again with lse as
// the guess. That is decided by sums that do not depend on the seed, so it favors no outcome of the draw.
//
// Too low: so much would be drawn that lists are too short, or a sum leaves the range of exps.
struct FindLowGuesses {
  int64_t rows;
  const StatSlots* slots;  // on the host; of blocks out of range they become those of no column
  double most_expected;    // over threshold: rows of more are listed
  const int32_t* target;   // [N]
  float* guess;            // [N] of listed rows becomes -inf
  int32_t* count;          // [N] of listed rows becomes 0
  uint8_t* out_of_range;   // for 128 rows each: a sum left the range of exps
  int32_t* redrawn;        // [N] the rows, in any order
  int32_t* redrawn_count;  // scalar, 0 before
};
void launch_find_low_guesses(const FindLowGuesses& f, const Queue& queue);
// Blocks of rows out of range, which have new sums relative to maxima: sums relative to their lse as the
// anchor.
void launch_anchor_redraws(const StatSlots& slots, bool base_2, const uint8_t* out_of_range,
                           const int32_t* target, int64_t rows, float* anchor, const Queue& queue);
// Too high, when lse is known, of all ranks in a group: elements above threshold might not be kept.
struct FindHighGuesses {
  int64_t rows;
  bool base_2;                 // the guess is effective_anchor() of it
  float certain_share;         // as in Draws
  const int32_t* target;       // [N]
  const float *lse, *lse_low;  // [N] together lse
  const float* guess;          // [N]
  int32_t* count;              // [N] as above, and these, to which rows are added
  int32_t* redrawn;
  int32_t* redrawn_count;
};
void launch_find_high_guesses(const FindHighGuesses& f, const Queue& queue);
// Of a portion of listed rows: hidden rows, guesses and thresholds.
struct GatherRedraws {
  const int32_t* redrawn;        // of the portion
  const int32_t* redrawn_count;  // scalar: of all portions
  int32_t* count;                // scalar: becomes that of the portion
  int64_t first, portion;        // the portion's first in the list, and how many it has room for
  const void* hidden;
  int64_t hidden_bytes;        // of a row, a multiple of 16
  int64_t hidden_stride;       // bytes
  void* copy;                  // [portion, hidden_bytes]
  const float *lse, *lse_low;  // [N] together lse
  float *guess, *guess_low;    // [N] become lse
  float threshold;
  const float* inverse_temperature;    // [N] or null: ones
  float* portion_inverse_temperature;  // [portion] or null
  float* portion_anchor;               // [portion]
  float* portion_threshold;            // [portion]
};
void launch_gather_redraws(const GatherRedraws& g, const Queue& queue);

// ---- weigh.cu: order, second draw and coefficients of each row's list
struct Weigh {
  int64_t rows;
  const DrawLists* lists;  // on the host
  int32_t capacity;
  float threshold;
  uint32_t first_stream;       // global number of column 0
  bool base_2;                 // the guess is effective_anchor() of it
  const int32_t* target;       // [N]
  const int32_t* role;         // [V]
  const float *lse, *lse_low;  // [N] together lse
  const float *a, *b, *g;      // [N]; b may be null
  LogitTransform<float> transform;
  Kept* kept;           // [N, capacity]: as row_order.cuh has it, the target last; may be the lists' elements
  int32_t* kept_count;  // [N]
  int32_t* column_count;  // [V] += how many rows keep the column; null: not wanted
  int32_t* shown_count;   // outputs of the caller, or null: Buffers::kept_count,
  float* shown_variance;  // Buffers::draw_variance: for now the variance itself, of the drawn columns
  float* square;          // [N] their part of the squared norm; null without shown_variance
  int32_t dense;          // columns, of which shown_count has every one
};
void launch_weigh(const Weigh& w, const Queue& queue);
// variance[row] /= square[row] + the squared norm of the dense columns' part
void launch_relative_variance(const void* dz, DType dtype, int64_t stride, int64_t rows, int64_t dense,
                              const float* dz_unscale, const float* square, float* variance,
                              const Queue& queue);

// ---- hot.cu: columns of which many elements were kept become columns of dz behind the dense ones
struct HotColumns {
  int64_t rows, vocab, dense, hot;
  int32_t* count;         // [V] kept elements; becomes 0 for hot columns
  int32_t* bins;          // [kCountBins] scratch
  int32_t* listed;        // [hot] scratch
  int32_t* listed_count;  // scalar, scratch
  int32_t* columns;       // [hot] ascending, kIgnoredRow behind the last one
  int32_t* role;          // [V] becomes K + its number for hot columns
};
void launch_choose_hot(const HotColumns& h, const Queue& queue);
// Moves elements of hot columns from rows' lists to dz.
struct SpreadHot {
  int64_t rows, dense, hot;
  const int32_t* role;  // [V]
  int32_t capacity;
  Kept* kept;           // [N, capacity]
  int32_t* kept_count;  // [N]
  void* dz;             // [N, hot] columns of the matrix behind the dense ones
  DType dtype;
  int64_t dz_stride;
  const float* scale;  // of what is stored; null: 1
};
void launch_spread_hot(const SpreadHot& s, const Queue& queue);

// ---- column_lists.cu: from lists of rows to lists of columns
struct ColumnLists {
  int64_t rows, vocab, most;
  int32_t capacity;
  const Kept* kept;           // [N, capacity]
  const int32_t* kept_count;  // [N]
  int32_t* column_count;      // [V + 1], the last one 0; becomes 0
  int32_t* column_start;      // [V + 1]
  void* scan;
  size_t scan_bytes;
  KeptRow* by_column;  // [most] in any order within a column
};
void launch_column_lists(const ColumnLists& c, const Queue& queue);

// ---- smoothing.cu: label smoothing's part of dz, c_i w_j, is a product of two vectors
// sum[d] = sum over rows of weight * data, in one order; weight null: 1. parts: [kSumParts, columns] scratch.
inline constexpr int64_t kSumParts = 128;
struct WeightedRows {
  const void* data;
  DType dtype;
  int64_t stride;
  DType operand_dtype;  // to which fp32 data are rounded
  int64_t rows, columns;
  const float* weight;  // [rows] or null
  float* parts;
  float* sum;  // [columns]
};
void launch_weighted_rows(const WeightedRows& w, const Queue& queue);
// sum_j w_j z_ij = (scale * hidden_i . classifier_sum + sum_j w_j bias_j) / T_i, in the first slot
struct WeightedLogits {
  const void* hidden;
  DType hidden_dtype;
  int64_t hidden_stride, rows, columns;
  const float* classifier_sum;      // [columns]
  LogitTransform<float> transform;  // without a softcap
  float* bias_sum;                  // scalar, scratch
  const float* class_weight;        // [V] or null
  int64_t vocab;
  const int32_t* target;  // [rows]: ignored ones are left alone
  float* weighted;        // [rows]
};
void launch_weighted_logits(const WeightedLogits& w, const Queue& queue);
// d_bias[j] += w_j * sum_i c_i
void launch_smooth_bias(const float* c, int64_t rows, const float* class_weight, int64_t vocab, float* d_bias,
                        const Queue& queue);
// A product of two vectors to be added: element (row, d) is row_factor[row] * sum[d]; sum null: nothing.
struct Smoothing {
  const float* row_factor = nullptr;  // null: 1
  const float* sum = nullptr;
};

// ---- gather_hidden.cu: d_hidden_i (+)= sum of value * classifier row
struct GatherHidden {
  int64_t rows, columns, vocab;
  const Kept* kept;
  const int32_t* kept_count;
  int32_t capacity;
  const int32_t* target;  // [N] rows of kIgnoredRow become 0; or null
  const void* classifier;
  DType classifier_dtype;
  int64_t classifier_stride;
  DType operand_dtype;  // to which fp32 rows are rounded
  const void* base;     // [N, columns] to add to, or null
  DType base_dtype;
  int64_t base_stride;
  Smoothing smoothing;
  void* to;
  DType dtype;
  int64_t to_stride;
};
void launch_gather_hidden(const GatherHidden& g, const Queue& queue);

// Columns with more elements are done by several blocks of threads.
inline constexpr int64_t kHeavyColumn = 256;
// ---- order.cu: the lists of columns in the order of rows, which makes sums repeatable
struct OrderLists {
  int64_t rows, vocab;
  const int32_t* column_start;  // [V + 1]
  const KeptRow* by_column;
  KeptRow* sorted;
  int32_t* heavy;  // [most / kHeavyColumn + 1] columns with more than kHeavyColumn elements, in any order
  int32_t* heavy_count;  // scalar, 0 before
  float* d_bias;         // [V] += sums of values, or null
};
void launch_order_lists(const OrderLists& o, const Queue& queue);

// ---- gather_classifier.cu: d_classifier_j (+)= sum of value * hidden row, of the columns that are neither
// dense nor hot
struct GatherClassifier {
  int64_t vocab, columns;
  const int32_t* role;
  const int32_t* column_start;
  const KeptRow* sorted;
  const int32_t* heavy;
  const int32_t* heavy_count;
  const void* hidden;
  DType hidden_dtype;
  int64_t hidden_stride, padded;  // past `columns` and up to padded are zeros
  void* to;
  DType dtype;
  int64_t to_stride;
  bool accumulate;
  Smoothing smoothing;  // row: a column of the vocabulary
};
void launch_gather_classifier(const GatherClassifier& g, const Queue& queue);
// Rows of the dense and hot columns: to[column[k]] = (accumulate ? to : 0) + from[k]
struct ScatterDense {
  const int32_t* column;  // below 0: there is none
  int64_t count, columns;
  const void* from;
  DType from_dtype;
  int64_t from_stride;
  void* to;
  DType dtype;
  int64_t to_stride;
  bool accumulate;
  Smoothing smoothing;  // row: a column of the vocabulary
};
void launch_scatter_dense(const ScatterDense& s, const Queue& queue);

}  // namespace logitless::cuda
