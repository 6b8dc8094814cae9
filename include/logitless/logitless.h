/* Logitless: the loss of a language model's head and its gradients, without the N x V logits. C ABI.
 *
 *   z_ij   = t(scale * (E_i . C_j) + bias_j) / T_i   t = identity, or softcap * tanh(. / softcap)
 *   lse_i  = log sum_j exp z_ij,  nll_i = lse_i - z_iy,  entropy_i = lse_i - sum_j p_ij z_ij
 *   mean_logit_i = sum_j z_ij / V_total,  log_sum_sq_probs_i = log sum_j p_ij^2,  max_logit_i = max_j z_ij
 *   loss_i = token_weight_i * [ (1 - label_smoothing) * w_y * nll_i
 *            + label_smoothing / V_total * sum_j w_j (lse_i - z_ij) + z_loss * lse_i^2 ]
 *
 * E = hidden [N, D], C = weight [V, D], y = targets [N], w = class weights [V_total] (1 without), T = the
 * temperature: one of all rows, or [N]. All statistics, losses and probabilities are of the logits z.
 * Reductions: none [N]; sum; mean = sum / divisor, the divisor being num_items when it is given, else the sum
 * over valid rows of token_weight_i * w_y (0 / 0 = NaN without any valid row, as in PyTorch). A row whose
 * target is ignore_index is never multiplied: its outputs and its gradient are 0 (its argmax and top_ids -1).
 *
 * With targets_per_row = K a row has K targets y_k (probabilities of a few classes, several right ones) of
 * the weights q_k = target_weight, and all w are 1: nll_i = sum_k q_k (lse_i - z_iy_k), target_logit_i =
 * sum_k q_k z_iy_k. A target of ignore_index is none; a row is ignored where all are. Weights need not sum
 * to 1. Gradients of the K log-probabilities are those of a sum of losses whose weights are -1 times their
 * upstream gradients.
 *
 * Gradients are exact, or sparsified: unbiased, from a few elements of the softmax (docs/sparsified.md).
 * Sparsified keeps every p_ij >= threshold and the target's as they are, and each other element with
 * probability p_ij / threshold at the weight threshold: at most about 1 / threshold elements a row. The loss
 * stays exact.
 *
 * Use: context -> plan -> run. Planning allocates no workspace; running allocates nothing.
 * Every function that can fail returns a logitless_status; logitless_last_error() then holds the calling
 * thread's message, which names the argument, what was expected and what was got. No function exits or
 * throws. A context or plan may be used by several threads at once; buffers and workspace belong to one run
 * at a time.
 *
 * Options and tensors are lists of one line each, options.def and tensors.def: their ids follow from these,
 * and defaults, ranges, shapes, dtypes and meanings stand there. The structs are those of one version of the
 * ABI: logitless_abi_version() is LOGITLESS_ABI_VERSION in a library that fits this header. */
#ifndef LOGITLESS_LOGITLESS_H_
#define LOGITLESS_LOGITLESS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(LOGITLESS_BUILDING) && defined(__GNUC__)
#define LOGITLESS_API __attribute__((visibility("default")))
#else
#define LOGITLESS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version is written here alone: CMake, the Python package and logitless_version() read it. */
#define LOGITLESS_VERSION_MAJOR 0
#define LOGITLESS_VERSION_MINOR 1
#define LOGITLESS_VERSION_PATCH 0

/* Version of structs, ids and functions. A program that loads the library at run time compares it. */
#define LOGITLESS_ABI_VERSION 1

typedef enum logitless_status {
  LOGITLESS_OK = 0,
  LOGITLESS_INVALID_ARGUMENT = 1,
  LOGITLESS_INVALID_TARGET = 2,      /* outside [0, V_total), not ignore_index; nothing was written */
  LOGITLESS_BUDGET_TOO_SMALL = 3,    /* the message names the smallest budget that works */
  LOGITLESS_UNSUPPORTED = 4,         /* no backend of the context can run the problem */
  LOGITLESS_BACKEND_UNAVAILABLE = 5, /* a backend or instruction set asked for by name is not usable here */
  LOGITLESS_OUT_OF_MEMORY = 6,
  LOGITLESS_INTERNAL = 7,
  LOGITLESS_COMMUNICATION_FAILED = 8 /* a function of a communicator failed (distributed.h) */
} logitless_status;

typedef enum logitless_dtype {
  LOGITLESS_F32 = 0,
  LOGITLESS_BF16 = 1,
  LOGITLESS_F16 = 2,
  LOGITLESS_F64 = 3, /* then every tensor and statistic is float64: on CUDA (exact gradients), and on the host
                       by the reference backend; correct and slow */
  LOGITLESS_I32 = 4,
  LOGITLESS_I64 = 5
} logitless_dtype;

