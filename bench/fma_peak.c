/* Measures this machine's multiply-add units in GFLOP/s: fp32 FMA, and the bf16 dot product if there is one.
 * gpu/cases.py compiles it for the machine (-march=native -fopenmp -shared). */
#include <immintrin.h>
#include <omp.h>
#include <time.h>

#if defined(__AVX512F__)
typedef __m512 vector;
#define LANES 16
#define MULTIPLY_ADD(x, y, acc) _mm512_fmadd_ps(x, y, acc)
#define SET(x) _mm512_set1_ps(x)
#else
typedef __m256 vector;
#define LANES 8
#define MULTIPLY_ADD(x, y, acc) _mm256_fmadd_ps(x, y, acc)
#define SET(x) _mm256_set1_ps(x)
#endif
enum { kChains = 12, kSteps = 2000 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fp32_steps(void) {
  vector acc[kChains], x = SET(1e-9f);
  for (int i = 0; i < kChains; ++i) acc[i] = SET((float)i);
  for (int k = 0; k < kSteps; ++k) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      acc[i] = MULTIPLY_ADD(x, x, acc[i]);
      __asm__ volatile("" ::"v"(acc[i]));
    }
  }
}

#if defined(__AVX512BF16__)
static void bf16_steps(void) {
  __m512 acc[kChains];
  __m512bh x = (__m512bh)_mm512_set1_epi32(0x10001);
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps((float)i);
  for (int k = 0; k < kSteps; ++k) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      acc[i] = _mm512_dpbf16_ps(acc[i], x, x);
      __asm__ volatile("" ::"v"(acc[i]));
    }
  }
}
#endif

static double rate(void (*steps)(void), double flop, int threads) {
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const double start = now();
    long calls = 0;
#pragma omp parallel num_threads(threads) reduction(+ : calls)
    while (now() - start < 0.15) {
      for (int i = 0; i < 10; ++i) steps();
      calls += 10;
    }
    const double gflops = (double)calls * flop / (now() - start) / 1e9;
    if (gflops > best) best = gflops;
  }
  return best;
}

double fp32_peak(int threads) {
  return rate(fp32_steps, 2.0 * LANES * kChains * kSteps, threads);
}

/* Returns 0 without the instruction. */
double bf16_peak(int threads) {
#if defined(__AVX512BF16__)
  return rate(bf16_steps, 4.0 * LANES * kChains * kSteps, threads);
#else
  (void)threads;
  return 0;
#endif
}
