#include <cstdio>
#include <headroom/headroom.hpp>
#include <span>

int main() {
  const float hidden[] = {0};
  const float classifier[] = {1, 2, 3};
  const int64_t targets[] = {1};
  const headroom::Matrix<const float> e{hidden, 1, 1};
  const headroom::Matrix<const float> c{classifier, 3, 1};
  float loss = 0;
  headroom::Buffers buffers = headroom::make_buffers(e, c, std::span<const int64_t>(targets));
  buffers.loss = &loss;
  headroom::run_once(headroom::Context(), headroom::make_problem(headroom::Pass::forward, e, c), buffers);
  std::printf("headroom %s: log 3 = %.4f\n", headroom_version(), static_cast<double>(loss));
}
