/* Logitless: the loss of a language model's head and its gradients, without the N x V logits. C ABI.
 *
 *   z_ij   = t(scale * (E_i . C_j) + bias_j) / T_i   t = identity, or softcap * tanh(. / softcap)
 *   lse_i  = log sum_j exp z_ij,  nll_i = lse_i - z_iy,  entropy_i = lse_i - sum_j p_ij z_ij
 *   mean_logit_i = sum_j z_ij / V_total,  log_sum_sq_probs_i = log sum_j p_ij^2,  max_logit_i = max_j z_ij
 *   loss_i = token_weight_i * [ (1 - label_smoothing) * w_y * nll_i
 *            + label_smoothing / V_total * sum_j w_j (lse_i - z_ij) + z_loss * lse_i^2 ]
 *
 * E = hidden [N, D], C = classifier [V, D], y = targets [N], w = class weights [V_total] (1 without), T = the
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
 * Gradients are exact, or thinned: unbiased, from a few elements of the softmax (docs/thinning.md). Thinned
 * keeps every p_ij >= threshold and the target's as they are, and each other element with probability
 * p_ij / threshold at the weight threshold: at most about 1 / threshold elements a row. The loss stays exact.
 *
 * Use: context -> plan -> run. Planning allocates no workspace; running allocates nothing.
 * Every function that can fail returns a logitless_status; logitless_last_error() then holds the calling
 * thread's message, which names the argument, what was expected and what was got. No function exits or
 * throws. A context or plan may be used by several threads at once; buffers and workspace belong to one run
 * at a time.
 *
 * Structs begin with struct_size, which the caller sets to sizeof the struct it was compiled with (the _init
 * functions do, which are compiled into the caller); fields that a caller does not know keep their defaults,
 * larger sizes than the library's are refused, and so are those that end inside a field. */
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
                       by the reference backend; correct and slow (gradients 1F more than below) */
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
  LOGITLESS_THINNED = 1,
  LOGITLESS_ALWAYS_THINNED = 2 /* the same without exact plans: for softmaxes that are known to be peaked */
} logitless_gradient;

typedef enum logitless_plan_kind {
  LOGITLESS_PLAN_FORWARD = 0,      /* loss only, 1F (F = 2NVD FLOP, one matrix product) */
  LOGITLESS_PLAN_WHOLE = 1,        /* all exponentials are kept, 3F */
  LOGITLESS_PLAN_TOKEN_CHUNKS = 2, /* those of a chunk of tokens are kept, 3F */
  LOGITLESS_PLAN_VOCAB_CHUNKS = 3, /* logits are computed again for the gradients, up to 4F */
  LOGITLESS_PLAN_BACKWARD = 4,     /* gradients from a known lse, 3F */
  LOGITLESS_PLAN_THINNED = 5       /* thinned gradients, about 1F */
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
  size_t struct_size;
  const char* backend; /* "cuda", "cpu" or "reference"; null: the first that can run a problem */
  const char* isa;     /* instruction set of the CPU backend, or implementation of the CUDA backend ("sm90",
                          "mma", "portable"), by name; null: the best of this machine */
  int32_t threads;     /* 0: as many as the machine (or OMP_NUM_THREADS) gives when the context is made */
  logitless_parallel_for parallel_for; /* null: OpenMP */
  void* pool;                          /* passed to parallel_for */
  int32_t device; /* where buffers are: LOGITLESS_HOST_MEMORY (default), or the ordinal of a CUDA device */
  const char* device_model; /* "h200", "rtx-4090", ...: plans are for such a device, which need not be here,
                               and nothing can be run; null: for the device above */
} logitless_context_options;

#define LOGITLESS_FASTEST ((uint64_t)INT64_MAX) /* a budget that any plan fits */
#define LOGITLESS_DEFAULT_THRESHOLD (1.0 / 512) /* of thinned gradients; Python's is the same */

