/* Logitless on several ranks that share one head: parallel heads. C ABI, beside logitless.h.
 *
 * The weight is cut along the vocabulary: each rank of a group holds the rows [vocab_start, vocab_start +
 * vocab) of vocab_total. A rank may hold any number of rows, even none. Hidden states, targets, token
 * weights, class weights (for the whole vocabulary) and all options are the same on every rank. All ranks run
 * at the same time. Each gets the loss and the statistics of the whole vocabulary, with the same bits; the
 * gradients of its own rows of the weight and of its bias; and its part of d_hidden, which is a sum over
 * ranks.
 *
 * With several targets a row, each rank knows the targets among its own columns. So an all_reduce makes
 * target_log_probs, in which one rank has the number and the others 0.
 *
 * For each chunk of tokens every rank reduces its logits to a few numbers a row. One all-gather brings the
 * numbers of all ranks to all of them, and each merges them in the order of ranks. So gradients come in the
 * same run as the loss, from kept exponentials where the plan keeps them (three matmuls).
 *
 * Ranks plan alike: with the same options, group_size and group_vocab, plans of one backend on machines of
 * one kind have the same chunks, so the same collectives. logitless_plan_info has their number. A host whose
 * machines differ compares token_chunk of all ranks before the first run.
 *
 * A plan holds its own rank's place, and the exchange of each run brings those of the others; nothing is kept
 * between runs. On the host a run that makes the loss begins with an all-gather of each rank's cut and of
 * digests of its targets and ignored rows. All ranks return the same LOGITLESS_INVALID_ARGUMENT, and none is
 * left waiting, if shards do not follow one another from 0 to one vocab_total, or if targets or ignored rows
 * differ. All return the same LOGITLESS_INVALID_TARGET for a target out of range. CUDA waits for nothing:
 * there, such shards or targets make the loss and the gradients of the rows that count NaN on every rank.
 * Other options, hidden states and weights are not compared. */
#ifndef LOGITLESS_DISTRIBUTED_H_
#define LOGITLESS_DISTRIBUTED_H_

#include <logitless/logitless.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Treatment of the ranks' parts of d_hidden at the end of a run. Sums are in the dtype of d_hidden; they need
 * rows without gaps (d_hidden_stride 0 or hidden) and no accumulation. */
typedef enum logitless_group_d_hidden {
  LOGITLESS_D_HIDDEN_PART = 0,      /* d_hidden is this rank's part */
  LOGITLESS_D_HIDDEN_SUM = 1,       /* the sum, on every rank: all_reduce */
  LOGITLESS_D_HIDDEN_SUM_OF_OWN = 2 /* sequence parallel: reduce_scatter in place. This rank's rows (N / size
                                      rows from rank * N / size on) hold the sum, the others anything. The
                                      number of tokens N is a multiple of the group's size */
} logitless_group_d_hidden;

/* Functions of a communicator. They work on arrays of `count` elements of a logitless_dtype in the memory of
 * the run's device. On CUDA they queue their work on `stream` (a cudaStream_t). On the host stream is null,
 * and they are done when they return. The thread that runs the plan calls them, in the same order and with
 * the same arguments on every rank. They return 0; any other number ends the run with
 * LOGITLESS_COMMUNICATION_FAILED. `host` is the communicator's. */
typedef int32_t (*logitless_all_gather)(const void* send, /* [count]; may be this rank's part of receive */
                                        void* receive,    /* [size, count] in the order of ranks */
                                        int64_t count, int32_t dtype, void* stream, void* host);
typedef int32_t (*logitless_all_reduce)(void* data, /* [count], becomes the sum over ranks */
                                        int64_t count, int32_t dtype, void* stream, void* host);
typedef int32_t (*logitless_reduce_scatter)(const void* send, /* [size, count] */
                                            void* receive, /* [count] this rank's part of the sum over ranks;
                                                              may be this rank's part of send */
                                            int64_t count, int32_t dtype, void* stream, void* host);

/* A rank's place in its group and how it exchanges numbers with the others. */
typedef struct logitless_communicator {
  int32_t rank; /* in [0, size) */
  int32_t size;
  void* host;
  logitless_all_gather all_gather;
  logitless_all_reduce all_reduce; /* null if no plan adds up d_hidden and no run has target_log_probs */
  logitless_reduce_scatter reduce_scatter; /* null if no plan has LOGITLESS_D_HIDDEN_SUM_OF_OWN */
} logitless_communicator;

/* Sets a communicator of one rank, without functions. */
static inline void logitless_communicator_init(logitless_communicator* communicator) {
  /* NOLINTNEXTLINE(modernize-use-nullptr): C has none */
  const logitless_communicator defaults = {0, 1, 0, 0, 0, 0};
  *communicator = defaults;
}

/* Runs a plan with group_size, as logitless_run; every rank of the group calls it. Outputs of a forward pass,
 * including row statistics, belong to the whole vocabulary, and the same ones are null on every rank. The
 * communicator and all that its functions need outlive the run (on CUDA, the queued work). */
LOGITLESS_API logitless_status logitless_run_group(const logitless_plan* plan,
                                                   const logitless_tensor* tensors, size_t tensor_count,
                                                   void* workspace, size_t workspace_bytes, void* stream,
                                                   const logitless_communicator* communicator);

/* Makes a communicator of NCCL. nccl_comm: an ncclComm_t, which the caller keeps and destroys; NCCL gives its
 * rank and size. libnccl.so.2 is opened at run time (LOGITLESS_NCCL_LIBRARY in the environment names another
 * file), so building Logitless needs nothing of NCCL. LOGITLESS_BACKEND_UNAVAILABLE if the library cannot be
 * opened. */
LOGITLESS_API logitless_status logitless_communicator_from_nccl(void* nccl_comm,
                                                                logitless_communicator* communicator);

#ifdef __cplusplus
}
#endif

#endif /* LOGITLESS_DISTRIBUTED_H_ */
