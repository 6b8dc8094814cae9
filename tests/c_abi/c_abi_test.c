/* A C11 program over logitless.h alone: one problem whose numbers are known, errors, and an older caller's
 * structs. */
#include <logitless/logitless.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

/* Two tokens, three words, hidden size two. The logits are z = {{1, 0, 2}, {0, 1, 3}}. */
enum { TOKENS = 2, VOCAB = 3, HIDDEN = 2 };
static const float kHidden[TOKENS * HIDDEN] = {1, 0, 0, 1};
static const float kClassifier[VOCAB * HIDDEN] = {1, 0, 0, 1, 2, 3};
static const int64_t kTargets[TOKENS] = {0, 2};
static const double kLogits[TOKENS][VOCAB] = {{1, 0, 2}, {0, 1, 3}};

static logitless_problem make_problem(void) {
  logitless_problem problem;
  logitless_problem_init(&problem);
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = TOKENS;
  problem.vocab = VOCAB;
  problem.hidden = HIDDEN;
  problem.want_d_hidden = problem.want_d_classifier = 1;
  return problem;
}

static logitless_buffers make_buffers(const float* hidden, float* loss, float* d_hidden,
                                      float* d_classifier) {
  logitless_buffers buffers;
  logitless_buffers_init(&buffers);
  buffers.hidden = hidden;
  buffers.classifier = kClassifier;
  buffers.targets = kTargets;
  buffers.loss = loss;
  buffers.d_hidden = d_hidden;
  buffers.d_classifier = d_classifier;
  return buffers;
}

static void check_numbers(const float* loss, const float* d_hidden, const float* d_classifier) {
  double expected_loss = 0;
  double dz[TOKENS][VOCAB];
  for (int i = 0; i < TOKENS; ++i) {
    double sum = 0;
    for (int j = 0; j < VOCAB; ++j) sum += exp(kLogits[i][j]);
    expected_loss += (log(sum) - kLogits[i][kTargets[i]]) / TOKENS;
    for (int j = 0; j < VOCAB; ++j) dz[i][j] = (exp(kLogits[i][j]) / sum - (j == kTargets[i])) / TOKENS;
  }
  EXPECT(fabs(*loss - expected_loss) < 1e-6);
  for (int k = 0; k < HIDDEN; ++k) {
    for (int i = 0; i < TOKENS; ++i) {
      double expected = 0;
      for (int j = 0; j < VOCAB; ++j) expected += dz[i][j] * kClassifier[j * HIDDEN + k];
      EXPECT(fabs(d_hidden[i * HIDDEN + k] - expected) < 1e-6);
    }
    for (int j = 0; j < VOCAB; ++j) {
      double expected = 0;
      for (int i = 0; i < TOKENS; ++i) expected += dz[i][j] * kHidden[i * HIDDEN + k];
      EXPECT(fabs(d_classifier[j * HIDDEN + k] - expected) < 1e-6);
    }
  }
}

