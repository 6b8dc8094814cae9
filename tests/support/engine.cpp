#include "engine.h"

#include <atomic>
#include <thread>

#if defined(__SANITIZE_THREAD__)
#define LOGITLESS_TEST_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LOGITLESS_TEST_THREAD_SANITIZER 1
#endif
#endif
#ifndef LOGITLESS_TEST_THREAD_SANITIZER
#define LOGITLESS_TEST_THREAD_SANITIZER 0
#endif

namespace logitless_test {
namespace {

logitless::ContextOptions options_of(const Engine& engine, int threads) {
  logitless::ContextOptions options;
  options.backend = engine.backend.c_str();
  options.engine = engine.engine.empty() ? nullptr : engine.engine.c_str();
  options.threads = threads;
  if (engine.is_device()) options.device = 0;
  return options;
}

// Returns why an engine is not usable; empty when it is.
std::string why_unusable(const Engine& engine) {
  try {
    logitless::Context context(options_of(engine, 1));
    return "";
  } catch (const logitless::Error& error) {
    return error.what();
  }
}
bool usable(const Engine& engine) {
  return why_unusable(engine).empty();
}

void run_on_threads(int64_t tasks, logitless_task body, void* body_data, void* pool) {
  const auto threads = reinterpret_cast<intptr_t>(pool);
  std::atomic<int64_t> next{0};
  const auto work = [&](int32_t worker) {
    for (int64_t task = next++; task < tasks; task = next++) body(task, worker, body_data);
  };
  std::vector<std::thread> others;
  for (int worker = 1; worker < threads; ++worker) others.emplace_back(work, worker);
  work(0);
  for (std::thread& thread : others) thread.join();
}

}  // namespace

bool Engine::is_emulated() const {
#ifdef LOGITLESS_CUDA_ON_CPU
  return is_device();
#else
  return false;
#endif
}

std::vector<Engine> engines() {
  std::vector<Engine> out = host_engines();
  const std::vector<Engine> on_device = device_engines();
  out.insert(out.end() - 1, on_device.begin(), on_device.end());
  return out;
}

std::vector<Engine> host_engines() {
  std::vector<Engine> out;
  for (const char* engine : {"avx512_bf16", "avx512", "avx2", "neon", "portable"}) {
    if (usable({"cpu", engine})) out.push_back({"cpu", engine});
  }
  out.push_back({"reference", ""});
  return out;
}

std::vector<Engine> device_engines() {
  std::vector<Engine> out;
  for (const char* engine : {"sm90", "mma", "portable"}) {
    if (usable({"cuda", engine})) out.push_back({"cuda", engine});
  }
  return out;
}

std::string why_no_device() {
  return why_unusable({"cuda", "portable"});
}

Engine best_engine() {
  return engines().front();
}

std::string why_not_sparsified(const Engine& engine) {
  logitless::Problem problem;
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = problem.vocab = problem.hidden = 8;
  problem.dtype.hidden = problem.dtype.weight = engine.plain_dtype();
  problem.has.d_hidden = 1;
  problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
  const logitless::Context context = make_context(engine, 1);
  try {
    logitless::Plan plan(context, problem);
    return "";
  } catch (const logitless::Error& error) {
    if (error.status() != LOGITLESS_UNSUPPORTED) throw;
    return error.what();
  }
}

bool is_slowed_down() {
#ifdef LOGITLESS_CUDA_ON_CPU
  return true;
#else
  return LOGITLESS_TEST_THREAD_SANITIZER != 0;
#endif
}

logitless::Context make_context(const Engine& engine, int threads) {
#if LOGITLESS_TEST_THREAD_SANITIZER
  return make_hosted_context(engine, threads == 0 ? 2 : threads);
#else
  return logitless::Context(options_of(engine, threads));
#endif
}

logitless::Context make_hosted_context(const Engine& engine, int threads) {
  return make_hosted_context(engine, threads, run_on_threads, reinterpret_cast<void*>(intptr_t{threads}));
}

logitless::Context make_hosted_context(const Engine& engine, int threads, logitless_parallel_for parallel_for,
                                       void* pool) {
  logitless::ContextOptions options = options_of(engine, threads);
  options.parallel_for = parallel_for;
  options.pool = pool;
  return logitless::Context(options);
}

}  // namespace logitless_test
