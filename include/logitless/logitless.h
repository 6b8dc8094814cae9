/* Logitless: the loss of a language model's head and its gradients, without the N x V logits. C ABI.
 *
 *   z_ij   = t(scale * (E_i . C_j) + bias_j) / T_i   t = identity, or softcap * tanh(. / softcap)
 *   lse_i  = log sum_j exp z_ij,  nll_i = lse_i - z_iy,  entropy_i = lse_i - sum_j p_ij z_ij
 *   mean_logit_i = sum_j z_ij / V_total,  log_sum_sq_probs_i = log sum_j p_ij^2,  max_logit_i = max_j z_ij
 *   loss_i = token_weight_i * [ (1 - label_smoothing) * w_y * nll_i
 *            + label_smoothing / V_total * sum_j w_j (lse_i - z_ij) + z_loss * lse_i^2 ]
 *
 * E = hidden [N, D], C = weight [V, D], y = targets [N], w = class weights [V_total] (1 without). T is the
 * temperature: one number for all rows, or [N]. All statistics, losses and probabilities belong to the logits
 * z. Reductions: none [N]; sum; mean = sum / divisor. The divisor is num_items when that is given, else the
 * sum over valid rows of token_weight_i * w_y. Without any valid row it is 0 / 0 = NaN, as in PyTorch. A row
 * whose target is ignore_index is never multiplied: its outputs and its gradient are 0 (its argmax, top_ids
 * and sampled_ids -1, its sampled_keys -inf).
 *
 * With targets_per_row = K a row has K targets y_k of the weights q_k = target_weight: probabilities of a few
 * classes, or several right ones. All w are then 1, nll_i = sum_k q_k (lse_i - z_iy_k), and target_logit_i =
 * sum_k q_k z_iy_k. A target of ignore_index counts as none; a row is ignored if all its targets are. Weights
 * need not sum to 1. The gradients of the K log-probabilities are those of a sum of losses whose weights are
 * -1 times the upstream gradients.
 *
 * Gradients are exact or sparsified. Sparsified gradients are unbiased and use few elements of the softmax
 * (docs/sparsified.md). Every p_ij >= threshold and the target's element are kept as they are. Each other
 * element is kept with probability p_ij / threshold, at the weight threshold. So a row keeps at most about
 * 1 / threshold elements. The loss stays exact.
 *
 * Use: context -> plan -> run. Planning allocates no workspace; running allocates nothing.
 * Every function that can fail returns a logitless_status. logitless_last_error() then holds the calling
 * thread's message, which names the argument, what was expected and what was got. No function exits or
 * throws. Several threads may use a context or plan at once; buffers and workspace belong to one run at a
 * time.
 *
 * options.def and tensors.def list the options and tensors, one a line, with defaults, ranges, shapes, dtypes
 * and meanings. Ids follow the order of these lines. The structs belong to one version of the ABI: a library
 * fits this header if its logitless_abi_version() is LOGITLESS_ABI_VERSION. */
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

/* The only place of the version: CMake, the Python package and logitless_version() read it. */
#define LOGITLESS_VERSION_MAJOR 0
#define LOGITLESS_VERSION_MINOR 1
#define LOGITLESS_VERSION_PATCH 0

/* Version of structs, ids and functions, for a program that loads the library at run time to compare. */
#define LOGITLESS_ABI_VERSION 1

typedef enum logitless_status {
  LOGITLESS_OK = 0,
  LOGITLESS_INVALID_ARGUMENT = 1,
  LOGITLESS_INVALID_TARGET = 2,      /* outside [0, V_total), not ignore_index; nothing was written */
  LOGITLESS_BUDGET_TOO_SMALL = 3,    /* the message names the smallest budget that works */
  LOGITLESS_UNSUPPORTED = 4,         /* no backend of the context can run the problem */
  LOGITLESS_BACKEND_UNAVAILABLE = 5, /* the chosen backend or engine cannot be used here */
  LOGITLESS_OUT_OF_MEMORY = 6,
  LOGITLESS_INTERNAL = 7,
  LOGITLESS_COMMUNICATION_FAILED = 8 /* a function of a communicator failed (distributed.h) */
} logitless_status;

typedef enum logitless_dtype {
  LOGITLESS_F32 = 0,
  LOGITLESS_BF16 = 1,
  LOGITLESS_F16 = 2,
  LOGITLESS_F64 = 3, /* every tensor and statistic is then float64; slow. Runs on CUDA (exact gradients), and
                       on the host in the reference backend */
  LOGITLESS_I32 = 4,
  LOGITLESS_I64 = 5,
  LOGITLESS_FP8 = 6 /* e4m3: of no tensor, only a compute_dtype */
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
  /* An unbiased random draw of the gradient; the same seed gives the same bits. On CUDA the plan is an exact
     one if the draw would be slower on a flat softmax of the problem's sizes, as with a small vocabulary. */
  LOGITLESS_SPARSIFIED = 1,
  LOGITLESS_ALWAYS_SPARSIFIED = 2 /* never an exact plan: for softmaxes that are known to be peaked */
} logitless_gradient;

