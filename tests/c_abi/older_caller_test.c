/* A program that was compiled with an older header, whose structs lack their last fields, over the library as
 * it is: no function writes past what the caller has. */
#include <logitless/logitless.h>
#include <stdio.h>
#include <string.h>

#include "expect.h"

enum { PAST = 64, UNTOUCHED = 0x5a };

static int untouched(const unsigned char* past) {
  for (int i = 0; i < PAST; ++i) {
    if (past[i] != UNTOUCHED) return 0;
  }
  return 1;
}

/* The caller's struct, and the memory behind it, which is something else's. */
#define WITH_PAST(name)       \
  struct {                    \
    name own;                 \
    unsigned char past[PAST]; \
  }
#define EXPECT_INIT(variable, init)                             \
  do {                                                          \
    memset(&(variable), UNTOUCHED, sizeof(variable));           \
    init(&(variable).own);                                      \
    EXPECT((variable).own.struct_size == sizeof(variable).own); \
    EXPECT(untouched((variable).past));                         \
  } while (0)

int main(void) {
  WITH_PAST(logitless_context_options) options;
  WITH_PAST(logitless_problem) problem;
  WITH_PAST(logitless_buffers) buffers;
  WITH_PAST(logitless_plan_info) info;
  WITH_PAST(logitless_device_info) device;
  EXPECT_INIT(options, logitless_context_options_init);
  EXPECT_INIT(problem, logitless_problem_init);
  EXPECT_INIT(buffers, logitless_buffers_init);
  EXPECT_INIT(info, logitless_plan_info_init);
  EXPECT_INIT(device, logitless_device_info_init);
  EXPECT(options.own.backend == NULL && options.own.threads == 0);
  EXPECT(problem.own.reduction == LOGITLESS_REDUCTION_MEAN && problem.own.target_dtype == LOGITLESS_I64);
  EXPECT(problem.own.scale == 1 && problem.own.ignore_index == -100 && problem.own.tokens == 0);

  const float hidden[2] = {1, 0}, classifier[4] = {1, 0, 0, 1};
  const int64_t targets[1] = {0};
  float nll = 0;
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  EXPECT(logitless_context_create(&options.own, &context) == LOGITLESS_OK);
  problem.own.tokens = 1;
  problem.own.vocab = problem.own.hidden = 2;
  EXPECT(logitless_plan_create(context, &problem.own, &plan) == LOGITLESS_OK);
  EXPECT(logitless_plan_get_info(plan, &info.own) == LOGITLESS_OK);
  EXPECT(info.own.struct_size == sizeof info.own && info.own.backend[0] != '\0' && untouched(info.past));
  buffers.own.hidden = hidden;
  buffers.own.classifier = classifier;
  buffers.own.targets = targets;
  buffers.own.nll = &nll;
  static _Alignas(64) unsigned char workspace[1 << 20];
  EXPECT(info.own.workspace_bytes <= sizeof workspace);
  EXPECT(logitless_run(plan, &buffers.own, workspace, sizeof workspace, NULL) == LOGITLESS_OK);
  EXPECT(nll > 0.3132f && nll < 0.3133f); /* log(1 + exp(-1)) */
  logitless_plan_destroy(plan);

  /* The library's problem is larger than this caller's, or nothing is tested here. */
  size_t known = 0;
  problem.own.struct_size = 1 << 20;
  EXPECT(logitless_plan_create(context, &problem.own, &plan) == LOGITLESS_INVALID_ARGUMENT);
  EXPECT(sscanf(logitless_last_error(), "logitless_problem.struct_size: expected at most %zu", &known) == 1);
  EXPECT(known > sizeof problem.own);
  logitless_context_destroy(context);
  if (failures == 0) puts("ok");
  return failures != 0;
}