static void run_on(const char* backend) {
  logitless_context_options options;
  logitless_context_options_init(&options);
  options.backend = backend;
  logitless_context* context = NULL;
  EXPECT(logitless_context_create(&options, &context) == LOGITLESS_OK);
  const logitless_problem problem = make_problem();
  logitless_plan* plan = NULL;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_OK);
  logitless_plan_info info;
  logitless_plan_info_init(&info);
  EXPECT(logitless_plan_get_info(plan, &info) == LOGITLESS_OK);
  EXPECT(strcmp(info.backend, backend) == 0);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);

  float loss = 0;
  float d_hidden[TOKENS * HIDDEN] = {0};
  float d_classifier[VOCAB * HIDDEN] = {0};
  logitless_buffers buffers = make_buffers(kHidden, &loss, d_hidden, d_classifier);
  EXPECT(logitless_run(plan, &buffers, workspace, info.workspace_bytes, NULL) == LOGITLESS_OK);
  check_numbers(&loss, d_hidden, d_classifier);

  /* A caller compiled when logitless_buffers ended before d_bias, whose fields after that are not its own. */
  loss = 0;
  buffers.struct_size = offsetof(logitless_buffers, d_bias);
  EXPECT(logitless_run(plan, &buffers, workspace, info.workspace_bytes, NULL) == LOGITLESS_OK);
  check_numbers(&loss, d_hidden, d_classifier);

  buffers.struct_size = sizeof buffers + 8;
  EXPECT(logitless_run(plan, &buffers, workspace, info.workspace_bytes, NULL) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(strncmp(logitless_last_error(), "logitless_buffers.struct_size: expected ", 39) == 0);

  const int64_t bad_targets[TOKENS] = {0, 3};
  buffers.struct_size = sizeof buffers;
  buffers.targets = bad_targets;
  loss = -1;
  EXPECT(logitless_run(plan, &buffers, workspace, info.workspace_bytes, NULL) == LOGITLESS_INVALID_TARGET);
  EXPECT(strstr(logitless_last_error(), "got 3 at targets[1]") != NULL);
  EXPECT(loss == -1);

  free(workspace);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
}

static void check_errors(void) {
  logitless_context* context = NULL;
  EXPECT(logitless_context_create(NULL, &context) == LOGITLESS_OK);
  logitless_plan* plan = NULL;
  logitless_problem problem = make_problem();
  problem.max_workspace_bytes = 1;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_BUDGET_TOO_SMALL);
  problem = make_problem();
  problem.label_smoothing = 2;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(strcmp(logitless_last_error(), "label_smoothing: expected a number in [0, 1], got 2") == 0);
  /* A caller compiled before label_smoothing existed: what lies there is not its own. */
  problem.struct_size = offsetof(logitless_problem, label_smoothing);
  problem.pass = LOGITLESS_FORWARD;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_OK);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
}

/* Whatever struct_size is, a call reads whole fields or refuses it by name. */
static void check_sizes(void) {
  logitless_context* context = NULL;
  logitless_context_options options;
  for (size_t size = 0; size <= sizeof options + 8; ++size) {
    logitless_context_options_init(&options);
    options.backend = "reference";
    options.isa = "";
    options.device_model = "";
    options.struct_size = size;
    const logitless_status status = logitless_context_create(&options, &context);
    if (status == LOGITLESS_OK) logitless_context_destroy(context);
    const int is_whole = size >= sizeof size && size <= sizeof options && size % sizeof size == 0;
    EXPECT(status == (is_whole ? LOGITLESS_OK : LOGITLESS_INVALID_ARGUMENT));
    EXPECT(is_whole ||
           strncmp(logitless_last_error(), "logitless_context_options.struct_size: expected ", 47) == 0);
  }

  logitless_context_options_init(&options);
  options.backend = "reference";
  EXPECT(logitless_context_create(&options, &context) == LOGITLESS_OK);
  logitless_problem problem = make_problem();
  logitless_plan* plan = NULL;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_OK);
  static double workspace[1 << 12];
  float rows[7][TOKENS], d_hidden[TOKENS * HIDDEN], d_classifier[VOCAB * HIDDEN], d_bias[VOCAB], loss;
  int64_t valid;
  for (size_t size = 0; size <= sizeof(logitless_buffers) + 8; ++size) {
    logitless_buffers buffers = make_buffers(kHidden, &loss, d_hidden, d_classifier);
    buffers.max = rows[0];
    buffers.sum_exp = rows[1];
    buffers.target_logit = rows[2];
    buffers.nll = rows[3];
    buffers.lse = rows[4];
    buffers.lse_low = rows[5];
    buffers.max_logit = rows[6];
    buffers.d_bias = d_bias;
    buffers.valid_count = &valid;
    buffers.struct_size = size;
    const logitless_status status = logitless_run(plan, &buffers, workspace, sizeof workspace, NULL);
    EXPECT(status == LOGITLESS_OK || status == LOGITLESS_INVALID_ARGUMENT);
    const int is_whole = size >= sizeof size && size <= sizeof buffers && size % sizeof size == 0;
    EXPECT(is_whole || strncmp(logitless_last_error(), "logitless_buffers.struct_size: expected ", 39) == 0);
    EXPECT(is_whole || status != LOGITLESS_OK);
    problem = make_problem();
    problem.struct_size = size;
    logitless_plan* other = NULL;
    if (logitless_plan_create(context, &problem, &other) == LOGITLESS_OK) logitless_plan_destroy(other);
    logitless_plan_info info;
    logitless_plan_info_init(&info);
    info.struct_size = size;
    const int is_info = size >= sizeof size && size <= sizeof info && size % sizeof size == 0;
    EXPECT((logitless_plan_get_info(plan, &info) == LOGITLESS_OK) == is_info);
  }
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
}

