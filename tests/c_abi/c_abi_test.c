/* A C11 program over logitless.h alone: one problem whose numbers are known, and errors. */
#include <logitless/logitless.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

/* Two tokens, three words, hidden size two. The logits are z = {{1, 0, 2}, {0, 1, 3}}. */
enum { TOKENS = 2, VOCAB = 3, HIDDEN = 2 };
static const float kHidden[TOKENS * HIDDEN] = {1, 0, 0, 1};
static const float kWeight[VOCAB * HIDDEN] = {1, 0, 0, 1, 2, 3};
static const int64_t kTargets[TOKENS] = {0, 2};
static const double kLogits[TOKENS][VOCAB] = {{1, 0, 2}, {0, 1, 3}};

/* Makes a plan for it, with one more option, which may repeat one of the others. */
static logitless_status make_plan(const logitless_context* context, logitless_option more,
                                  logitless_plan** plan) {
  const logitless_option options[] = {{LOGITLESS_OPTION_PASS, LOGITLESS_FORWARD_BACKWARD, 0},
                                      {LOGITLESS_OPTION_TOKENS, TOKENS, 0},
                                      {LOGITLESS_OPTION_VOCAB, VOCAB, 0},
                                      {LOGITLESS_OPTION_HIDDEN, HIDDEN, 0},
                                      more};
  const logitless_tensor_desc gradients[] = {{LOGITLESS_TENSOR_D_HIDDEN, LOGITLESS_F32, 0},
                                             {LOGITLESS_TENSOR_D_WEIGHT, LOGITLESS_F32, 0}};
  return logitless_plan_create(context, options, sizeof options / sizeof options[0], gradients, 2, plan);
}
static const logitless_option kNoMore = {LOGITLESS_OPTION_SOFTCAP, 0, 0};

static logitless_status run(const logitless_plan* plan, const float* hidden, const int64_t* targets,
                            float* loss, float* d_hidden, float* d_weight, void* workspace,
                            size_t workspace_bytes) {
  const logitless_tensor tensors[] = {
      {LOGITLESS_TENSOR_HIDDEN, (void*)hidden, 0},   {LOGITLESS_TENSOR_WEIGHT, (void*)kWeight, HIDDEN},
      {LOGITLESS_TENSOR_TARGETS, (void*)targets, 0}, {LOGITLESS_TENSOR_LOSS, loss, 0},
      {LOGITLESS_TENSOR_D_HIDDEN, d_hidden, 0},      {LOGITLESS_TENSOR_D_WEIGHT, d_weight, 0}};
  return logitless_run(plan, tensors, 6, workspace, workspace_bytes, NULL);
}

static void check_numbers(const float* loss, const float* d_hidden, const float* d_weight) {
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
      for (int j = 0; j < VOCAB; ++j) expected += dz[i][j] * kWeight[j * HIDDEN + k];
      EXPECT(fabs(d_hidden[i * HIDDEN + k] - expected) < 1e-6);
    }
    for (int j = 0; j < VOCAB; ++j) {
      double expected = 0;
      for (int i = 0; i < TOKENS; ++i) expected += dz[i][j] * kHidden[i * HIDDEN + k];
      EXPECT(fabs(d_weight[j * HIDDEN + k] - expected) < 1e-6);
    }
  }
}

static void run_on(const char* backend) {
  logitless_context_options options;
  logitless_context_options_init(&options);
  options.backend = backend;
  logitless_context* context = NULL;
  EXPECT(logitless_context_create(&options, &context) == LOGITLESS_OK);
  logitless_plan* plan = NULL;
  EXPECT(make_plan(context, kNoMore, &plan) == LOGITLESS_OK);
  logitless_plan_info info;
  EXPECT(logitless_plan_get_info(plan, &info) == LOGITLESS_OK);
  EXPECT(strcmp(info.backend, backend) == 0);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);

  float loss = 0;
  float d_hidden[TOKENS * HIDDEN] = {0};
  float d_weight[VOCAB * HIDDEN] = {0};
  const size_t bytes = info.workspace_bytes;
  EXPECT(run(plan, kHidden, kTargets, &loss, d_hidden, d_weight, workspace, bytes) == LOGITLESS_OK);
  check_numbers(&loss, d_hidden, d_weight);

  const int64_t bad_targets[TOKENS] = {0, 3};
  loss = -1;
  EXPECT(run(plan, kHidden, bad_targets, &loss, d_hidden, d_weight, workspace, bytes) ==
         LOGITLESS_INVALID_TARGET);
  EXPECT(strstr(logitless_last_error(), "got 3 at targets[1]") != NULL);
  logitless_error_info error;
  logitless_last_error_info(&error);
  EXPECT(error.status == LOGITLESS_INVALID_TARGET && error.row == 1 &&
         strcmp(error.argument, "targets") == 0);
  EXPECT(loss == -1);

  free(workspace);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
}

static void check_errors(void) {
  logitless_context* context = NULL;
  EXPECT(logitless_context_create(NULL, &context) == LOGITLESS_OK);
  logitless_plan* plan = NULL;
  const logitless_option budget = {LOGITLESS_OPTION_MAX_WORKSPACE_BYTES, 1, 0};
  EXPECT(make_plan(context, budget, &plan) == LOGITLESS_BUDGET_TOO_SMALL);
  const logitless_option smoothing = {LOGITLESS_OPTION_LABEL_SMOOTHING, 0, 2};
  EXPECT(make_plan(context, smoothing, &plan) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(strcmp(logitless_last_error(), "label_smoothing: expected a number in [0, 1], got 2") == 0);
  const logitless_option in_f64 = {LOGITLESS_OPTION_COMPUTE_DTYPE, LOGITLESS_F64, 0};
  EXPECT(make_plan(context, in_f64, &plan) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(strstr(logitless_last_error(), "or float32 (operands as they are), got float64") != NULL);
  const logitless_option twice = {LOGITLESS_OPTION_VOCAB, VOCAB, 0};
  EXPECT(make_plan(context, twice, &plan) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(strcmp(logitless_last_error(), "options: expected each once, got vocab twice") == 0);
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
  if (failures == 0) puts("ok");
  return failures != 0;
}
