#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

namespace logitless {

// The body of a loop: a reference to a callable that outlives the loop. It never allocates, unlike a
// std::function.
class LoopBody {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, LoopBody>)
  LoopBody(const F& body)  // NOLINT(google-explicit-constructor): loops are called with lambdas
      : body_(std::addressof(body)),
        call_([](const void* f, int64_t task, int worker) { (*static_cast<const F*>(f))(task, worker); }) {}
  void operator()(int64_t task, int worker) const { call_(body_, task, worker); }

 private:
  const void* body_;
  void (*call_)(const void* body, int64_t task, int worker);
};

// Calls body(task, worker) once for every task in [0, tasks), possibly from several threads at once. worker
// in [0, threads) names per-thread scratch; two calls that run at once never share one. Returns when all are
// done. Bodies must not throw.
struct ParallelFor {
  int threads = 1;
  std::function<void(int64_t tasks, LoopBody body)> run;

  void operator()(int64_t tasks, LoopBody body) const { run(tasks, body); }
};

inline ParallelFor serial_parallel_for() {
  return {1, [](int64_t tasks, LoopBody body) {
            for (int64_t task = 0; task < tasks; ++task) body(task, 0);
          }};
}

}  // namespace logitless
