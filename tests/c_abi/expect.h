#pragma once
/* Counts expectations that fail: main() of a test returns failures != 0. */
#include <logitless/logitless.h>
#include <stdio.h>

static int failures = 0;

static void expect(int ok, const char* what, int line) {
  if (ok) return;
  ++failures;
  fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, logitless_last_error());
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)