/* In bf16 the hidden states are those of the known numbers: what is 2^-10 off is rounded away. */
static void check_compute_dtype(void) {
  logitless_context* context = NULL;
  EXPECT(logitless_context_create(NULL, &context) == LOGITLESS_OK);
  logitless_problem problem = make_problem();
  problem.compute_dtype = LOGITLESS_BF16;
  logitless_plan* plan = NULL;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_OK);
  logitless_plan_info info;
  logitless_plan_info_init(&info);
  EXPECT(logitless_plan_get_info(plan, &info) == LOGITLESS_OK);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);
  float hidden[TOKENS * HIDDEN], loss = 0, d_hidden[TOKENS * HIDDEN] = {0},
                                 d_classifier[VOCAB * HIDDEN] = {0};
  for (int k = 0; k < TOKENS * HIDDEN; ++k) hidden[k] = kHidden[k] * (1 + 1.0f / 1024);
  logitless_buffers buffers = make_buffers(hidden, &loss, d_hidden, d_classifier);
  EXPECT(logitless_run(plan, &buffers, workspace, info.workspace_bytes, NULL) == LOGITLESS_OK);
  double exact = 0;
  for (int i = 0; i < TOKENS; ++i) {
    double sum = 0;
    for (int j = 0; j < VOCAB; ++j) sum += exp(kLogits[i][j]);
    exact += (log(sum) - kLogits[i][kTargets[i]]) / TOKENS;
  }
  EXPECT(fabs(loss - exact) < 1e-6);
  free(workspace);
  logitless_plan_destroy(plan);

  problem.compute_dtype = LOGITLESS_F64;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(strstr(logitless_last_error(), "compute_dtype: expected bfloat16, float16, or float32") != NULL);
  EXPECT(strstr(logitless_last_error(), "got float64") != NULL);
  /* A caller compiled before compute_dtype existed. */
  problem.struct_size = offsetof(logitless_problem, compute_dtype);
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_OK);
  logitless_plan_destroy(plan);
  problem.struct_size = sizeof problem;
  problem.compute_dtype = LOGITLESS_F32;
  problem.allow_tf32 = 2;
  EXPECT(logitless_plan_create(context, &problem, &plan) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(strcmp(logitless_last_error(), "allow_tf32: expected 0 or 1, got 2") == 0);
  logitless_context_destroy(context);
}

int main(void) {
  EXPECT(strcmp(logitless_last_error(), "") == 0);
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", LOGITLESS_VERSION_MAJOR, LOGITLESS_VERSION_MINOR,
           LOGITLESS_VERSION_PATCH);
  EXPECT(strcmp(logitless_version(), version) == 0);
  for (int32_t i = 0; i < logitless_backend_count(); ++i) {
    char why[256];
    EXPECT(logitless_backend_info(i, NULL, 0, why, sizeof why) == LOGITLESS_OK);
    if (why[0] == '\0') run_on(logitless_backend_name(i));
  }
  check_errors();
  check_sizes();
  check_compute_dtype();
  if (failures == 0) puts("ok");
  return failures != 0;
}
