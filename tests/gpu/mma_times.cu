// Times the mma engine's kernels beside the most that mma.sync gives; bench/gpu/mma.py runs it.
//
//   logitless_gpu_mma_times ROWS COLUMNS DEPTH SECONDS
//
// Writes a line for each measurement: its name, its device (all of it, or as much as an A100 or an RTX 4090
// has), blocks, FLOP of a launch, and the seconds of a launch, in two ways.
// "seconds": launch after launch, all in turns.
// "burst_seconds": each launch after 0.1 s of rest, when clocks are high.
// A launch's time depends on how warm the launches before it have left the GPU. So each round has another
// order, and the ceiling has as many FLOP as the others.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/dtype.h"
#include "cuda/engines/mma/config.h"
#include "cuda/engines/mma/launch.h"
#include "cuda/engines/mma/ptx/mma_sync.cuh"
#include "cuda/rows/rows.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda::mma::times {
namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
T* on_device(const std::vector<T>& values) {
  T* data = nullptr;
  require(cudaMalloc(&data, values.size() * sizeof(T)), "cudaMalloc");
  require(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return data;
}

// The ceiling, of which a launch of the engine reaches a share: mma.sync of operands in registers, and
// nothing else. It has as many warps as the engine, or half of them, with 24 independent sums of 16 x 8 in
// each, and operands of random bits.
constexpr int kSums = 24;

__global__ void __launch_bounds__(kThreads, 1) ceiling_kernel(const uint32_t* bits, float* out, int turns) {
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t a[4][4], b[6][2];
  for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = bits[(i * kThreads + thread) & 0xffff];
  for (int i = 0; i < 12; ++i) b[i / 2][i % 2] = bits[((16 + i) * kThreads + thread) & 0xffff];
  float d[kSums][4] = {};
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) ptx::multiply<DType::kBF16>(d[i], a[i % 4], b[i / 4][0], b[i / 4][1]);
  }
  float sum = 0;
  for (const auto& each : d) sum += each[0] + each[1] + each[2] + each[3];
  if (sum == 12345.0f) out[blockIdx.x] = sum;
}

struct Measurement {
  std::string what;
  std::string device;
  int blocks;
  double flop;
  std::function<void()> launch;
  std::vector<float> seconds = {}, burst_seconds = {};
};

