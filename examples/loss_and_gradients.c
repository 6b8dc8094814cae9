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
  const float hidden[TOKENS * HIDDEN] = {1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0}; /* [N, D] */
  float classifier[VOCAB * HIDDEN] = {0};                                     /* [V, D] */
  const int64_t targets[TOKENS] = {2, 0, 4, -100};                            /* -100: no target, no cost */
  float loss = 0;
  int64_t correct = 0;
  float d_classifier[VOCAB * HIDDEN];

  /* What to compute. Mean over the tokens that have a target is the default. */
  logitless_problem problem;
  logitless_problem_init(&problem);
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = TOKENS;
  problem.vocab = VOCAB;
  problem.hidden = HIDDEN;
  problem.want_argmax = 1;
  problem.want_d_classifier = 1; /* only the head learns: the gradient of hidden is not computed */
  problem.max_workspace_bytes = 1 << 20;

  /* How: the fastest plan within the budget. It is made once and used for every step. */
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  logitless_plan_info info;
  logitless_plan_info_init(&info);
  check(logitless_context_create(NULL, &context));
  check(logitless_plan_create(context, &problem, &plan));
  check(logitless_plan_get_info(plan, &info));
  printf("backend %s, plan %s, %zu bytes of workspace\n", info.backend,
         logitless_plan_kind_name((logitless_plan_kind)info.kind), info.workspace_bytes);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);

  logitless_buffers buffers;
  logitless_buffers_init(&buffers);
  buffers.hidden = hidden;
  buffers.classifier = classifier;
  buffers.targets = targets;
  buffers.loss = &loss;
  buffers.correct_count = &correct;
  buffers.d_classifier = d_classifier;

  for (int step = 0; step < STEPS; ++step) {
    check(logitless_run(plan, &buffers, workspace, info.workspace_bytes, NULL));
    printf("step %d: loss %.4f, %d of 3 correct\n", step, loss, (int)correct);
    for (int i = 0; i < VOCAB * HIDDEN; ++i) classifier[i] -= 3 * d_classifier[i];
  }

  free(workspace);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  return correct == 3 ? 0 : 1;
}