typedef enum logitless_screen {
  LOGITLESS_SCREEN_NONE = 0,
  LOGITLESS_SCREEN_FP8 = 1 /* 8-bit logits choose the elements; kept ones get exact logits */
} logitless_screen;

typedef enum logitless_plan_kind {
  LOGITLESS_PLAN_FORWARD = 0,      /* loss only: one matmul (F = 2NVD FLOP) */
  LOGITLESS_PLAN_WHOLE = 1,        /* keeps all exponentials: three matmuls */
  LOGITLESS_PLAN_TOKEN_CHUNKS = 2, /* keeps the exponentials of a chunk of tokens: three matmuls */
  LOGITLESS_PLAN_VOCAB_CHUNKS =
      3,                       /* computes logits again for the gradients: up to four matmuls, on CPUs five */
  LOGITLESS_PLAN_BACKWARD = 4, /* gradients from a known lse: three matmuls */
  LOGITLESS_PLAN_SPARSIFIED = 5 /* sparsified gradients: about one matmul */
} logitless_plan_kind;

typedef struct logitless_context logitless_context;
typedef struct logitless_plan logitless_plan;

/* A host's own thread pool. It calls body(task, worker, body_data) once for every task in [0, tasks) and
 * returns when all are done. Workers are numbered in [0, threads); two calls never run at once with one
 * number. The order of tasks and the number of threads are free, and one thread is enough: a call waits only
 * for calls that have begun, and sleeps meanwhile. */
typedef void (*logitless_task)(int64_t task, int32_t worker, void* body_data);
typedef void (*logitless_parallel_for)(int64_t tasks, logitless_task body, void* body_data, void* pool);

#define LOGITLESS_HOST_MEMORY (-1)

typedef struct logitless_context_options {
  const char* backend; /* "cuda", "cpu" or "reference"; null: the first that can run a problem */
  const char* engine; /* a backend's set of kernels: "avx2" and others of the CPU, "sm90", "mma" or "portable"
                         of CUDA; null: the best of this machine */
  int32_t threads;    /* 0: as many as the machine (or OMP_NUM_THREADS) gives when the context is made */
  logitless_parallel_for parallel_for; /* null: OpenMP */
  void* pool;                          /* passed to parallel_for */
  int32_t device; /* place of the buffers: LOGITLESS_HOST_MEMORY (default), or the ordinal of a CUDA device */
  const char* device_model; /* "h200", "rtx-4090" and others: plan for such a device, which may be elsewhere,
                               and run nothing; null: plan for the device above */
} logitless_context_options;

#define LOGITLESS_FASTEST ((uint64_t)INT64_MAX) /* a budget that any plan fits */
#define LOGITLESS_DEFAULT_THRESHOLD (1.0 / 512) /* for sparsified gradients */

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

/* An option of the problem. An option that is not given has its default. */
typedef struct logitless_option {
  int32_t id;      /* logitless_option_id */
  int64_t integer; /* value of an integer, flag or choice; else 0 */
  double real;     /* value of a real number; else 0 */
} logitless_option;

/* A tensor that a plan is made for. hidden (float32), weight (float32) and targets (int64) need no
 * descriptor; every other tensor does if the plan's work depends on it. A run also takes tensors without a
 * descriptor on which no work depends, such as nll. A gradient without a descriptor is neither computed nor
 * allocated. */
typedef struct logitless_tensor_desc {
  int32_t id;         /* logitless_tensor_id */
  int32_t dtype;      /* logitless_dtype, for tensors that allow several; else 0 */
  int32_t accumulate; /* gradients: 1 adds to the (float32 or float64) buffer instead of overwriting it */
} logitless_tensor_desc;

/* A tensor of a run. The elements of a row lie next to each other. */
typedef struct logitless_tensor {
  int32_t id;     /* logitless_tensor_id */
  void* data;     /* in the memory of the context's device; null: none. Inputs are not written to */
  int64_t stride; /* elements from row to row of hidden, weight and their gradients; 0: tightly packed */
} logitless_tensor;

