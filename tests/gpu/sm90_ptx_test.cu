// Each form of the instructions that the sm90 kernels are made of, on its own.
#include "cuda/engines/fused/ptx/math.cuh"
#include "cuda/engines/sm90/ptx/cluster.cuh"
#include "cuda/engines/sm90/ptx/mbarrier.cuh"
#include "cuda/engines/sm90/ptx/registers.cuh"
#include "cuda/engines/sm90/ptx/stmatrix.cuh"
#include "cuda/engines/sm90/ptx/tma.cuh"
#include "cuda/engines/sm90/ptx/wgmma.cuh"
#include "cuda/engines/sm90/tensor_map.h"
#include "sm90_fixture.cuh"

namespace logitless::cuda::sm90::test {
namespace {

constexpr int kRows = 64, kColumns = 192, kDepth = 64;
constexpr int kHiddenBytes = kRows * 128, kClassifierBytes = kColumns * 128;

extern __shared__ __align__(1024) uint8_t shared_memory[];

class Ptx : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
};

// One warpgroup: loads both operands, multiplies kDepth / 16 steps twice (the second adds), writes D.
template <DType kType>
__global__ void __launch_bounds__(128)
    wgmma_kernel(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap classifier,
                 float* d) {
  const uint32_t base = ptx::shared_address(shared_memory);
  const uint32_t barrier = base + kHiddenBytes + kClassifierBytes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(barrier, kHiddenBytes + kClassifierBytes);
    ptx::tma_load(base, &hidden, barrier, 0, 0);
    ptx::tma_load(base + kHiddenBytes, &classifier, barrier, 0, 0);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
  float acc[96];
  for (int repeat = 0; repeat < 2; ++repeat) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      ptx::wgmma_n192<kType>(acc, ptx::matrix_descriptor(ptx::matrix_offset(base) + 2 * step),
                             ptx::matrix_descriptor(ptx::matrix_offset(base + kHiddenBytes) + 2 * step),
                             (repeat | step) != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 96; ++i) {
    d[(row + (i >> 1 & 1) * 8) * kColumns + column + (i >> 2) * 8 + (i & 1)] = acc[i];
  }
}

template <DType kType>
void check_wgmma() {
  const Problem problem({kRows, kColumns, kDepth}, kType);
  const Guarded<uint16_t> hidden(problem.hidden_bits), classifier(problem.classifier_bits);
  const Guarded<float> d(kRows * kColumns);
  const int bytes = kHiddenBytes + kClassifierBytes + 64;
  wgmma_kernel<kType><<<1, 128, bytes>>>(
      make_tensor_map(hidden.get(), kType, kRows, kDepth, problem.stride, kRows),
      make_tensor_map(classifier.get(), kType, kColumns, kDepth, problem.stride, kColumns), d.get());
  check_cuda(cudaDeviceSynchronize());
  const auto values = d.read();
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], 2 * problem.dot[i], 16 * 0x1p-23 * problem.size[i])
        << i / kColumns << ", " << i % kColumns;
  }
}

TEST_F(Ptx, WgmmaBf16) {
  check_wgmma<DType::kBF16>();
}
TEST_F(Ptx, WgmmaF16) {
  check_wgmma<DType::kF16>();
}

// A box is loaded and stored again at another place; both lie partly outside their matrix.
__global__ void copy_kernel(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                            int x, int y) {
  const uint32_t base = ptx::shared_address(shared_memory);
  const uint32_t barrier = base + kHiddenBytes;
  ptx::tma_prefetch_descriptor(&from);
  ptx::mbarrier_init(barrier, 1);
  ptx::mbarrier_init_fence();
  ptx::mbarrier_arrive_expect(barrier, kHiddenBytes);
  ptx::tma_load(base, &from, barrier, x, y);
  ptx::mbarrier_wait(barrier, 0);
  ptx::fence_shared_to_copy_engine();
  ptx::tma_store(&to, base, x, y);
  ptx::tma_store_commit();
  ptx::tma_store_wait_read<0>();
  ptx::tma_store_wait<0>();
}

