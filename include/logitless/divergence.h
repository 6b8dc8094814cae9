/* Divergences of two heads over one vocabulary, a student's and a teacher's, from their dot products.
 *
 * The caller multiplies hidden states and weights and holds a part of the products at a time. These functions
 * make the rows' divergences from the products, and the gradients of the student's products. For row i and
 * column j, with x the products, b the biases, s the scales, c the softcaps and T the temperature:
 *
 *   z_ij  = t(s x_ij + b_j) / T      t = identity for c = 0, else c tanh(. / c); s, b, c of each head
 *   p, q  = softmax of the student's, the teacher's z_i;   m = (1 - beta) p + beta q
 *   D_i   = KL(q || p) for beta = 0, KL(p || q) for beta = 1,
 *           else beta KL(q || m) + (1 - beta) KL(p || m)
 *   G_ij  = g_i dD_i / d(s x_ij + b_j)   for the student's z alone
 *
 * So the gradient of the student's products is s G, and that of its bias is the sum of G over rows. */
#ifndef LOGITLESS_DIVERGENCE_H_
#define LOGITLESS_DIVERGENCE_H_

#include <logitless/logitless.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum logitless_divergence_stage {
  LOGITLESS_DIVERGENCE_VALUES = 0,   /* all columns: lse, divergence and a row's numbers for the gradient */
  LOGITLESS_DIVERGENCE_GRADIENT = 1, /* any columns: G, from the values of all columns */
  /* Values from parts of the columns, as ranks have them that share a vocabulary. */
  LOGITLESS_DIVERGENCE_SUMS = 2, /* any columns: lse and entropy of their own softmax */
  LOGITLESS_DIVERGENCE_TERMS = 3 /* any columns: their part of student_kl and divergence, from both lse */
} logitless_divergence_stage;

/* Values are merged from parts r of the columns in two steps:
 *
 *   lse     = log sum exp lse_r, for each head
 *   entropy = sum exp(lse_r - lse) (entropy_r + lse - lse_r), for the student
 *
 * and from the terms at this lse the sums of student_kl and of divergence over the parts.
 *
 * One stage's inputs and outputs. All pointers are to memory of the context's device. "stats" is dtype. */
typedef struct logitless_divergence {
  int32_t stage;          /* logitless_divergence_stage */
  int32_t dtype;          /* LOGITLESS_F32 or LOGITLESS_F64: products, biases and numbers of rows */
  int32_t gradient_dtype; /* dtype of G: LOGITLESS_F64 with F64; F32, BF16 or F16 with F32 */
  int64_t rows;
  int64_t columns;    /* of the products, at least 1; 0 also for SUMS (lse -inf) and TERMS (0) */
  double beta;        /* 0, or in [2^-100, 1] */
  double temperature; /* T > 0 */
  double student_scale;
  double student_softcap; /* 0: none */
  double teacher_scale;
  double teacher_softcap;
  const void* student;    /* [rows, columns] stats, x */
  int64_t student_stride; /* elements between rows; 0: columns */
  const void* teacher;    /* [rows, columns] stats */
  int64_t teacher_stride;
  const void* student_bias; /* [columns] stats, null: none */
  const void* teacher_bias;
  /* [rows] stats. VALUES writes all of them, SUMS both lse and entropy, TERMS student_kl and divergence.
   * TERMS reads both lse, and GRADIENT the first three. */
  void* student_lse; /* log sum exp z of the student */
  void* teacher_lse;
  void* student_kl; /* KL(p || m) */
  void* divergence; /* D */
  void* entropy;    /* entropy of p; null: not wanted */
  /* Only for GRADIENT. */
  const void* grad; /* [rows] stats, g; a row with g = 0 has zeros in G, whatever else it holds */
  void* d_logits;   /* [rows, columns] gradient_dtype, G; may be `student` with its stride and dtype */
  int64_t d_logits_stride;
} logitless_divergence;

/* Sets the defaults: temperature and scales are 1, all else is 0. */
static inline void logitless_divergence_init(logitless_divergence* divergence) {
  memset(divergence, 0, sizeof *divergence);
  divergence->temperature = divergence->student_scale = divergence->teacher_scale = 1;
}

/* Runs one stage. Allocates nothing. On CUDA the work is queued on `stream` and not waited for. */
LOGITLESS_API logitless_status logitless_divergence_run(const logitless_context* context,
                                                        const logitless_divergence* divergence, void* stream);

/* Sizes of one pass over both heads: values, gradients from earlier values, or both. A pass is made in tiles.
 * The caller multiplies some rows of hidden states with a window of columns of weights, in float32 (float64),
 * runs a stage over the products, and adds up the products of G with hidden states and weights. */
typedef struct logitless_divergence_problem {
  int32_t pass;          /* logitless_pass: FORWARD makes values, BACKWARD gradients */
  int32_t want_d_hidden; /* gradients of the student that are wanted; 0 or 1 */
  int32_t want_d_weight; /* in a forward pass: later, within the budget */
  int32_t want_d_bias;
  int64_t rows;  /* rows that are computed */
  int64_t vocab; /* columns of both heads, at least 1. Of ranks that share them: the most of any rank, so that
                    all ranks plan alike */
  int64_t ranks; /* whose sums and terms are gathered for each row of a tile of values; 0, 1: none */
  int64_t student_width;
  int64_t teacher_width;
  int32_t student_hidden_dtype; /* LOGITLESS_F64: numbers of rows and products are float64 */
  int32_t student_weight_dtype;
  int32_t student_product_dtype; /* dtype of a product's operands: rows of others are copied into it */
  int32_t teacher_hidden_dtype;
  int32_t teacher_weight_dtype;
  int32_t teacher_product_dtype;
  int32_t rounded_dtype; /* operands are rounded to it before they are copied; LOGITLESS_F32: they are not */
  int32_t gathers_rows;  /* 1: rows are copied from hidden states by an int64 index */
  int32_t copied_biases; /* number of biases that are copied */
  size_t max_workspace_bytes; /* 0, LOGITLESS_FASTEST: as much as is useful */
} logitless_divergence_problem;

/* Tiles and buffers of one pass. Buffers of a tile are: products of both heads; G, unless it has the
 * products' dtype and takes the student's place; copies of operands. A row of a tile takes a multiple of 64
 * elements. */
typedef struct logitless_divergence_tiles {
  int64_t rows;        /* 0: there are no such tiles */
  int64_t window;      /* columns of weights that are copied and multiplied at one time */
  int64_t hidden_sums; /* rows of a buffer for sums of d_hidden; 0: sums are made in d_hidden */
  int64_t weight_sums; /* rows of a buffer for sums of d_weight; 0: sums are made in d_weight */
  size_t workspace_bytes;
} logitless_divergence_tiles;

/* Plans a pass on the context's device. `values` get tiles of whole rows. `gradients` get tiles of windows,
 * or none where tiles of values also make the gradients. A budget that is too small is an error whose
 * required_bytes are enough. */
LOGITLESS_API logitless_status logitless_divergence_plan(const logitless_context* context,
                                                         const logitless_divergence_problem* problem,
                                                         logitless_divergence_tiles* values,
                                                         logitless_divergence_tiles* gradients);

#ifdef __cplusplus
}
#endif

#endif /* LOGITLESS_DIVERGENCE_H_ */
