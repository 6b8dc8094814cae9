/* Loss and gradients in C: context -> plan -> run.
 *
 * A tiny head of 5 words is fitted to 4 tokens by gradient descent. Every step is one call, and the 4 x 5
 * logits never exist. */
#include <logitless/logitless.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 4, VOCAB = 5, HIDDEN = 3, STEPS = 5 };

static void check(logitless_status status) {
  if (status == LOGITLESS_OK) return;
  fprintf(stderr, "%s: %s\n", logitless_status_name(status), logitless_last_error());
  exit(1);
}

int main(void) {
  float hidden[TOKENS * HIDDEN] = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0}; /* [N, D] */
  float weight[VOCAB * HIDDEN] = {0};                                   /* [V, D] */
  int64_t targets[TOKENS] = {2, 0, 4, -100};                            /* -100: no target, no loss */
  float loss = 0;
  int64_t correct = 0;
  float d_weight[VOCAB * HIDDEN];

  /* The problem. By default the loss is the mean over the tokens that have a target. Only the head learns:
   * the gradient of hidden is not computed. */
  const logitless_option options[] = {{LOGITLESS_OPTION_PASS, LOGITLESS_FORWARD_BACKWARD, 0},
                                      {LOGITLESS_OPTION_TOKENS, TOKENS, 0},
                                      {LOGITLESS_OPTION_VOCAB, VOCAB, 0},
                                      {LOGITLESS_OPTION_HIDDEN, HIDDEN, 0},
                                      {LOGITLESS_OPTION_MAX_WORKSPACE_BYTES, 1 << 20, 0}};
  const logitless_tensor_desc made[] = {{LOGITLESS_TENSOR_ARGMAX, 0, 0},
                                        {LOGITLESS_TENSOR_D_WEIGHT, LOGITLESS_F32, 0}};

  /* The plan is the fastest within the budget. It is made once and used for every step. */
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  logitless_plan_info info;
  check(logitless_context_create(NULL, &context));
  check(logitless_plan_create(context, options, 5, made, 2, &plan));
  check(logitless_plan_get_info(plan, &info));
  printf("backend %s, plan %s, %zu bytes of workspace\n", info.backend,
         logitless_plan_kind_name((logitless_plan_kind)info.kind), info.workspace_bytes);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);

  const logitless_tensor tensors[] = {
      {LOGITLESS_TENSOR_HIDDEN, hidden, 0},          {LOGITLESS_TENSOR_WEIGHT, weight, 0},
      {LOGITLESS_TENSOR_TARGETS, targets, 0},        {LOGITLESS_TENSOR_LOSS, &loss, 0},
      {LOGITLESS_TENSOR_CORRECT_COUNT, &correct, 0}, {LOGITLESS_TENSOR_D_WEIGHT, d_weight, 0}};

  for (int step = 0; step < STEPS; ++step) {
    check(logitless_run(plan, tensors, 6, workspace, info.workspace_bytes, NULL));
    printf("step %d: loss %.4f, %d of 3 correct\n", step, loss, (int)correct);
    for (int i = 0; i < VOCAB * HIDDEN; ++i) weight[i] -= 3 * d_weight[i];
  }

  free(workspace);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  return correct == 3 ? 0 : 1;
}