typedef enum logitless_reduction {
  LOGITLESS_REDUCTION_NONE = 0,
  LOGITLESS_REDUCTION_SUM = 1,
  LOGITLESS_REDUCTION_MEAN = 2
} logitless_reduction;

typedef enum logitless_pass {
  LOGITLESS_FORWARD = 0,         /* row statistics and losses */
  LOGITLESS_BACKWARD = 1,        /* gradients, from the lse (and entropy) of an earlier forward pass */
  LOGITLESS_FORWARD_BACKWARD = 2 /* both in one run; the only upstream gradient is grad_loss */
} logitless_pass;

typedef enum logitless_gradient {
  LOGITLESS_EXACT = 0, /* the gradient, up to rounding */
  /* An unbiased draw of it, the same bits for the same seed. CUDA: where a flat softmax of the problem's
     sizes would take longer than the exact gradient, as of a small vocabulary, the plan is an exact one. */
  LOGITLESS_SPARSIFIED = 1,
  LOGITLESS_ALWAYS_SPARSIFIED =
      2 /* the same without exact plans: for softmaxes that are known to be peaked */
} logitless_gradient;

typedef enum logitless_plan_kind {
  LOGITLESS_PLAN_FORWARD = 0,      /* loss only, 1F (F = 2NVD FLOP, one matrix product) */
  LOGITLESS_PLAN_WHOLE = 1,        /* all exponentials are kept, 3F */
  LOGITLESS_PLAN_TOKEN_CHUNKS = 2, /* those of a chunk of tokens are kept, 3F */
  LOGITLESS_PLAN_VOCAB_CHUNKS = 3, /* logits are computed again for the gradients, up to 4F */
  LOGITLESS_PLAN_BACKWARD = 4,     /* gradients from a known lse, 3F */
  LOGITLESS_PLAN_SPARSIFIED = 5    /* sparsified gradients, about 1F */
} logitless_plan_kind;

typedef struct logitless_context logitless_context;
typedef struct logitless_plan logitless_plan;

/* A host's own thread pool: call body(task, worker, body_data) once for every task in [0, tasks), workers
 * numbered in [0, threads), no two calls with one worker number at once; return when all are done. In any
 * order and on any number of threads, one too: a call waits only for calls that have begun, and sleeps then.
 */
typedef void (*logitless_task)(int64_t task, int32_t worker, void* body_data);
typedef void (*logitless_parallel_for)(int64_t tasks, logitless_task body, void* body_data, void* pool);

#define LOGITLESS_HOST_MEMORY (-1)

typedef struct logitless_context_options {
  const char* backend; /* "cuda", "cpu" or "reference"; null: the first that can run a problem */
  const char* engine;  /* a backend's set of kernels, such as "avx2", or "sm90", "mma", "portable" of CUDA;
                          null: the best of this machine */
  int32_t threads;     /* 0: as many as the machine (or OMP_NUM_THREADS) gives when the context is made */
  logitless_parallel_for parallel_for; /* null: OpenMP */
  void* pool;                          /* passed to parallel_for */
  int32_t device; /* where buffers are: LOGITLESS_HOST_MEMORY (default), or the ordinal of a CUDA device */
  const char* device_model; /* "h200", "rtx-4090", ...: plans are for such a device, which need not be here,
                               and nothing can be run; null: for the device above */
} logitless_context_options;

#define LOGITLESS_FASTEST ((uint64_t)INT64_MAX) /* a budget that any plan fits */
#define LOGITLESS_DEFAULT_THRESHOLD (1.0 / 512) /* of sparsified gradients */

typedef enum logitless_option_id {
#define LOGITLESS_OPTION(name, NAME) LOGITLESS_OPTION_##NAME,
#include <logitless/options.def>
  LOGITLESS_OPTION_COUNT
} logitless_option_id;

typedef enum logitless_tensor_id {
#define LOGITLESS_TENSOR(name, NAME, ...) LOGITLESS_TENSOR_##NAME,
#include <logitless/tensors.def>
  LOGITLESS_TENSOR_COUNT
} logitless_tensor_id;

/* An option of the problem. Options that are not given have their defaults. */
typedef struct logitless_option {
  int32_t id;      /* logitless_option_id */
  int64_t integer; /* of integers, flags and choices; else 0 */
  double real;     /* of real numbers; else 0 */
} logitless_option;

