#include <cstdio>
#include <logitless/logitless.hpp>
#include <span>

int main() {
  const float hidden[] = {0};
  const float weight[] = {1, 2, 3};
  const int64_t targets[] = {1};
  const logitless::Matrix<const float> e{hidden, 1, 1};
  const logitless::Matrix<const float> c{weight, 3, 1};
  float loss = 0;
  logitless::Buffers buffers = logitless::make_buffers(e, c, std::span<const int64_t>(targets));
  buffers.loss = &loss;
  logitless::run_once(logitless::Context(), logitless::make_problem(logitless::Pass::forward, e, c), buffers);
  std::printf("logitless %s: log 3 = %.4f\n", logitless_version(), static_cast<double>(loss));
}
