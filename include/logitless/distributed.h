/* Logitless on several ranks that share one head: parallel heads. C ABI, beside logitless.h.
 *
 * The weight is cut along the vocabulary: each rank of a group holds the rows [vocab_start, vocab_start +
 * vocab) of vocab_total, of any number, none too. Hidden states, targets, class weights (of all of the
 * vocabulary) and weights of tokens are the same on every rank, as are all options. A run of every rank at
 * the same time gives the loss and the statistics of the whole vocabulary, with the same bits on all of them;
 * the gradients of the rank's own rows of the weight and of its bias; and its part of d_hidden, which is
 * a sum over ranks.
 *
 * Of several targets a row each rank knows those of its own columns: target_log_probs of all of them are an
 * all_reduce, in which one rank has the number and the others 0.
 *
 * Of a chunk of tokens every rank reduces its logits to a few numbers a row, one all-gather brings those of
 * all ranks to all of them, and each merges them in the order of ranks. So gradients come in the same run as
 * the loss, from kept exponentials where the plan keeps them (3 products).
 *
 * Ranks plan alike: with group_size, the same options and group_vocab, plans of one backend on machines of
 * one kind have the same chunks, and with that the same collectives. logitless_plan_info has their number; a
 * host whose machines differ compares token_chunk of all ranks before the first run.
 *
 * A run keeps nothing of the ranks: its plan says where its own rows lie, and the exchange tells the others.
 * On the host a run that makes the loss begins with an all-gather of each rank's cut and of digests of its
 * targets and of the rows that it ignores. All ranks return the same LOGITLESS_INVALID_ARGUMENT, and none is
 * left waiting, where shards do not follow one another from 0 to one vocab_total, or where targets or
 * ignored rows differ. All return the same LOGITLESS_INVALID_TARGET for a target out of range. On CUDA, where
 * nothing is waited for, other shards or targets make the loss and the gradients of the rows that count NaN
 * on every rank. Other options, hidden states and weights are not compared. */
#ifndef LOGITLESS_DISTRIBUTED_H_
#define LOGITLESS_DISTRIBUTED_H_

#include <logitless/logitless.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What becomes of the ranks' parts of d_hidden at the end of a run. Sums need rows without gaps
 * (d_hidden_stride 0 or hidden) and no accumulation; they are in the dtype of d_hidden. */
typedef enum logitless_group_d_hidden {
  LOGITLESS_D_HIDDEN_PART = 0,      /* d_hidden is this rank's part */
  LOGITLESS_D_HIDDEN_SUM = 1,       /* the sum, on every rank: all_reduce */
  LOGITLESS_D_HIDDEN_SUM_OF_OWN = 2 /* sequence parallel: reduce_scatter in place. Of the rows that are this
                                      rank's (rank * N / size and the next N / size) the sum; the others hold
                                      anything. The number of tokens N is a multiple of the group's size */
} logitless_group_d_hidden;

/* The functions of a communicator work on arrays of `count` elements of a logitless_dtype in the memory of
 * the run's device. On CUDA they queue their work on `stream` (a cudaStream_t); on the host, where stream is
 * null, they are done when they return. They are called by the thread that runs the plan, in the same order
 * and with the same arguments on every rank, and return 0, or anything else to end the run with
 * LOGITLESS_COMMUNICATION_FAILED. `host` is the communicator's. */
typedef int32_t (*logitless_all_gather)(const void* send, /* [count]; may be this rank's part of receive */
                                        void* receive,    /* [size, count] in the order of ranks */
                                        int64_t count, int32_t dtype, void* stream, void* host);
typedef int32_t (*logitless_all_reduce)(void* data, /* [count], becomes the sum over ranks */
                                        int64_t count, int32_t dtype, void* stream, void* host);
typedef int32_t (*logitless_reduce_scatter)(const void* send, /* [size, count] */
                                            void* receive, /* [count] the sum of all ranks' part of this rank;
                                                              may be this rank's part of send */
                                            int64_t count, int32_t dtype, void* stream, void* host);

typedef struct logitless_communicator {
  int32_t rank; /* in [0, size) */
  int32_t size;
  void* host;
  logitless_all_gather all_gather;
  logitless_all_reduce all_reduce; /* null where no plan adds up d_hidden and no run has target_log_probs */
  logitless_reduce_scatter reduce_scatter; /* null where no plan asks for it */
} logitless_communicator;

/* A communicator of one rank without functions. */
static inline void logitless_communicator_init(logitless_communicator* communicator) {
  /* NOLINTNEXTLINE(modernize-use-nullptr): C has none */
  const logitless_communicator defaults = {0, 1, 0, 0, 0, 0};
  *communicator = defaults;
}

/* As logitless_run, of a plan with group_size, by every rank of the group. Outputs of a forward pass, row
 * statistics among them, are those of the whole vocabulary, and the same ones are null on every rank. The
 * communicator and what its functions need outlive the run (on CUDA, what was queued). */
LOGITLESS_API logitless_status logitless_run_group(const logitless_plan* plan,
                                                   const logitless_tensor* tensors, size_t tensor_count,
                                                   void* workspace, size_t workspace_bytes, void* stream,
                                                   const logitless_communicator* communicator);

/* A communicator of NCCL: its functions are those of libnccl.so.2, opened at run time (LOGITLESS_NCCL_LIBRARY
 * in the environment names another file), of which nothing is needed to build Logitless. nccl_comm: an
 * ncclComm_t of the caller, who keeps and destroys it; its rank and size are asked for.
 * LOGITLESS_BACKEND_UNAVAILABLE where the library cannot be opened. */
LOGITLESS_API logitless_status logitless_communicator_from_nccl(void* nccl_comm,
                                                                logitless_communicator* communicator);

#ifdef __cplusplus
}
#endif

#endif /* LOGITLESS_DISTRIBUTED_H_ */