/* A tensor that a plan is made for. hidden (float32), weight (float32) and targets (int64) always are;
 * the others are where a descriptor says so. What a plan has no descriptor of may be given to a run where its
 * work does not depend on it, as nll. A gradient without a descriptor is neither computed nor allocated. */
typedef struct logitless_tensor_desc {
  int32_t id;         /* logitless_tensor_id */
  int32_t dtype;      /* logitless_dtype, of tensors that may have one of several; else 0 */
  int32_t accumulate; /* gradients: 1 adds to the (float32 or float64) buffer instead of overwriting it */
} logitless_tensor_desc;

/* A tensor of a run. Elements of a row lie next to each other. */
typedef struct logitless_tensor {
  int32_t id;     /* logitless_tensor_id */
  void* data;     /* in the memory of the context's device; inputs are not written to. null: none */
  int64_t stride; /* elements from row to row of hidden, weight and their gradients; 0: tightly packed */
} logitless_tensor;

typedef struct logitless_plan_info {
  int32_t kind; /* logitless_plan_kind */
  int32_t threads;
  uint64_t workspace_bytes; /* beyond inputs and outputs: exact, and all that the run uses */
  double cost_matmuls;      /* work in units of F */
  double predicted_seconds;
  int64_t token_chunk; /* rows whose exponentials are kept at once; 0: none */
  char backend[32];
  char config[128];       /* the kernels' configuration, for people */
  uint64_t draws_bytes;   /* of the tensor draws; 0: not asked for */
  char engine[32];        /* which kernels, by the name that logitless_context_options.engine takes */
  char reason[128];       /* why these, for people */
  int64_t cached_columns; /* the first columns, whose exponentials the gradients are made of; 0: none */
  int64_t vocab_window;   /* columns that are made at once of the others; 0: no such cut */
  int64_t gathers;        /* of a group: all-gathers in a run, of statistics, lse_estimates of lse and cuts */
  uint64_t gathered_bytes; /* that they bring to each rank, its own among them */
  uint64_t reduced_bytes;  /* of d_hidden, which is added up over the group; 0 where it is not */
  char choice[96];         /* why this plan among others, for people; "" where plans are listed */
} logitless_plan_info;

/* A CUDA device. Versions as CUDA counts them: 13000 is 13.0. */
typedef struct logitless_device_info {
  int32_t compute_capability; /* 90 for 9.0 */
  int32_t multiprocessors;
  uint64_t memory_bytes;
  int32_t driver_version;   /* the newest CUDA that the driver supports */
  int32_t runtime_version;  /* of the runtime in the library */
  int64_t cublaslt_version; /* 0: not found */
  char name[128];
  char why_unavailable[256]; /* "": usable */
} logitless_device_info;

LOGITLESS_API const char* logitless_version(void); /* major.minor.patch */
LOGITLESS_API const char* logitless_status_name(logitless_status status);
LOGITLESS_API const char* logitless_plan_kind_name(logitless_plan_kind kind);
LOGITLESS_API int32_t logitless_abi_version(void);
/* The calling thread's last failure; "" before any. Valid until its next failing call. */
LOGITLESS_API const char* logitless_last_error(void);

/* The last failure as data; its texts are valid until the next one. */
typedef struct logitless_error_info {
  int32_t status;       /* logitless_status */
  const char* argument; /* "" where the message is all that is known, as are the next two */
  const char* expected;
  const char* got;
  uint64_t required_bytes; /* of a budget or workspace that is too small: the smallest that works; else 0 */
  int64_t row;             /* of a target that is out of range: its place in targets, row * K + k; else -1 */
} logitless_error_info;
LOGITLESS_API void logitless_last_error_info(logitless_error_info* info);

/* Options and tensors as JSON: {"options": [{"id", "name", "type", "default", "lowest", "highest", "values",
 * "doc"}], "tensors": [{"id", "name", "shape", "dtype", "role", "matrix", "planned", "null", "needed",
 * "doc"}]}. null: when it must be null; needed: when it must not. */
LOGITLESS_API const char* logitless_schema(void);

/* Backends in order of preference, usable or not. */
LOGITLESS_API int32_t logitless_backend_count(void);
LOGITLESS_API const char* logitless_backend_name(int32_t index); /* null past the end */
/* Writes a line about the device, and why the backend is not usable ("" when it is), cut to their sizes. */
LOGITLESS_API logitless_status logitless_backend_info(int32_t index, char* description,
                                                      size_t description_size, char* why_unavailable,
                                                      size_t why_unavailable_size);

