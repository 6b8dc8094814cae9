// The instructions that the mma kernels are made of, each on its own: which lane holds what.
// Compiled for the CPU, where lanes are fibers, as well as for a GPU.
#include <random>
#include <vector>

#include "core/dtype.h"
#include "cuda/engines/fused/ptx/shared_memory.cuh"
#include "cuda/engines/fused/ptx/thread.cuh"
#include "cuda/engines/mma/config.h"
#include "cuda/engines/mma/ptx/copy_async.cuh"
#include "cuda/engines/mma/ptx/ldmatrix.cuh"
#include "cuda/engines/mma/ptx/mma_sync.cuh"
#include "cuda/runtime/queue.h"
#include "guarded.h"

namespace logitless::cuda::mma::test {
namespace {

using namespace cuda::test;

// A [16, 16] and B [8, 16], row by row: D = A B^T. Their rows, of 32 bytes, are copied to shared memory,
// where elements from `depth` on are zeros.
template <DType kType>
__global__ void multiply_kernel(const uint16_t* a, const uint16_t* b, int depth, float* d) {
  const uint32_t shared = ptx::dynamic_shared_address();
  const int lane = static_cast<int>(threadIdx.x);
  const auto copy = [&](uint32_t to, const uint16_t* from, int first) {
    const int left = 2 * (depth - first);
    ptx::copy_async(to + 2 * first, from + first, left < 0 ? 0 : left > 16 ? 16 : left);
  };
  for (int half = 0; half < 2; ++half) {
    if (lane < 16) copy(shared + lane * 32, a + lane * 16, half * 8);
    if (lane < 8) copy(shared + 512 + lane * 32, b + lane * 16, half * 8);
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncwarp();
  uint32_t of_a[4], of_b[4];
  ptx::load_matrices(of_a, shared + lane % 16 * 32 + lane / 16 * 16);
  ptx::load_matrices(of_b, shared + 512 + lane % 8 * 32 + lane / 8 % 2 * 16);
  float sums[4] = {1, 1, 1, 1};  // products are added to these
  ptx::multiply<kType>(sums, of_a, of_b[0], of_b[1]);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

template <DType kType>
void check_multiply(int depth) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> small(-8, 8);  // products and sums are exact
  std::vector<uint16_t> bits(24 * 16);
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    values[i] = static_cast<float>(small(random));
    bits[i] = kType == DType::kBF16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
  }
  const Guarded<uint16_t> operands(bits);
  const Guarded<float> d(16 * 8);
  Queue(cudaStream_t{})
      .launch("multiply_kernel", multiply_kernel<kType>, dim3(1), 32, 1024, operands.get(),
              operands.get() + 16 * 16, depth, d.get());
  d.expect_guards();
  const std::vector<float> got = d.read();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = 1;
      for (int k = 0; k < depth; ++k) sum += values[i * 16 + k] * values[256 + j * 16 + k];
      EXPECT_EQ(got[i * 8 + j], sum) << i << ", " << j;
    }
  }
}

class Ptx : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  }
};

TEST_F(Ptx, MultipliesBF16) {
  check_multiply<DType::kBF16>(16);
}
TEST_F(Ptx, MultipliesF16) {
  check_multiply<DType::kF16>(16);
}
TEST_F(Ptx, CopiesZerosPastTheDepth) {
  for (int depth : {1, 7, 8, 9, 13}) check_multiply<DType::kBF16>(depth);
}

}  // namespace
}  // namespace logitless::cuda::mma::test