float seconds_of(const std::function<void()>& launch) {
  static const auto make = [] {
    cudaEvent_t event = nullptr;
    require(cudaEventCreate(&event), "cudaEventCreate");
    return event;
  };
  static const cudaEvent_t begin = make(), end = make();
  require(cudaEventRecord(begin), "cudaEventRecord");
  launch();
  require(cudaEventRecord(end), "cudaEventRecord");
  require(cudaEventSynchronize(end), "cudaEventSynchronize");
  float milliseconds = 0;
  require(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  return milliseconds * 1e-3f;
}

// bf16 numbers of a normal distribution, drawn once and repeated with an odd period.
std::vector<uint16_t> normal_numbers(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> period(1'000'003);
  for (uint16_t& value : period) value = float_to_bf16(normal(random));
  return period;
}
uint16_t* matrix_of(const std::vector<uint16_t>& period, int64_t rows, int64_t columns) {
  std::vector<uint16_t> values(static_cast<size_t>(rows * columns));
  for (size_t i = 0; i < values.size(); ++i) values[i] = period[i % period.size()];
  return on_device(values);
}

constexpr float kSpread = 3;      // standard deviation of logits
constexpr int kCandidates = 16;   // likely columns of a peaked row
constexpr float kLikeliest = 16;  // logit of its first candidate; the k-th has ln k less
float candidate_logit(int k) {
  return kLikeliest - std::log(static_cast<float>(k + 1));
}

class Launches {
 public:
  Launches(int64_t rows, int64_t columns, int64_t depth) : rows_(rows), columns_(columns) {
    product_.hidden = matrix_of(normal_numbers(1), rows, depth);
    const std::vector<uint16_t> weight = normal_numbers(2);
    product_.weight = matrix_of(weight, columns, depth);
    product_.hidden_stride = product_.weight_stride = product_.depth = depth;
    product_.rows = rows;
    product_.columns = columns;
    product_.transform.scale = kSpread / std::sqrt(static_cast<float>(depth));
    std::vector<int32_t> targets(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) targets[i] = static_cast<int32_t>(i * 7919 % columns);
    product_.target = on_device(targets);
    target_logit_ = on_device(std::vector<float>(static_cast<size_t>(rows)));
    peaked_ = product_;
    peaked_.hidden = peaked_rows(weight);
  }

  std::function<void()> loss(const Device& device) {
    StatsArgs args;
    args.stats = partials(StatsArgs{}, device);
    args.target_logit = target_logit_;
    return launch(args, device);
  }
  std::function<void()> kept_exp_logits(const Device& device) {
    ExpLogitsArgs args;
    args.stats = partials(ExpLogitsArgs{}, device);
    args.target_logit = target_logit_;
    // Near the maximum of normal logits, whose exp logits then sum up to about 1.
    args.logit_offset = on_device(std::vector<float>(static_cast<size_t>(rows_), lse()));
    const int64_t stride = (columns_ + 7) / 8 * 8;
    if (exp_logits_ == nullptr)
      require(cudaMalloc(&exp_logits_, static_cast<size_t>(rows_ * stride) * 2), "cudaMalloc");
    args.exp_logits = {exp_logits_, columns_, stride};
    return launch(args, device);
  }
  // A row keeps what is above 2^-9 of its sum, and draws the rest. A peaked row, as a trained model has it,
  // draws little.
  std::function<void()> draw(const Device& device, bool is_peaked) {
    DrawArgs args;
    args.stats = partials(DrawArgs{}, device);
    args.stats.expected = on_device(std::vector<float>(static_cast<size_t>(args.stats.partials * rows_)));
    args.target_logit = target_logit_;
    args.logit_offset =
        on_device(std::vector<float>(static_cast<size_t>(rows_), is_peaked ? peaked_lse() : lse()));
    args.draws.seed = on_device(std::vector<uint64_t>{1});
    args.draws.role = on_device(std::vector<int32_t>(static_cast<size_t>(columns_), -1));
    args.draws.threshold = on_device(std::vector<float>(static_cast<size_t>(rows_), 0x1p-9f));
    int32_t* count = on_device(std::vector<int32_t>(static_cast<size_t>(rows_)));
    args.draws.count = count;
    args.draws.capacity = 2048;
    args.draws.elements = on_device(std::vector<Draw>(static_cast<size_t>(rows_) * 2048));
    const auto kernel = launch(args, device, is_peaked);
    return [kernel, count, bytes = static_cast<size_t>(rows_) * 4] {
      require(cudaMemsetAsync(count, 0, bytes), "cudaMemset");
      kernel();
    };
  }

 private:
  // lse of normal logits: ln V + variance / 2.
  float lse() const { return std::log(static_cast<float>(columns_)) + kSpread * kSpread / 2; }
  // lse of a peaked row, with its candidates' logits.
  float peaked_lse() const {
    float candidates = 0, variance = 0;
    for (int k = 0; k < kCandidates; ++k) {
      candidates += std::exp(candidate_logit(k));
      variance += candidate_logit(k) * candidate_logit(k) / static_cast<float>(product_.depth);
    }
    return std::log(candidates + static_cast<float>(columns_) * std::exp(variance / 2));
  }

  // Rows that are each the sum of their candidates' rows of the weight, which gives the candidates their
  // logits.
  uint16_t* peaked_rows(const std::vector<uint16_t>& weight) const {
    const auto depth = static_cast<size_t>(product_.depth);
    std::vector<float> numbers(weight.size());
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = bf16_to_float(weight[i]);
    std::vector<uint16_t> values(static_cast<size_t>(rows_) * depth);
    std::vector<float> row(depth);
    for (size_t i = 0; i < static_cast<size_t>(rows_); ++i) {
      std::fill(row.begin(), row.end(), 0.f);
      for (int k = 0; k < kCandidates; ++k) {
        const size_t column = (i * 7919 + static_cast<size_t>(k) * 104'729) % static_cast<size_t>(columns_);
        const float factor = candidate_logit(k) / (product_.transform.scale * static_cast<float>(depth));
        size_t at = column * depth % numbers.size();
        for (float& value : row) {
          value += factor * numbers[at];
          at = at + 1 == numbers.size() ? 0 : at + 1;
        }
      }
      std::transform(row.begin(), row.end(), values.begin() + static_cast<std::ptrdiff_t>(i * depth),
                     float_to_bf16);
    }
    return on_device(values);
  }

  PartialStats partials(const EpilogueArgs& epilogue, const Device& device) {
    LogitsArgs args{product_, epilogue};
    PartialStats out;
    out.partials = plan_logits(args, device, false).partials;
    out.stride = rows_;
    const auto count = static_cast<size_t>(out.partials * rows_);
    out.sum = on_device(std::vector<float>(count));
    if (std::holds_alternative<StatsArgs>(epilogue))
      out.max = on_device(std::vector<float>(count, -INFINITY));
    return out;
  }

  std::function<void()> launch(const EpilogueArgs& epilogue, const Device& device,
                               bool is_peaked = false) const {
    return [args = LogitsArgs{is_peaked ? peaked_ : product_, epilogue}, device] {
      launch_logits(args, device, Queue(cudaStream_t{}));
    };
  }

  int64_t rows_, columns_;
  LogitsProduct product_, peaked_;
  float* target_logit_ = nullptr;
  void* exp_logits_ = nullptr;
};

Device like(Device device, int processors, int64_t shared_bytes, int64_t l2_bytes) {
  device.processors = std::min(device.processors, processors);
  device.shared_bytes = std::min(device.shared_bytes, shared_bytes);
  device.l2_bytes = std::min(device.l2_bytes, l2_bytes);
  return device;
}

// Measures all in rounds, each in another order, until so many seconds have passed. There is at least one
// round.
void take_turns(std::vector<Measurement>& all, double seconds,
                const std::function<void(Measurement&)>& measure) {
  static std::mt19937 random(4);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<size_t> order(all.size());
  std::iota(order.begin(), order.end(), size_t{0});
  do {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t each : order) measure(all[each]);
  } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds);
}