/* What to compute. Dimensions in elements; flags are 0 or 1. */
typedef struct logitless_problem {
  size_t struct_size;
  int32_t pass;         /* logitless_pass */
  int32_t reduction;    /* logitless_reduction; default mean */
  int64_t tokens;       /* N >= 0 */
  int64_t vocab;        /* V >= 1, rows of the classifier at hand */
  int64_t hidden;       /* D >= 1 */
  int64_t vocab_start;  /* a shard holds the ids [vocab_start, vocab_start + vocab) of vocab_total */
  int64_t vocab_total;  /* 0: vocab, the whole vocabulary. Targets are always global ids */
  int32_t hidden_dtype; /* logitless_dtype, any float; default float32, as are the others */
  int32_t classifier_dtype;
  int32_t bias_dtype;
  int32_t target_dtype;   /* LOGITLESS_I32 or LOGITLESS_I64 (default) */
  int32_t d_hidden_dtype; /* dtype of the gradient's buffer, any float: rounded once from fp32 */
  int32_t d_classifier_dtype;
  int32_t d_bias_dtype;
  int32_t has_bias;
  int32_t has_class_weight;
  int32_t has_token_weight;
  double scale;   /* default 1; without float64 operands |scale| <= 2^126, below 2^-126 it counts as 0 */
  double softcap; /* 0 (default): none; without float64 operands in [2^-126, 2^126] */
  double label_smoothing; /* [0, 1] */
  double z_loss;          /* factor of lse^2 */
  double num_items;       /* divisor of the mean; 0 (default): the weights of the valid rows */
  int64_t ignore_index;   /* default -100 */
  int64_t shift; /* >= 0: row s of a sequence predicts its target s + shift; rows without one are ignored */
  int64_t sequence_length; /* tokens is a multiple of it; 0: all tokens are one sequence */
  int32_t want_entropy;
  int32_t want_argmax;   /* argmax and correct_count */
  int32_t want_d_hidden; /* a gradient that is not wanted is neither computed nor allocated */
  int32_t want_d_classifier;
  int32_t want_d_bias;
  int32_t has_grad_nll; /* backward only: further upstream gradients */
  int32_t has_grad_lse;
  int32_t has_grad_entropy;
  int32_t accumulate_d_hidden; /* add to the (float32) buffer instead of overwriting it */
  int32_t accumulate_d_classifier;
  int32_t accumulate_d_bias;
  int32_t unaligned_rows; /* CUDA: 1 where a row of hidden, classifier or d_hidden is a multiple of 16 bytes
                             long but does not begin at one */
  uint64_t max_workspace_bytes; /* hard: the fastest plan within it. 0 (default): the smallest within 3% of
                                   the fastest, and up to 6% to keep to tokens x vocab bytes (a quarter of the
                                   float32 logits; group_vocab in a group) and 64 MiB. LOGITLESS_FASTEST */
  int32_t gradient;             /* logitless_gradient; default exact */
  int32_t keeps_draws;   /* thinned: a forward pass writes buffers' draws, a backward pass reads them */
  double threshold;      /* thinned: in [2^-126, 1]; default LOGITLESS_DEFAULT_THRESHOLD */
  int64_t seed;          /* thinned */
  int32_t compute_dtype; /* LOGITLESS_BF16 or LOGITLESS_F16: hidden and classifier are rounded to it on their
                            way into the products, a part at a time; gradients keep their dtypes.
                            LOGITLESS_F32 (0, default): operands as they are. Not with float64 */
  int32_t allow_tf32;    /* CUDA: 1 permits products of float32 operands to round these to TF32 (10 bits of
                            mantissa), at several times the speed; other backends have no use for it */
  int32_t has_temperature; /* 1: buffers' temperature, one a row, in the place of the one below (then 1) */
  double temperature;      /* T > 0, default 1; T and softcap / T in [2^-126, 2^126] (with float64 operands
                              [2^-1022, 2^1022]), |scale| / T no more than that */
  int32_t want_mean_logit;
  int32_t want_log_sum_sq_probs;
  int32_t has_grad_target_logit; /* backward only, as has_grad_nll */
  int32_t batch_invariant; /* 1: the bits of a row's statistics do not depend on other rows, its place, the
                              budget, the plan or the pass. d_hidden's may. Not with thinned gradients */
  int64_t top_k;      /* forward passes: so many of the largest logits of each row, at most 64 and vocab (of a
                         group vocab_total); 0 (default): none. Not of a shard on its own, or with keeps_draws */
  int32_t group_size; /* >= 1: a shard of so many ranks (distributed.h), vocab may be 0; 0 (default): none */
  int32_t group_d_hidden;  /* logitless_group_d_hidden, of a group */
  int64_t group_vocab;     /* rows of the group's largest shard; 0 (default): vocab */
  int64_t targets_per_row; /* K: the targets of a row, at most 64; 0 (default): one, without a weight of its
                              own. Not of a shard on its own, with class weights or thinned gradients */
} logitless_problem;