TEST_F(Ptx, LoadAndStoreClipAtTheMatrix) {
  constexpr int64_t kR = 90, kC = 101, kStride = 112, kToR = 80, kToC = 99;
  std::vector<uint16_t> source(kR * kStride);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint16_t>(1 + i % 30000);
  const Guarded<uint16_t> from(source), to(kR * kStride);
  const CUtensorMap from_map = make_tensor_map(from.get(), DType::kBF16, kR, kC, kStride, kRows);
  const CUtensorMap to_map = make_tensor_map(to.get(), DType::kBF16, kToR, kToC, kStride, kRows);
  for (const int x : {0, 64, 128}) {
    for (const int y : {0, 64, 128}) copy_kernel<<<1, 1, kHiddenBytes + 64>>>(from_map, to_map, x, y);
  }
  check_cuda(cudaDeviceSynchronize());
  const auto values = to.read();
  for (int64_t i = 0; i < kR; ++i) {
    for (int64_t j = 0; j < kStride; ++j) {
      if (i < kToR && j >= kToC && j < stored_columns(kToC)) continue;
      const bool inside = i < kToR && j < kToC;
      ASSERT_EQ(values[i * kStride + j], inside ? source[i * kStride + j] : 0xA5A5) << i << ", " << j;
    }
  }
  to.expect_guards();
}

// Each block of a pair loads half of a box into both and waits for all of it; then tells the other by its
// barrier that it may go on, and finds out the same.
__global__ void multicast_kernel(const __grid_constant__ CUtensorMap from, uint32_t* out) {
  const uint32_t base = ptx::shared_address(shared_memory);
  const uint32_t full = base + kHiddenBytes, told = full + 8;
  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(told, 2);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(full, kHiddenBytes);
    ptx::tma_load_multicast(base + rank * kHiddenBytes / 2, &from, full, 0, rank * kRows / 2, 3);
  }
  ptx::mbarrier_wait(full, 0);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(shared_memory);
  for (int i = threadIdx.x; i < kHiddenBytes / 4; i += blockDim.x) {
    out[ptx::cluster_index() * kHiddenBytes / 2 + rank * kHiddenBytes / 4 + i] = words[i];
  }
  if (threadIdx.x < 2) ptx::mbarrier_arrive_remote(told, threadIdx.x);
  ptx::mbarrier_wait(told, 0);
  __syncthreads();  // parities repeat: a warp that came here only after the next phase would wait forever
  // A phase further: one arrival by this block's own thread, one by the other block's.
  if (threadIdx.x == 0) ptx::mbarrier_arrive(told);
  if (threadIdx.x == 1) ptx::mbarrier_arrive_remote(told, rank ^ 1);
  ptx::mbarrier_wait(told, 1);
  ptx::cluster_sync();
}

TEST_F(Ptx, MulticastAndRemoteArrival) {
  std::vector<uint16_t> source(kRows * 64);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint16_t>(i);
  const Guarded<uint16_t> from(source);
  constexpr int kClusters = 3;
  const Guarded<uint32_t> out(kClusters * kHiddenBytes / 2);
  const CUtensorMap map = make_tensor_map(from.get(), DType::kBF16, kRows, 64, 64, kRows / 2);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(2 * kClusters);
  launch.blockDim = dim3(64);
  launch.dynamicSmemBytes = kHiddenBytes + 64;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&launch, multicast_kernel, map, out.get()));
  check_cuda(cudaDeviceSynchronize());
  const auto words = out.read();
  for (int block = 0; block < 2 * kClusters; ++block) {
    for (int row = 0; row < kRows; ++row) {
      for (int chunk = 0; chunk < 8; ++chunk) {  // 16 bytes each, swizzled by the row
        const uint32_t word = words[block * kHiddenBytes / 4 + row * 32 + (chunk ^ (row & 7)) * 4];
        const int first = row * 64 + chunk * 8;
        ASSERT_EQ(word, static_cast<uint32_t>(first | (first + 1) << 16))
            << block << ": " << row << ", " << chunk;
      }
    }
  }
}

