/* The random numbers of samples.
 *
 * A sample of a row is the id with the largest key: its logit, or its log-probability, plus its noise. A run
 * with `sampled_ids` makes keys of all columns. This function makes the noise of lists of ids, so that a
 * sample of the ids that top-k or top-p leave is that of all columns where this one is left. */
#ifndef LOGITLESS_SAMPLING_H_
#define LOGITLESS_SAMPLING_H_

#include <logitless/logitless.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All pointers are to memory of the context's device. */
typedef struct logitless_sample_noise {
  int64_t rows;
  int64_t columns;            /* ids of a row */
  int64_t sample;             /* number of the sample, at least 0 */
  int32_t has_seeds_of_rows;  /* 0: the tensor `seed` of a run; 1: its `sample_seed`, and row_numbers are
                                 not read */
  const int64_t* seed;        /* [1] or [rows] */
  const int64_t* row_numbers; /* [rows], at least 0: a row's number in the run; null: 0, 1, 2, ... */
  const int64_t* ids;         /* [rows, columns]; ids outside of [0, 2^31) have numbers without a meaning */
  float* noise;               /* [rows, columns]: -log E for independent exponential numbers E */
} logitless_sample_noise;

/* Writes the noise of lists of ids. A negative number, or a null pointer where there are ids, is
 * LOGITLESS_INVALID_ARGUMENT. On CUDA the work is queued on `stream` and not waited for. */
LOGITLESS_API logitless_status logitless_sample_noise_run(const logitless_context* context,
                                                          const logitless_sample_noise* lists, void* stream);

#ifdef __cplusplus
}
#endif
#endif