/* Pointers of one run; null where not needed. "stats" is float32 (float64 when hidden is float64). Rows are
 * contiguous; strides between rows in elements, 0: tightly packed. */
typedef struct logitless_buffers {
  size_t struct_size;
  const void* hidden; /* [N, D] */
  int64_t hidden_stride;
  const void* classifier; /* [V, D] */
  int64_t classifier_stride;
  const void* bias;         /* [V] */
  const void* targets;      /* [N], or [N, targets_per_row] */
  const void* class_weight; /* [V_total] stats */
  const void* token_weight; /* [N] stats */
  const void* grad_loss;    /* scalar, or [N] with reduction none; stats; null: 1 */
  const void* grad_nll;     /* [N] stats */
  const void* grad_lse;     /* [N] stats */
  const void* grad_entropy; /* [N] stats */
  /* Row statistics, outputs of a forward pass, as are logit_sum and sum_sq_exp below. Required of a shard:
   * logitless_row_stats_merge, or _rebase and a sum, joins several before logitless_loss_from_row_stats. */
  void* max;                /* [N] stats: max_j z_ij */
  void* sum_exp;            /* [N] stats: sum_j exp(z_ij - max_i) */
  void* target_logit;       /* [N] stats: z_iy, 0 where y is in another shard */
  void* sum_exp_logit;      /* [N] stats: sum_j exp(z_ij - max_i) z_ij; only with want_entropy */
  void* weighted_logit_sum; /* [N] stats: sum_j w_j z_ij; only with label smoothing */
  /* Losses, outputs of a forward pass over a whole vocabulary. */
  void* loss;             /* scalar, or [N] with reduction none; stats */
  void* nll;              /* [N] stats; -nll is the target's log probability */
  void* lse;              /* [N] stats; INPUT of a backward pass */
  void* entropy;          /* [N] stats; INPUT of a backward pass with grad_entropy */
  int64_t* argmax;        /* [N] global id of the largest logit (the first of equals) */
  int64_t* correct_count; /* scalar: rows whose argmax is their target */
  int64_t* valid_count;   /* scalar: rows that are not ignored */
  /* Gradients. Those of a shard: d_hidden is the shard's part of a sum over shards, the others are its own.
   */
  void* d_hidden; /* [N, D] */
  int64_t d_hidden_stride;
  void* d_classifier; /* [V, D]; on the CPU also scratch before: it must not overlap an input */
  int64_t d_classifier_stride;
  void* d_bias; /* [V] */
  /* CUDA only, where targets cannot be refused before the run: [2] how many targets are out of range, and the
   * first row with one (-1 without). Such a row's losses are NaN (so is a reduced loss), its gradient is 0.
   */
  int64_t* invalid_targets;
  const void* num_items; /* scalar stats: the mean's divisor, in place of the problem's num_items */
  /* Thinned gradients only; the counts and variances not in a group of ranks. */
  void* draws; /* draws_bytes, 64-byte aligned, with keeps_draws: OUTPUT of a forward pass, INPUT of backward
                  passes of the same sizes, options, threshold and seed */
  const void* seed;    /* scalar int64 in place of the problem's seed, where the workspace is */
  int32_t* kept_count; /* [N] elements of a row's gradient, with its target and a device's dense columns */
  void* draw_variance; /* [N] stats: estimated variance of the drawn row of dz over its squared norm */
  void* lse_low; /* [N] stats: log sum_j exp z_ij - lse_i, what rounding took off. OUTPUT of a forward pass,
                    INPUT of a backward pass, or probabilities are off by half a unit in lse's last place */
  const void* temperature; /* [N] stats, with has_temperature, of every pass. Outside of [2^-126, 2^126] (with
                              float64 operands [2^-1022, 2^1022]) all of a row that is not ignored is NaN */
  const void* grad_target_logit; /* [N] stats, with has_grad_target_logit */
  void* logit_sum;  /* [N] stats: sum_j z_ij; only with want_mean_logit. A row statistic, as sum_exp */
  void* sum_sq_exp; /* [N] stats: sum_j exp(z_ij - max_i)^2; only with want_log_sum_sq_probs; the same */
  void* mean_logit; /* [N] stats, with want_mean_logit. Outputs of a whole vocabulary, as nll */
  void* log_sum_sq_probs; /* [N] stats, with want_log_sum_sq_probs */
  void* max_logit;        /* [N] stats; as max, but 0 in ignored rows */
  uint8_t* is_top1;       /* [N] 1 where the target is the argmax, else 0; only with want_argmax */
  /* The largest logits of each row in descending order, of equals the smaller id first, a NaN before all
   * numbers. Rows of an ignored target hold -1 and 0. Only with top_k. */
  int64_t* top_ids;    /* [N, top_k] global ids */
  void* top_log_probs; /* [N, top_k] stats: z_ij - lse_i */
  /* Only with targets_per_row. The weights of a row are found where its targets are, after the shift. */
  const void* target_weight; /* [N, targets_per_row] stats, of every pass; null: ones */
  void* target_log_probs; /* [N, targets_per_row] stats: z_ij - lse_i of each target, an output of a forward
                             pass; 0 where the target is ignore_index, and in ignored rows */
} logitless_buffers;