__global__ void stmatrix_kernel(uint32_t* out) {
  const uint32_t base = ptx::shared_address(shared_memory);
  const uint32_t lane = threadIdx.x;
  ptx::store_matrices(base + lane * 16, lane, 100 + lane, 200 + lane, 300 + lane);
  __syncwarp();
  const uint32_t* words = reinterpret_cast<const uint32_t*>(shared_memory);
  for (int i = 0; i < 4; ++i) out[i * 32 + lane] = words[i * 32 + lane];
}

TEST_F(Ptx, StoreMatrices) {
  const Guarded<uint32_t> out(128);
  stmatrix_kernel<<<1, 32, 1024>>>(out.get());
  check_cuda(cudaDeviceSynchronize());
  const auto words = out.read();
  for (uint32_t i = 0; i < 128; ++i) ASSERT_EQ(words[i], i / 32 * 100 + i % 32);
}

__global__ void math_kernel(const float* x, float* out) {
  const int i = threadIdx.x;
  out[3 * i] = ptx::exp2_approx(x[i]);
  out[3 * i + 1] = ptx::reciprocal_approx(x[i]);
  out[3 * i + 2] = ptx::max_nan(x[i], 0.5f);
  if (i == 0) {
    out[60] = __uint_as_float(ptx::pack<DType::kBF16>(1.f, -2.f));
    out[61] = __uint_as_float(ptx::pack<DType::kF16>(1.f, -2.f));
  }
}

TEST_F(Ptx, Math) {
  const std::vector<float> x = {0.f, 1.f, -1.f, 3.7f, -20.3f, 100.f, -INFINITY, INFINITY, NAN, 0.001f};
  const Guarded<float> input(x), out(62);
  math_kernel<<<1, static_cast<unsigned>(x.size())>>>(input.get(), out.get());
  check_cuda(cudaDeviceSynchronize());
  const auto values = out.read();
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      for (int k = 0; k < 3; ++k) EXPECT_TRUE(std::isnan(values[3 * i + k]));
      continue;
    }
    const double power = std::exp2(static_cast<double>(x[i]));
    if (std::isinf(power)) {
      EXPECT_EQ(values[3 * i], power);
    } else {
      EXPECT_NEAR(values[3 * i], power, power * 0x1p-21);
    }
    if (std::abs(x[i]) > 0 && std::isfinite(x[i])) EXPECT_NEAR(values[3 * i + 1] * x[i], 1, 0x1p-21);
    EXPECT_EQ(values[3 * i + 2], std::max(x[i], 0.5f));
  }
  uint32_t bf16, f16;
  std::memcpy(&bf16, &values[60], 4);
  std::memcpy(&f16, &values[61], 4);
  EXPECT_EQ(bf16, uint32_t{float_to_bf16(-2.f)} << 16 | float_to_bf16(1.f));
  EXPECT_EQ(f16, uint32_t{float_to_f16(-2.f)} << 16 | float_to_f16(1.f));
}

// Registers move between warpgroups, and named barriers order them: 1 writes, 2 reads.
__global__ void __launch_bounds__(384, 1) registers_kernel(int* out) {
  __shared__ int value;
  if (threadIdx.x < 128) {
    ptx::give_registers<40>();
  } else {
    ptx::take_registers<232>();
    if (threadIdx.x < 256) {
      if (ptx::thread_index() == 128) value = 42;
      ptx::named_barrier_arrive(1, 256);
    } else {
      ptx::named_barrier_sync(1, 256);
      out[threadIdx.x - 256] = ptx::always() ? value : -1;
    }
  }
}

TEST_F(Ptx, RegistersAndNamedBarriers) {
  const Guarded<int> out(128);
  registers_kernel<<<1, 384>>>(out.get());
  check_cuda(cudaDeviceSynchronize());
  for (const int value : out.read()) ASSERT_EQ(value, 42);
}

}  // namespace
}  // namespace logitless::cuda::sm90::test
