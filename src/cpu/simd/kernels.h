#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "core/divergence.h"
#include "core/dtype.h"
#include "core/logit_transform.h"
#include "core/row_lists.h"
#include "core/sampling.h"

namespace logitless::cpu {

// Facts about an instruction set's kernels that plans need. A build without kernels has these alone.
struct KernelFacts {
  const char* name = "";
  int mr = 0;                // rows of the register tile
  int nr = 0;                // columns of the register tile: two vectors
  int pair = 1;              // elements in a unit
  double gflops_thread = 1;  // rough rate of one thread, for predicted times
};

// make_kernels() compares them with the kernels that it compiles.
inline constexpr KernelFacts kAvx512Bf16{"avx512_bf16", 14, 32, 2, 185};
inline constexpr KernelFacts kAvx512{"avx512", 14, 32, 1, 95};
inline constexpr KernelFacts kAvx2{"avx2", 6, 16, 1, 80};
inline constexpr KernelFacts kNeon{"neon", 12, 8, 1, 30};
inline constexpr KernelFacts kPortable{"portable", 4, 8, 1, 8};
inline constexpr KernelFacts kScalar{"portable", 4, 2, 1, 4};

// All GEMM operands are made of 32-bit *units* along K: one fp32 number, or a pair of bf16 numbers for
// instruction sets with a bf16 dot product. An *element* is what a unit holds: fp32 or bf16.
//   rows operand    a[i * stride + k]            a matrix as it lies in memory
//   columns operand a[k * stride + i]            its transpose, pairs of rows interleaved
//   panels          b[panel][k][nr]              `nr` columns side by side; the vector operand

// One strip of at most `mr` rows against `panels` panels: C[i, panel * nr + j] (+)= sum_k A(i, k) B(k, j).
struct GemmStrip {
  const uint32_t* a = nullptr;
  int64_t a_stride = 0;  // units between rows (rows operand) or between k (columns operand)
  const uint32_t* b = nullptr;
  int64_t b_panel_stride = 0;  // units
  int64_t k = 0;               // units
  int rows = 0;
  int64_t panels = 0;
  float* c = nullptr;
  int64_t c_stride = 0;
  bool add = false;
};

// A matrix in the caller's memory.
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t stride = 0;            // elements
  DType round_to = DType::kF32;  // numbers of other dtypes are rounded to it; kF32 rounds nothing
  bool rounds() const { return round_to != DType::kF32 && round_to != dtype; }
};

// A strip of logits of one vocabulary block, one row after the other with `stride` floats between them.
struct LogitStrip {
  float* z = nullptr;  // in: dot products; scratch of the kernel afterwards
  int64_t stride = 0;
  int rows = 0;
  int64_t columns = 0;                  // without the padding
  int64_t padded_columns = 0;           // the rest of the output rows is set to zero
  const int32_t* target = nullptr;      // [rows, targets] columns of them, negative when not in this block
  const float* class_weight = nullptr;  // [columns], null: all one
  int targets = 1;                      // targets of a row
  // Words of the columns that may be sampled; null: all.
  ColumnMask mask;
  const int64_t* mask_row = nullptr;  // [rows] of the mask
  int64_t mask_column = 0;            // of the strip's column 0 in it, a multiple of 32
};

// Statistics of one block, each [rows] but for target_logit; null where not wanted.
struct BlockStats {
  float* max = nullptr;
  float* sum_exp = nullptr;       // sum exp(z - max)
  float* target_logit = nullptr;  // [rows, targets], written for targets in this block only
  // Statistics relative to max; so is `weighted`: sum w (z - max), for a masked block sum w z.
#define LOGITLESS_MEMBER(name, part, ...) float* part = nullptr;
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  int32_t* argmax = nullptr;  // first column of the maximum
};

// Coefficients of dz = ((p (a + b log p) + c w) - g [target]) t'(z), log p = (z - lse) - lse_residual. Every
// vector is [rows], but g is [rows, targets]. A target that comes several times has the sum each time.
struct StripCoefficients {
  const float* lse = nullptr;
  const float* lse_residual = nullptr;
  const float* a = nullptr;
  const float* b = nullptr;
  const float* c = nullptr;
  const float* g = nullptr;
};

// Turns stored exp logits A = exp(z - max) t'(z) of one strip into dz = factor * A + c w, then writes the
// exact value at the target. dz may lie in place of the exp logits. Both have the strip's stride.
struct FinishStrip {
  const void* exp_logits = nullptr;     // elements
  void* dz = nullptr;                   // elements
  const float* factor = nullptr;        // [rows]
  const float* c = nullptr;             // [rows], null: zero
  const float* target_value = nullptr;  // [rows, targets]
};

// An element of a row or column of a sparse matrix.
struct SparseElement {
  int32_t index = 0;
  float value = 0;
};

// Room for one more vector: lists of elements are written by whole vectors, of 16 lanes at most.
inline constexpr int64_t kVectorRoom = 16;

// One row of logits of one vocabulary block, of which some elements are kept: each with the probability
// min(1, q / threshold), q = exp(z - lse_estimate), by one systematic draw (core/sparsification.h).
struct DrawRow {
  const float* z = nullptr;
  int64_t padded_columns = 0;  // whole vectors, -inf past the end
  float lse_estimate = 0;
  float threshold = 0;
  float offset = 0;            // in (0, 1): where the draw begins
  float* q = nullptr;          // [padded_columns] scratch
  int32_t* columns = nullptr;  // out: ascending; room for a vector more than padded_columns
  float* logits = nullptr;     // out: their z, with the same room
  // Inputs of draw_each_row, which keeps each element by itself where its uniform * threshold < q. `stream`
  // is the stream of column 0.
  uint32_t row_bits = 0, stream = 0;
  uint64_t seed = 0;
};