typedef struct logitless_plan_info {
  size_t struct_size;
  int32_t kind; /* logitless_plan_kind */
  int32_t threads;
  uint64_t workspace_bytes; /* beyond inputs and outputs: exact, and all that the run uses */
  double cost_f;            /* work in units of F */
  double predicted_seconds;
  int64_t token_chunk; /* rows whose exponentials are kept at once; 0: none */
  char backend[32];
  char config[128];        /* the kernels' configuration, for people */
  uint64_t draws_bytes;    /* of buffers' draws; 0: not asked for */
  char implementation[32]; /* which kernels, by the name that logitless_context_options.isa takes */
  char reason[128];        /* why these, for people */
  int64_t kept_columns;    /* the first columns, whose exponentials the gradients are made of; 0: none */
  int64_t vocab_window;    /* columns that are made at once of the others; 0: no such cut */
  int64_t gathers;         /* of a group: all-gathers in a run, of statistics, guesses of lse and cuts */
  uint64_t gathered_bytes; /* that they bring to each rank, its own among them */
  uint64_t reduced_bytes;  /* of d_hidden, which is added up over the group; 0 where it is not */
  char choice[96];         /* why this plan among others, for people; "" where plans are listed */
} logitless_plan_info;

/* A CUDA device. Versions as CUDA counts them: 13000 is 13.0. */
typedef struct logitless_device_info {
  size_t struct_size;
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
/* The calling thread's last failure; "" before any. Valid until its next failing call. */
LOGITLESS_API const char* logitless_last_error(void);

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

/* Set struct_size and the defaults of the caller's fields. struct_size is sizeof the struct that the caller
 * was compiled with: nothing past it is written, and nothing at all where it is too small to hold struct_size
 * itself. The functions below, compiled into the caller, pass it; other languages call these. */
LOGITLESS_API void logitless_context_options_init_sized(logitless_context_options* options,
                                                        size_t struct_size);
LOGITLESS_API void logitless_problem_init_sized(logitless_problem* problem, size_t struct_size);
LOGITLESS_API void logitless_buffers_init_sized(logitless_buffers* buffers, size_t struct_size);
LOGITLESS_API void logitless_plan_info_init_sized(logitless_plan_info* info, size_t struct_size);
LOGITLESS_API void logitless_device_info_init_sized(logitless_device_info* info, size_t struct_size);

static inline void logitless_context_options_init(logitless_context_options* options) {
  logitless_context_options_init_sized(options, sizeof *options);
}
static inline void logitless_problem_init(logitless_problem* problem) {
  logitless_problem_init_sized(problem, sizeof *problem);
}
static inline void logitless_buffers_init(logitless_buffers* buffers) {
  logitless_buffers_init_sized(buffers, sizeof *buffers);
}
static inline void logitless_plan_info_init(logitless_plan_info* info) {
  logitless_plan_info_init_sized(info, sizeof *info);
}
static inline void logitless_device_info_init(logitless_device_info* info) {
  logitless_device_info_init_sized(info, sizeof *info);
}

LOGITLESS_API logitless_status
logitless_context_create(const logitless_context_options* options, /* null: defaults */
                         logitless_context** context);
LOGITLESS_API void logitless_context_destroy(logitless_context* context); /* null is fine */

/* The plan that max_workspace_bytes chooses. */
LOGITLESS_API logitless_status logitless_plan_create(const logitless_context* context,
                                                     const logitless_problem* problem, logitless_plan** plan);
LOGITLESS_API void logitless_plan_destroy(logitless_plan* plan); /* null is fine */
LOGITLESS_API logitless_status logitless_plan_get_info(const logitless_plan* plan, logitless_plan_info* info);
/* All plans considered: writes at most capacity of them (infos[0].struct_size set) and how many there are. */
LOGITLESS_API logitless_status logitless_plan_list(const logitless_context* context,
                                                   const logitless_problem* problem,
                                                   logitless_plan_info* infos, int32_t capacity,
                                                   int32_t* count);

/* Runs a plan. workspace: plan's workspace_bytes, 64-byte aligned, in the memory of the context's device.
 * Host memory: stream is null, and targets are checked before anything is written. CUDA: all work is queued
 * on `stream` (a cudaStream_t, null: the default stream); nothing is allocated or waited for, so a CUDA graph
 * can capture it. From the third run with the same pointers on, kernels are queued as CUDA graphs, for which
 * the driver keeps a few MiB of its own; LOGITLESS_CUDA_GRAPHS=0 turns that off where a plan is made. */
LOGITLESS_API logitless_status logitless_run(const logitless_plan* plan, const logitless_buffers* buffers,
                                             void* workspace, size_t workspace_bytes, void* stream);

/* An upstream gradient that arrives after the run: data[k][i] *= *factor for `count` arrays at once, in
 * place. Nothing is touched when *factor is 1; what is 0 stays 0, so that rows without a target have no
 * gradient where *factor is infinite or NaN, too. data[k]: sizes[k] elements of dtypes[k], a float dtype, in
 * the memory of the context's device, as is factor: float64 where the arrays are float64, which all are or
 * none, else float32. The three arrays themselves are in host memory, and are not read after the call. */
LOGITLESS_API logitless_status logitless_scale_gradients(const logitless_context* context, int32_t count,
                                                         void* const* data, const int32_t* dtypes,
                                                         const int64_t* sizes, const void* factor,
                                                         void* stream);

/* Pieces for a vocabulary cut into shards, on host memory; they read the problem's sizes, dtypes, options.
 * merge: joins the statistics of `from` (another shard, same rows) into `into`; associative.
 * rebase: changes the anchor of the sums to new_max [N] stats >= max (a maximum over all shards), after which
 * sum_exp, target_logit, sum_exp_logit, weighted_logit_sum, logit_sum and sum_sq_exp of all shards add up.
 * loss: from the joined statistics to the losses and what else is told of a whole vocabulary. Needs targets
 * and weights in the buffers. */
LOGITLESS_API logitless_status logitless_row_stats_merge(const logitless_problem* problem,
                                                         const logitless_buffers* from,
                                                         const logitless_buffers* into);
LOGITLESS_API logitless_status logitless_row_stats_rebase(const logitless_problem* problem,
                                                          const logitless_buffers* stats,
                                                          const void* new_max);
LOGITLESS_API logitless_status logitless_loss_from_row_stats(const logitless_problem* problem,
                                                             const logitless_buffers* buffers);

#ifdef __cplusplus
}
#endif
#endif /* LOGITLESS_LOGITLESS_H_ */