void print(const std::vector<float>& seconds) {
  for (size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.9g", i == 0 ? "[" : ", ", seconds[i]);
  std::printf("]");
}

void run(int64_t rows, int64_t columns, int64_t depth, double seconds) {
  const Device& whole = query_device(0);
  Launches launches(rows, columns, depth);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<uint32_t> bits(1 << 16);
  for (uint32_t& word : bits) {
    word = static_cast<uint32_t>(float_to_bf16(normal(random))) << 16 | float_to_bf16(normal(random));
  }
  const uint32_t* operands = on_device(bits);
  float* out = on_device(std::vector<float>(1024));
  const double flop =
      2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth);

  std::vector<Measurement> all;
  const std::pair<const char*, Device> devices[] = {{"whole", whole},
                                                    {"a100", like(whole, 108, 163 << 10, 40 << 20)},
                                                    {"rtx-4090", like(whole, 128, 99 << 10, 72 << 20)}};
  for (const auto& [name, device] : devices) {
    const int blocks = device.processors;
    for (const int warps : {kWarps, kWarps / 2}) {
      const double of_a_turn = 2.0 * 16 * 8 * 16 * kSums * warps * blocks;
      const int turns = static_cast<int>(flop / of_a_turn) + 1;
      const char* what = warps == kWarps ? "ceiling" : "ceiling of half the warps";
      all.push_back({what, name, blocks, turns * of_a_turn, [=] {
                       ceiling_kernel<<<static_cast<unsigned>(blocks), 32 * warps>>>(operands, out, turns);
                     }});
    }
    all.push_back({"loss", name, blocks, flop, launches.loss(device)});
    all.push_back({"kept exp_logits", name, blocks, flop, launches.kept_exp_logits(device)});
    all.push_back({"draw", name, blocks, flop, launches.draw(device, false)});
    all.push_back({"draw, peaked", name, blocks, flop, launches.draw(device, true)});
  }
  for (const Measurement& each : all) each.launch();
  require(cudaDeviceSynchronize(), "a kernel");
  take_turns(all, seconds / 2, [](Measurement& each) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    each.burst_seconds.push_back(seconds_of(each.launch));
  });
  take_turns(all, seconds / 2, [](Measurement& each) { each.seconds.push_back(seconds_of(each.launch)); });
  for (const Measurement& each : all) {
    std::printf("{\"what\": \"%s\", \"device\": \"%s\", \"blocks\": %d, \"flop\": %.0f, \"seconds\": ",
                each.what.c_str(), each.device.c_str(), each.blocks, each.flop);
    print(each.seconds);
    std::printf(", \"burst_seconds\": ");
    print(each.burst_seconds);
    std::printf("}\n");
  }
}

}  // namespace
}  // namespace logitless::cuda::mma::times

int main(int count, char** arguments) {
  if (count != 5) {
    std::fprintf(stderr, "%s ROWS COLUMNS DEPTH SECONDS\n", arguments[0]);
    return 2;
  }
  logitless::cuda::mma::times::run(std::atoll(arguments[1]), std::atoll(arguments[2]),
                                   std::atoll(arguments[3]), std::atof(arguments[4]));
}