// One row of logits of one vocabulary block, of which the large ones are wanted.
struct SelectRow {
  const float* z = nullptr;
  int64_t padded_columns = 0;  // whole vectors
  float least = 0;
  int32_t* columns = nullptr;  // out: ascending; room for a vector more than padded_columns
  float* logits = nullptr;     // out: their z, with the same room
};

// One row of logits of one vocabulary block, of which those are wanted whose keys may exceed a known one.
struct SampleLogits {
  const float* z = nullptr;
  int64_t padded_columns = 0;  // whole vectors
  float least = 0;             // least_of_key()
  SampleKey key;
  uint32_t first = 0;          // global column of the first
  int32_t* columns = nullptr;  // out: ascending; room for a vector more than padded_columns
  float* logits = nullptr;     // out: their z, with the same room
};

// sums[0 .. columns) += sum_k rows[k].value * matrix[rows[k].index], in the order of the rows.
struct AddRows {
  MatrixView matrix;
  const SparseElement* rows = nullptr;
  int64_t count = 0;
  int64_t columns = 0;
  float* sums = nullptr;
};

// The kernels of one instruction set and unit.
struct Kernels : KernelFacts {
  void (*gemm_rows)(const GemmStrip&) = nullptr;
  void (*gemm_columns)(const GemmStrip&) = nullptr;
  // Converts the first row to elements, with zeros up to `padded`.
  void (*convert_row)(const MatrixView& source, int64_t count, int64_t padded, void* elements) = nullptr;
  // Packs panels of the transpose: rows [0, rows) become columns, units of `depth` elements along K. Rows are
  // padded with zeros to `panels` panels: [panel][ceil(depth / pair)][nr]
  void (*pack_transposed)(const MatrixView& source, int64_t rows, int64_t depth, int64_t panels,
                          uint32_t* out) = nullptr;
  // Packs panels with K along the rows: [panel][units][width], zero padded to `panels` panels of `width`
  // columns.
  void (*pack_interleaved)(const MatrixView& source, int64_t rows, int64_t columns, int64_t units,
                           int64_t panels, int64_t width, uint32_t* out) = nullptr;
  // Turns dot products into logits and statistics, and writes exp(z - max) t'(z) to `exp_logits` when not
  // null.
  void (*softmax_strip)(const LogitStrip&, const LogitTransform<float>&, const BlockStats&, void* exp_logits,
                        int64_t exp_logits_stride) = nullptr;
  // Turns logits into gradients of the dot products.
  void (*gradient_strip)(const LogitStrip&, const LogitTransform<float>&, const StripCoefficients&, void* dz,
                         int64_t dz_stride) = nullptr;
  void (*finish_strip)(const LogitStrip&, const FinishStrip&) = nullptr;
  // sums[j] += sum_i dz[i, j]
  void (*add_column_sums)(const void* dz, int64_t stride, int64_t rows, int64_t columns,
                          float* sums) = nullptr;
  // out[j] = factor * values[j] (+ out[j]); out is fp32, bf16 or fp16 and is rounded once.
  void (*store_row)(const float* values, int64_t count, float factor, bool add, DType dtype,
                    void* out) = nullptr;
  // out[i] = exp(x[i])
  void (*exp_row)(const float* x, int64_t count, float* out) = nullptr;
  // Returns how many elements were kept.
  int64_t (*draw_row)(const DrawRow&) = nullptr;
  int64_t (*draw_each_row)(const DrawRow&) = nullptr;
  // Selects elements of a row of logits that are not below `least`, NaNs among them; returns how many.
  int64_t (*select_row)(const SelectRow&) = nullptr;
  // Selects elements that may be a row's sample, NaNs among them; returns how many.
  int64_t (*sample_row)(const SampleLogits&) = nullptr;
  void (*add_rows)(const AddRows&) = nullptr;
  // Returns the dot product of the two first rows.
  float (*dot_rows)(const MatrixView& a, const MatrixView& b, int64_t count) = nullptr;
  // Computes one row of a divergence, from float32 products of two heads.
  DivergenceRow divergence = {};
};

inline int64_t element_bytes(const Kernels& k) {
  return 4 / k.pair;
}
// The dtype of an element.
inline DType element_dtype(const Kernels& k) {
  return k.pair == 2 ? DType::kBF16 : DType::kF32;
}

// Kernels compiled in, best first: avx512, avx2, neon, portable.
std::span<const Kernels> fp32_kernels();
// The kernels of the bf16 dot product, null where not compiled in.
const Kernels* bf16_pair_kernels();

// Names of the instruction sets that this machine can run, best first: "avx512_bf16, avx512, avx2, portable".
std::string usable_engines();

// Returns why `engine` (empty: the best) cannot run here; empty when it can.
std::string why_engine_unavailable(const std::string& engine);

// Returns the kernels for the problem's types. An empty `engine` picks the best: bf16 pairs for bf16 inputs
// where their dot product is faster than fp32 arithmetic. "avx512_bf16" means pairs for bf16 inputs and
// avx512 for all others. Writes the reason for the choice to `reason` when it is not null.
const Kernels& select_kernels(const Problem& problem, const std::string& engine,
                              std::string* reason = nullptr);

}  // namespace logitless::cpu
