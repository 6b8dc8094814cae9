/* Logits of a head at some columns of each row, and their gradients, without the other columns.
 *
 * Row i has a list of ids, its candidates: any number of them, in any order, and an id may come several
 * times. The lists are one array of E elements. An element e of row i with the id j has, for hidden states h,
 * weight c, bias b, scale s, softcap k and temperature T:
 *
 *   z_e = t(s (h_i . c_j) + b_j) / T_i      t = identity for k = 0, else k tanh(. / k)
 *
 * With g_e the gradient of a loss by z_e, and u_e = g_e t'(.) / T_i, the second stage makes
 *
 *   d_hidden_i = sum of s u_e c_j over the elements of row i
 *   d_weight_j = sum of s u_e h_i over the elements with the id j,   d_bias_j = sum of u_e over them
 *
 * Each sum has a fixed order, and so the same bits in every run. An element with u_e = 0 adds
 * nothing, whatever its operands hold. Losses over the lists, such as a softmax with a cross entropy, are the
 * caller's.
 *
 * On CUDA, lists that are a large part of the vocabulary are multiplied with the whole weight. Then u is
 * rounded to the operands' format, and a NaN or an infinity of an operand also reaches gradients of other
 * rows. */
#ifndef LOGITLESS_CANDIDATES_H_
#define LOGITLESS_CANDIDATES_H_

#include <logitless/logitless.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum logitless_candidates_stage {
  LOGITLESS_CANDIDATES_LOGITS = 0, /* z of all elements */
  LOGITLESS_CANDIDATES_GRADIENT =
      1 /* gradients of hidden states, weight and bias, as far as they are wanted */
} logitless_candidates_stage;

/* One stage's inputs and outputs. All pointers are to memory of the context's device. "stats" is float64 if
 * hidden is, else float32. Strides are elements between rows; 0: a row's length. dtypes are logitless_dtype.
 */
typedef struct logitless_candidates {
  int32_t stage;        /* logitless_candidates_stage */
  int32_t hidden_dtype; /* any float; LOGITLESS_F64 for all tensors of floats or for none */
  int32_t weight_dtype;
  int32_t bias_dtype;
  int32_t id_dtype;      /* LOGITLESS_I32 or LOGITLESS_I64 */
  int32_t compute_dtype; /* LOGITLESS_BF16 or LOGITLESS_F16: float32 operands are rounded to it;
                            LOGITLESS_F32: not */
  int64_t rows;          /* N */
  int64_t hidden_size;   /* D, at least 1 */
  int64_t vocab;         /* V, at least 1 */
  int64_t elements;      /* E; without offsets a multiple of N, and each row has E / N */
  double scale;
  double softcap;               /* 0: none */
  double temperature;           /* T > 0 */
  int64_t ignore_id;            /* an element with this id is none: z = -inf, and no gradient */
  uint64_t max_workspace_bytes; /* the most bytes of a stage's workspace; 0: as many as are useful */
  const void* hidden;           /* [N, D] */
  int64_t hidden_stride;
  const void* weight; /* [V, D]; the second stage reads it for d_hidden only */
  int64_t weight_stride;
  const void* bias; /* [V], null: none */
  /* [N] stats, null: none. `temperature` is 1 beside it. A row whose own one is out of range has z = NaN. */
  const void* row_temperature;
  const void* ids;        /* [E]: row after row, ids in [0, V) or ignore_id */
  const int64_t* offsets; /* [N + 1]: where rows begin, ascending from 0 to E; null: rows of equal length */
  void* logits;           /* [E] stats, z. With a softcap the second stage reads it */
  /* [2], null: not wanted. CUDA, which cannot check ids before a run: the number of ids out of range, and the
   * first element with one (-1: none). Its z is NaN, and it has no gradient. Wrong offsets make all elements
   * invalid. */
  int64_t* invalid_ids;
  /* Only for the second stage. */
  const void* grad; /* [E] stats, g */
  void* d_hidden;   /* [N, D], null: not wanted */
  int64_t d_hidden_stride;
  void* d_weight; /* [V, D], null: not wanted. To get rows of the ids that occur alone, number those */
  int64_t d_weight_stride;
  void* d_bias; /* [V], null: not wanted */
  int32_t d_hidden_dtype;
  int32_t d_weight_dtype;
  int32_t d_bias_dtype;
  int32_t accumulate_d_weight; /* 1: d_weight is added to, each sum rounded once; 0: it is overwritten */
} logitless_candidates;

/* Sets the defaults: scale and temperature are 1, ignore_id is -1, all else is 0. */
static inline void logitless_candidates_init(logitless_candidates* candidates) {
  memset(candidates, 0, sizeof *candidates);
  candidates->scale = candidates->temperature = 1;
  candidates->ignore_id = -1;
}

/* Writes the bytes of workspace that a stage needs. It reads sizes, dtypes and options, which pointers are
 * null, and how those of matrices are aligned. LOGITLESS_BUDGET_TOO_SMALL: no way to compute the stage fits
 * max_workspace_bytes, and the error's required_bytes is the least that does. */
LOGITLESS_API logitless_status logitless_candidates_workspace_bytes(const logitless_context* context,
                                                                    const logitless_candidates* candidates,
                                                                    size_t* workspace_bytes);

/* Runs one stage in a workspace of the device's memory, aligned to 64 bytes. Allocates nothing. On the host,
 * an id out of range is an error before anything is written. On CUDA the work is queued on `stream` and not
 * waited for. */
LOGITLESS_API logitless_status logitless_candidates_run(const logitless_context* context,
                                                        const logitless_candidates* candidates,
                                                        void* workspace, size_t workspace_bytes,
                                                        void* stream);

#ifdef __cplusplus
}
#endif

#endif /* LOGITLESS_CANDIDATES_H_ */