/* Facts about a plan. */
typedef struct logitless_plan_info {
  int32_t kind; /* logitless_plan_kind */
  int32_t threads;
  uint64_t workspace_bytes; /* memory beyond inputs and outputs: exact, and all that the run uses */
  double cost_matmuls;      /* work in matmuls of 2NVD FLOP */
  double predicted_seconds;
  int64_t token_chunk; /* rows whose exponentials are kept at one time; 0: none */
  char backend[32];
  char config[128];             /* the kernels' configuration, for people */
  uint64_t saved_bytes;         /* size of the tensor saved; 0: it may be null */
  char engine[32];              /* set of kernels, as logitless_context_options.engine takes it */
  char reason[128];             /* reason for this engine, for people */
  int64_t cached_columns;       /* first columns, whose exponentials stay for the gradients; 0: none */
  int64_t vocab_window;         /* other columns that are computed at one time; 0: all */
  int64_t gathers;              /* all-gathers in a run of a group: of statistics, lse estimates and cuts */
  uint64_t gathered_bytes;      /* bytes that these bring to each rank, its own included */
  uint64_t reduced_bytes;       /* bytes of d_hidden that the group adds up; 0: none */
  char choice[96];              /* reason for this plan among others, for people; "" in a list of plans */
  uint64_t screen_weight_bytes; /* size of the tensor screen_weight; 0: it may be null, and nothing is written
                                   to it */
} logitless_plan_info;

/* A CUDA device. Versions as CUDA counts them: 13000 is 13.0. */
typedef struct logitless_device_info {
  int32_t compute_capability; /* 90 for 9.0 */
  int32_t multiprocessors;
  uint64_t memory_bytes;
  int32_t driver_version;   /* newest CUDA that the driver supports */
  int32_t runtime_version;  /* CUDA runtime in the library */
  int64_t cublaslt_version; /* 0: no cuBLASLt here */
  char name[128];
  char why_unavailable[256]; /* "": usable */
  char record[256]; /* file of the device record that decides its engines and predictions, or "built in"; "":
                       none */
} logitless_device_info;

/* Called with the share of the time that has passed, in [0, 1]. Returns 0 to go on. */
typedef int32_t (*logitless_progress)(double share, void* data);

typedef struct logitless_tune_options {
  int32_t device;       /* ordinal of a CUDA device */
  const int64_t* heads; /* [head_count, 3]: N, V and D of each head; null: five common heads */
  size_t head_count;
  double seconds;   /* time for the measurements, in which every engine runs at least once; 0: 60 */
  const char* path; /* file to write; null: the device's own in the user's folder (logitless_tune) */
  logitless_progress progress; /* null: none */
  void* progress_data;         /* passed to progress */
} logitless_tune_options;

LOGITLESS_API const char* logitless_version(void); /* "major.minor.patch" */
/* Names for people; never null. */
LOGITLESS_API const char* logitless_status_name(logitless_status status);
LOGITLESS_API const char* logitless_plan_kind_name(logitless_plan_kind kind);
/* The LOGITLESS_ABI_VERSION that the library was built with. */
LOGITLESS_API int32_t logitless_abi_version(void);
/* Message of the calling thread's last failure; "" before any. Valid until the thread's next failing call. */
LOGITLESS_API const char* logitless_last_error(void);

/* The last failure as data. Its texts are valid until the next failure. */
typedef struct logitless_error_info {
  int32_t status;       /* logitless_status */
  const char* argument; /* "", as are the next two, if only the message is known */
  const char* expected;
  const char* got;
  uint64_t required_bytes; /* budget, workspace, saved_bytes or screen_weight_bytes that works, if one was
                              refused; else 0 */
  int64_t row;             /* place in targets of one that is out of range, row * K + k; else -1 */
} logitless_error_info;
LOGITLESS_API void logitless_last_error_info(logitless_error_info* info);

/* Returns options and tensors as JSON: {"options": [{"id", "name", "type", "default", "lowest", "highest",
 * "values", "doc"}], "tensors": [{"id", "name", "shape", "dtype", "role", "matrix", "planned", "null",
 * "needed", "doc"}]}. "null" says when a tensor must be null, "needed" when it must not. */
LOGITLESS_API const char* logitless_schema(void);

/* Number and names of the backends, usable or not, in order of preference. */
LOGITLESS_API int32_t logitless_backend_count(void);
LOGITLESS_API const char* logitless_backend_name(int32_t index); /* null past the end */
/* Writes a line about the backend's device, and one that says why it is not usable ("" if it is). Both are
 * cut to the buffers' sizes. */
LOGITLESS_API logitless_status logitless_backend_info(int32_t index, char* description,
                                                      size_t description_size, char* why_unavailable,
                                                      size_t why_unavailable_size);

/* Counts the CUDA devices, usable or not; ordinals are [0, count). Without any, *count is 0 and why_none
 * holds one line with the reason ("" otherwise), cut to why_none_size. */
LOGITLESS_API logitless_status logitless_device_count(int32_t* count, char* why_none, size_t why_none_size);
/* Describes one CUDA device. */
LOGITLESS_API logitless_status logitless_device_get_info(int32_t ordinal, logitless_device_info* info);