/* CUDA devices, usable or not; ordinals are [0, count). Where there are none, *count is 0 and one line says
 * why ("" otherwise), cut to why_none_size. */
LOGITLESS_API logitless_status logitless_device_count(int32_t* count, char* why_none, size_t why_none_size);
LOGITLESS_API logitless_status logitless_device_get_info(int32_t ordinal, logitless_device_info* info);

/* The defaults. */
static inline void logitless_context_options_init(logitless_context_options* options) {
  /* NOLINTNEXTLINE(modernize-use-nullptr): C has none */
  const logitless_context_options defaults = {0, 0, 0, 0, 0, LOGITLESS_HOST_MEMORY, 0};
  *options = defaults;
}

LOGITLESS_API logitless_status
logitless_context_create(const logitless_context_options* options, /* null: defaults */
                         logitless_context** context);
LOGITLESS_API void logitless_context_destroy(logitless_context* context); /* null is fine */

/* The plan that max_workspace_bytes chooses. */
LOGITLESS_API logitless_status logitless_plan_create(const logitless_context* context,
                                                     const logitless_option* options, size_t option_count,
                                                     const logitless_tensor_desc* tensors,
                                                     size_t tensor_count, logitless_plan** plan);
LOGITLESS_API void logitless_plan_destroy(logitless_plan* plan); /* null is fine */
LOGITLESS_API logitless_status logitless_plan_get_info(const logitless_plan* plan, logitless_plan_info* info);
/* All plans considered: writes at most capacity of them and how many there are. */
LOGITLESS_API logitless_status logitless_plan_list(const logitless_context* context,
                                                   const logitless_option* options, size_t option_count,
                                                   const logitless_tensor_desc* tensors, size_t tensor_count,
                                                   logitless_plan_info* infos, int32_t capacity,
                                                   int32_t* count);

/* Runs a plan. workspace: plan's workspace_bytes, 64-byte aligned, in the memory of the context's device.
 * Host memory: stream is null, and targets are checked before anything is written. CUDA: all work is queued
 * on `stream` (a cudaStream_t, null: the default stream); nothing is allocated or waited for, so a CUDA graph
 * can capture it. From the third run with the same pointers on, kernels are queued as CUDA graphs, for which
 * the driver keeps a few MiB of its own; LOGITLESS_CUDA_GRAPHS=0 turns that off where a plan is made. */
LOGITLESS_API logitless_status logitless_run(const logitless_plan* plan, const logitless_tensor* tensors,
                                             size_t tensor_count, void* workspace, size_t workspace_bytes,
                                             void* stream);

/* An upstream gradient that arrives after the run: data[k][i] *= *factor for `count` arrays at once, in
 * place. Nothing is touched when *factor is 1; what is 0 stays 0, so that rows without a target have no
 * gradient where *factor is infinite or NaN, too. data[k]: sizes[k] elements of dtypes[k], a float dtype, in
 * the memory of the context's device, as is factor: float64 where the arrays are float64, which all are or
 * none, else float32. The three arrays themselves are in host memory, and are not read after the call. */
LOGITLESS_API logitless_status logitless_scale_gradients(const logitless_context* context, int32_t count,
                                                         void* const* data, const int32_t* dtypes,
                                                         const int64_t* sizes, const void* factor,
                                                         void* stream);

/* Pieces for a vocabulary cut into shards, on host memory; they read the sizes, dtypes and options of a plan
 * of any of the shards. merge: joins the statistics of `from` (another shard, same rows) into `into`;
 * associative. rebase: changes the logit_offset of the sums to new_max [N] stats >= max (a maximum over all
 * shards), after which sum_exp, target_logit, sum_exp_logit, weighted_logit_sum, logit_sum and sum_sq_exp of
 * all shards add up. loss: from the joined statistics to the losses and what else is told of a whole
 * vocabulary. Needs targets and weights among the tensors. */
LOGITLESS_API logitless_status logitless_row_stats_merge(const logitless_plan* plan,
                                                         const logitless_tensor* from, size_t from_count,
                                                         const logitless_tensor* into, size_t into_count);
LOGITLESS_API logitless_status logitless_row_stats_rebase(const logitless_plan* plan,
                                                          const logitless_tensor* stats, size_t stats_count,
                                                          const void* new_max);
LOGITLESS_API logitless_status logitless_loss_from_row_stats(const logitless_plan* plan,
                                                             const logitless_tensor* tensors,
                                                             size_t tensor_count);

#ifdef __cplusplus
}
#endif
#endif /* LOGITLESS_LOGITLESS_H_ */