/* Measures a CUDA device: loss, exact and sparsified gradients in bf16 with each engine that runs there, the
 * rate of matrix products and that of a copy. Writes a device record as JSON and gives its text in *record,
 * which is valid until the thread's next call of this function. Processes that start later choose engines and
 * predict times by the record of a device of this name, compute capability and number of multiprocessors.
 * Records are read from the folder LOGITLESS_DEVICE_RECORDS, else XDG_CONFIG_HOME/logitless/devices, else
 * HOME/.config/logitless/devices; LOGITLESS_DEVICE_RECORDS= reads none. Ranks of a group plan without
 * records. Heads that do not fit the device's free memory are left out. If a call fails, no file is changed.
 */
LOGITLESS_API logitless_status logitless_tune(const logitless_tune_options* options, const char** record);

/* Sets the defaults: the first backend that can run a problem, on host memory. */
static inline void logitless_context_options_init(logitless_context_options* options) {
  /* NOLINTNEXTLINE(modernize-use-nullptr): C has none */
  const logitless_context_options defaults = {0, 0, 0, 0, 0, LOGITLESS_HOST_MEMORY, 0};
  *options = defaults;
}

/* Creates a context: the backend, device and threads that plans are made for. A plan does not need its
 * context any more. */
LOGITLESS_API logitless_status
logitless_context_create(const logitless_context_options* options, /* null: defaults */
                         logitless_context** context);
LOGITLESS_API void logitless_context_destroy(logitless_context* context); /* null is fine */

/* Makes the plan that max_workspace_bytes chooses (options.def). LOGITLESS_BUDGET_TOO_SMALL if none fits. */
LOGITLESS_API logitless_status logitless_plan_create(const logitless_context* context,
                                                     const logitless_option* options, size_t option_count,
                                                     const logitless_tensor_desc* tensors,
                                                     size_t tensor_count, logitless_plan** plan);
LOGITLESS_API void logitless_plan_destroy(logitless_plan* plan); /* null is fine */
LOGITLESS_API logitless_status logitless_plan_get_info(const logitless_plan* plan, logitless_plan_info* info);
/* Lists all plans considered. Writes at most `capacity` of them to `infos`, and their number to *count. */
LOGITLESS_API logitless_status logitless_plan_list(const logitless_context* context,
                                                   const logitless_option* options, size_t option_count,
                                                   const logitless_tensor_desc* tensors, size_t tensor_count,
                                                   logitless_plan_info* infos, int32_t capacity,
                                                   int32_t* count);

/* Runs a plan. workspace: at least the plan's workspace_bytes, 64-byte aligned, in the memory of the
 * context's device. Host memory: stream is null, and targets are checked before anything is written. CUDA:
 * all work is queued on `stream` (a cudaStream_t; null: the default stream). Nothing is allocated or waited
 * for, so a CUDA graph can capture the run. From the third run with the same pointers on, kernels are queued
 * as CUDA graphs, for which the driver keeps a few MiB of its own. LOGITLESS_CUDA_GRAPHS=0 in the environment
 * turns that off for plans made from then on. */
LOGITLESS_API logitless_status logitless_run(const logitless_plan* plan, const logitless_tensor* tensors,
                                             size_t tensor_count, void* workspace, size_t workspace_bytes,
                                             void* stream);

/* Applies an upstream gradient that arrives after the run: data[k][i] *= *factor for `count` arrays at once,
 * in place. Nothing is touched if *factor is 1. A 0 stays 0, so that rows without a target have no gradient
 * even if *factor is infinite or NaN. data[k] holds sizes[k] elements of dtypes[k], a float dtype. It and
 * factor are in the memory of the context's device. Either all arrays are float64, and so is factor, or none
 * is, and factor is float32. The arrays data, dtypes and sizes are in host memory and are not read after the
 * call. */
LOGITLESS_API logitless_status logitless_scale_gradients(const logitless_context* context, int32_t count,
                                                         void* const* data, const int32_t* dtypes,
                                                         const int64_t* sizes, const void* factor,
                                                         void* stream);

/* Pieces for a vocabulary cut into shards, on host memory. They read the sizes, dtypes and options of a plan
 * of any of the shards.
 * merge: joins the statistics of `from` (another shard, same rows) into `into`; associative.
 * rebase: moves the sums from the maximum `max` to new_max [N] stats >= max, a maximum over all shards. The
 * shards' sum_exp, target_logit, sum_exp_logit, weighted_logit_sum, logit_sum and sum_sq_exp then add up.
 * loss: makes the losses and the other outputs of a whole vocabulary from the merged statistics. Its tensors
 * include targets and weights. */
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
