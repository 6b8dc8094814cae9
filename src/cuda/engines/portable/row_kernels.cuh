#pragma once
// Kernels that turn a block of dot products into statistics, exp logits or gradients. They usually read each
// dot product once.
#include "core/top_k.h"
#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"

namespace logitless::cuda::portable {

// Dot products that a thread loads at once: 16 bytes of float.
inline constexpr int kAtOnce = 4;

// A launch in one parameter. With two parameters, nvcc 13 compiles each kernel's loops again for each
// transform.
template <class Args, class Real = float>
struct RowParams {
  LogitsProductOf<Real> product;
  Args args;
};

template <class Real>
struct Tile {
  Real* z;              // [rows, stride] dot products
  int64_t stride;       // a multiple of kAtOnce
  int64_t row, column;  // of its first element in the arguments' matrices
  int64_t rows, columns;
  // The columns that are summed in one partial, and the partial of the first strip. Consecutive strips have
  // consecutive partials.
  int64_t strip;
  int64_t first_partial;
};

template <class T>
struct alignas(kAtOnce * sizeof(T) < 16 ? kAtOnce * sizeof(T) : 16) Numbers {
  T of[kAtOnce];
};

// A streaming load: the data are not read again soon, so other data may stay in the L2 cache.
template <class Real>
__device__ inline Numbers<Real> load_once(const Real* from) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Numbers<Real>) == sizeof(float4)) {
    const float4 all = __ldcs(reinterpret_cast<const float4*>(from));
    return {{all.x, all.y, all.z, all.w}};
  }
#endif
  return *reinterpret_cast<const Numbers<Real>*>(from);
}
template <class T>
__device__ inline void store_once(T* to, const Numbers<T>& numbers) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(numbers) == sizeof(uint2)) {
    __stcs(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2&>(numbers));
    return;
  }
#endif
  *reinterpret_cast<Numbers<T>*>(to) = numbers;
}

inline constexpr int kRowThreads = 256;  // of a block

// Instances of a kernel: the threads of a row (a warp or the block), and whether logits are dot products
// times scale with nothing else wanted (is_plain()).
template <int kLanesOf, bool kPlainOf>
struct Instance {
  static constexpr int kLanes = kLanesOf;
  static constexpr bool kPlain = kPlainOf;
  static constexpr int kLines = kRowThreads / kLanes;  // of a block
};
template <class Real>
bool is_plain(const LogitsProductOf<Real>& product) {
  const LogitTransform<Real>& t = product.transform;
  return product.mask.words == nullptr && t.bias == nullptr && t.softcap == 0 &&
         t.inverse_temperature == nullptr;
}
template <class Real>
bool is_plain(const RowSumsOf<Real>& args) {
  return args.class_weight == nullptr && !args.stats.has_options();
}
template <class Real>
bool is_plain(const GradientArgsOf<Real>& args) {
  return args.class_weight == nullptr;
}

// A number rounded as if it were stored. Then no later instruction can fuse its rounding, and all kernels get
// the same bits of a logit.
template <class Real>
__device__ inline Real rounded(Real x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<Real, double>) {
    asm volatile("" : "+d"(x));
  } else {
    asm volatile("" : "+f"(x));
  }
#endif
  return x;
}

// Whether the row must be computed.
template <class Real>
__device__ inline bool row_exists(const LogitsProductOf<Real>& product, int64_t row) {
  if (row >= existing(product.row_count, product.rows)) return false;
  return product.row_block_active == nullptr || product.row_block_active[row / kRowBlock] != 0;
}

// A row of a tile, or a strip of it.
template <class Of, class Real>
struct Line {
  static constexpr int kLanes = Of::kLanes;
  const LogitsProductOf<Real>& product;
  const Real* dots;
  int64_t row;     // in the arguments' matrices
  int64_t column;  // of the first dot product in the arguments' matrices
  int64_t partial;
  int columns;
  Real inverse_temperature = 1;
  const int32_t* mask = nullptr;  // words of the row; null: none

  __device__ Line(const LogitsProductOf<Real>& of, const Tile<Real>& tile, int64_t tile_row, int64_t strip)
      : product(of),
        dots(tile.z + tile_row * tile.stride + strip * tile.strip),
        row(tile.row + tile_row),
        column(tile.column + strip * tile.strip),
        partial(tile.first_partial + strip),
        columns(static_cast<int>(min(tile.strip, tile.columns - strip * tile.strip))) {
    if (Of::kPlain) return;
    inverse_temperature = product.transform.inverse_temperature_of(row);
    mask = product.mask_of_row(row);
  }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  __device__ Real logit(int j) const {
    if (is_masked(j)) return -std::numeric_limits<Real>::infinity();
    return product.transform.logit(dots[j], product.transform.bias_of(column + j), inverse_temperature);
  }
  // The column of the row's target in the line; it may be outside of the line.
  __device__ int64_t target() const {
    return product.target == nullptr ? -1 : product.target[row] - product.column_offset - column;
  }
  __device__ void store_target_logit(Real* target_logit) const {
    const int64_t j = target();
    if (lane() == 0 && j >= 0 && j < columns) target_logit[row] = logit(static_cast<int>(j));
  }

  // Calls body(j, logits, count) for logits [j, j + count) of the line; -inf stands behind the last one.
  template <class F>
  __device__ void for_each(const F& body) const {
    constexpr int kStep = kLanes * kAtOnce;
    constexpr int kLoads = Of::kPlain ? 4 : 1;  // that a thread waits for together
    int j = lane() * kAtOnce;
    for (; j + (kLoads - 1) * kStep + kAtOnce <= columns; j += kLoads * kStep) {
      Numbers<Real> z[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) z[i] = load_once(dots + j + i * kStep);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        transform(j + i * kStep, z[i], kAtOnce);
        body(j + i * kStep, z[i].of, kAtOnce);
      }
    }
    for (; j < columns; j += kStep) {
      Numbers<Real> z = load_once(dots + j);
      const int count = min(columns - j, kAtOnce);
      transform(j, z, count);
      body(j, z.of, count);
    }
  }

 private:
  __device__ bool is_masked(int64_t j) const {
    return mask != nullptr && !ColumnMask::has(mask, product.column_offset + column + j);
  }
  __device__ void transform(int j, Numbers<Real>& z, int count) const {
    const LogitTransform<Real>& t = product.transform;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i >= count) {
        z.of[i] = -std::numeric_limits<Real>::infinity();
      } else if constexpr (Of::kPlain) {
        z.of[i] = rounded(z.of[i] * t.scale);
      } else {
        z.of[i] = is_masked(j + i)
                      ? -std::numeric_limits<Real>::infinity()
                      : rounded(t.logit(z.of[i], t.bias_of(column + j + i), inverse_temperature));
      }
    }
  }
};

// Reductions over kLanes threads: sum, maximum (NaN if there is one), and the best of values with their
// columns. All of the threads get the result.
template <int kLanes, class T, class Join>
__device__ inline T joined_lanes(T value, const Join& join) {
  for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(~0u, value, step));
  if constexpr (kLanes > 32) {
    __shared__ T values[kLanes / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value;
    __syncthreads();
    value = values[0];
    for (int w = 1; w < kLanes / 32; ++w) value = join(value, values[w]);
  }
  return value;
}
template <int kLanes, class Real>
__device__ inline Real lanes_sum(Real value) {
  return joined_lanes<kLanes>(value, [](Real a, Real b) { return a + b; });
}
template <class Real>
__device__ inline Real larger(Real a, Real b) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<Real, float>) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
    return a;
  }
#endif
  return b > a || b != b ? b : a;
}
template <int kLanes, class Real>
__device__ inline Real lanes_max(Real value) {
  return joined_lanes<kLanes>(value, [](Real a, Real b) { return larger(a, b); });
}

// Adds a logit to the optional sums that the partials have. w is its class weight, distance is z - logit
// offset, e is the exp of that. `weighted` is relative to 0, because no partial has the sum of the class
// weights of its columns.
template <class Real, class Partials>
__device__ inline void add_options(RowStats<Real>& sums, const Partials& partials, Real z,
                                   [[maybe_unused]] Real w, Real distance, Real e) {
#define LOGITLESS_SUM(name, part, kind, term)                                         \
  if (partials.part != nullptr) {                                                     \
    [[maybe_unused]] const Real d = SumKind::kind == SumKind::kOffset ? z : distance; \
    sums.part += term;                                                                \
  }
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
}

// Statistics of a line over all threads, relative to a given logit offset.
template <class Real>
struct LineSums {
  Real max = -std::numeric_limits<Real>::infinity();
  RowStats<Real> stats;  // its max is the logit offset
};

// Like for_each(), but store(j, logits, exp_logits, count) also gets the exp logits. low: rounding error of
// the logit offset. kFar: by exp_from_far(), without low.
template <bool kFar = false, class Of, class Real, class Store>
__device__ inline LineSums<Real> sum_line(const Line<Of, Real>& line, const RowSumsOf<Real>& args,
                                          Real logit_offset, Real low, const Store& store) {
  LineSums<Real> line_sums;
  RowStats<Real>& sums = line_sums.stats;
  const PartialStatsOf<Real>& partials = args.stats;
  constexpr int kLanes = Of::kLanes;
  const bool has_options = !Of::kPlain && partials.has_options();
  Real best = line_sums.max;
  int32_t at = INT32_MAX;
  line.for_each([&](int j, const Real* z, int count) {
    Real e[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if constexpr (kFar) {
        e[i] = exp_from_far(z[i], logit_offset);
      } else {
        e[i] = exp_from(z[i] - logit_offset, low);
      }
      line_sums.max = larger(line_sums.max, z[i]);
    }
    sums.sum_exp += (e[0] + e[1]) + (e[2] + e[3]);
    if (has_options) {
      for (int i = 0; i < count; ++i) {
        const Real w = args.class_weight != nullptr ? args.class_weight[line.column + j + i] : Real(1);
        add_options(sums, partials, z[i], w, z[i] - logit_offset, e[i]);
        if (partials.argmax != nullptr && is_better(z[i], j + i, best, at)) best = z[i], at = j + i;
      }
    }
    store(j, z, e, count);
  });
  line_sums.max = lanes_max<kLanes>(line_sums.max);
  sums.max = logit_offset;
  sums.sum_exp = lanes_sum<kLanes>(sums.sum_exp);
#define LOGITLESS_SUM(name, part, ...) \
  if (partials.part != nullptr) sums.part = lanes_sum<kLanes>(sums.part);
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  if (partials.argmax != nullptr) {
    const bool is_mine = best == line_sums.max || (best != best && line_sums.max != line_sums.max);
    const int32_t first =
        joined_lanes<kLanes>(is_mine ? at : INT32_MAX, [](int32_t a, int32_t b) { return min(a, b); });
    sums.argmax = line.product.column_offset + line.column + first;
  }
  return line_sums;
}

// Makes sums relative to the given logit offset. They are relative to the maximum if there is no offset, or
// if the maximum is more than most_above nats above it. sum(logit_offset) makes them, usually once. `guess`
// is a guess of the row's maximum, or -inf. If it is higher, it replaces the maximum of a line without an
// offset. Another product may have made it. So it replaces it up to a limit, above which exp logits could be
// lost.
template <class Of, class Real, class Make>
__device__ inline LineSums<Real> sum_near_offset(const Line<Of, Real>& line, Real logit_offset,
                                                 Real most_above, const Make& sum,
                                                 Real guess = -std::numeric_limits<Real>::infinity()) {
  constexpr Real kMostGuessAbove = 40;  // squares of exp logits are still normal numbers
  const bool is_new = !(std::fabs(logit_offset) <= std::numeric_limits<Real>::max());
  if (is_new) {
    Real largest = -std::numeric_limits<Real>::infinity();
    line.for_each([&](int, const Real* z, int) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) largest = larger(largest, z[i]);
    });
    logit_offset = larger(logit_offset, lanes_max<Of::kLanes>(largest));
    if (guess > logit_offset) logit_offset = min(guess, logit_offset + kMostGuessAbove);
  }
  LineSums<Real> line_sums =
      sum(logit_offset == -std::numeric_limits<Real>::infinity() ? Real(0) : logit_offset);
  if (!is_new && !(line_sums.max - logit_offset <= most_above)) return sum(line_sums.max);
  line_sums.stats.max = logit_offset;
  return line_sums;
}

// Statistics in another number type.
template <class To, class From>
__device__ inline RowStats<To> as(const RowStats<From>& from) {
  RowStats<To> to;
  to.max = from.max, to.argmax = from.argmax;
#define LOGITLESS_COPY(name, part, ...) to.part = from.part;
  LOGITLESS_ROW_SUMS(LOGITLESS_COPY)
#undef LOGITLESS_COPY
  return to;
}

// Adds a line's sums to a partial's sums. The partial's are relative to `logit_offset` before and to the
// larger offset of both after, or to the maximum before and after. This uses double except in plain
// instances: a masked tile's maximum times its elements exceeds fp32.
template <class Of, class Real>
__device__ inline void add_to_partial(const PartialStatsOf<Real>& partials, int64_t s, int64_t row,
                                      Real logit_offset, const LineSums<Real>& line, bool is_to_maximum) {
  using Wide = std::conditional_t<Of::kPlain, Real, double>;
  RowStats<Wide> sums = stats_of_partial<Wide>(partials, s, row), line_stats = as<Wide>(line.stats), largest,
                 line_largest;
  largest.max = sums.max, largest.argmax = sums.argmax;
  line_largest.max = line.max, line_largest.argmax = line_stats.argmax;
  largest = merge(largest, line_largest);
  sums.max = logit_offset;
  sums = merge(sums, line_stats);
  if (is_to_maximum) sums = rebase(sums, largest.max);
  sums.max = largest.max;
  const int64_t at = s * partials.stride + row;
  store_partial(partials, at, sums);
  if (partials.argmax != nullptr) partials.argmax[at] = static_cast<int32_t>(largest.argmax);
}

struct StoreNothing {
  template <class Real>
  __device__ void operator()(int, const Real*, const Real*, int) const {}
};

// Works on each row and strip of a tile.
template <class Work, class Of, class Args, class Real>
__global__ void __launch_bounds__(kRowThreads) lines_kernel(RowParams<Args, Real> params, Tile<Real> tile) {
  const int64_t row = int64_t{blockIdx.x} * Of::kLines + threadIdx.x / Of::kLanes;
  if (row >= tile.rows || !row_exists(params.product, tile.row + row)) return;
  Work::work(Line<Of, Real>(params.product, tile, row, blockIdx.y), params.args);
}

// Adds each line to the sums of its partial.
struct Sum {
  template <class Of, class Real>
  static __device__ void work(const Line<Of, Real>& line, const RowSumsOf<Real>& args) {
    constexpr Real kMostAbove = 1;  // else the line is read once more, from a cache
    const Real before = args.stats.max[line.partial * args.stats.stride + line.row];
    const LineSums<Real> line_sums = sum_near_offset(line, before, kMostAbove, [&](Real logit_offset) {
      return sum_line(line, args, logit_offset, Real(0), StoreNothing{});
    });
    line.store_target_logit(args.target_logit);
    if (line.lane() == 0)
      add_to_partial<Of>(args.stats, line.partial, line.row, before, line_sums, /*is_to_maximum=*/true);
  }
};

// A thread's part of a row that is stored. out points to the line's first column. Numbers [0, columns) are
// kept.
template <class T>
struct Stored {
  T* out;
  int columns;
  bool is_aligned;

  __device__ Stored(const StoredColumns& to, int64_t row, int64_t column)
      : out(static_cast<T*>(to.data) + row * to.stride + column),
        columns(static_cast<int>(max(int64_t{0}, to.columns - column))),
        is_aligned(reinterpret_cast<uintptr_t>(out) % (kAtOnce * sizeof(T)) == 0) {}

  // Stores value(i) in column j + i, for i < count.
  template <class Value>
  __device__ void store(int j, int count, const Value& value) const {
    const int some = min(count, columns - j);
    if (some == kAtOnce && is_aligned) {
      Numbers<T> all;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) all.of[i] = from_real<T>(value(i));
      store_once(out + j, all);
    } else {
      for (int i = 0; i < some; ++i) out[j + i] = from_real<T>(value(i));
    }
  }
};

// Keeps exp logits relative to a row's logit offset. The offset is the maximum of the row's first line, or
// the target's logit if that is higher. If it is too low, a higher one is chosen, and the kept exp logits are
// rescaled. Sums are made as well, except with batch_invariant, where Sum makes them.
template <class T>
struct KeepExpLogits {
  template <class Of>
  static __device__ void work(const Line<Of, float>& line, const ExpLogitsArgs& args) {
    const LogitsProduct& product = line.product;
    const int64_t row = line.row;
    const bool is_first = product.column_offset + line.column == 0;
    // Above this, all kept exp logits of the row are rescaled to another logit offset. The sum of their
    // squares is below fp32's largest number.
    constexpr float kMostAbove = 30;
    constexpr float kFarAbove =
        8;  // above this, a line's exp logits are made again without their lost digits
    const float old_offset = is_first ? -CUDART_INF_F : args.chosen_offset[row];
    const bool has_guess = is_first && args.logit_offset != nullptr && product.target[row] >= 0;
    const float guess = has_guess ? args.logit_offset[row] : -CUDART_INF_F;
    const Stored<T> stored(args.exp_logits, row, line.column);
    const auto store = [&](int j, const float* z, const float* e, int count) {
      stored.store(j, count, [&](int i) {
        if (Of::kPlain || e[i] == 0) return e[i];
        return e[i] * product.transform.slope(z[i], line.inverse_temperature);
      });
    };
    LineSums<float> line_sums = sum_near_offset(
        line, old_offset, kMostAbove,
        [&](float logit_offset) { return sum_line(line, args, logit_offset, 0.0f, store); }, guess);
    if (line_sums.max - line_sums.stats.max > kFarAbove)
      line_sums = sum_line<true>(line, args, line_sums.stats.max, 0.0f, store);
    const float logit_offset = line_sums.stats.max;
    if (old_offset > -CUDART_INF_F && logit_offset != old_offset) {
      const float factor = exp_from(old_offset, logit_offset);
      const int64_t before = args.kept_before + min(line.column, args.exp_logits.columns);
      T* kept = static_cast<T*>(args.exp_logits.data) + row * args.exp_logits.stride - args.kept_before;
      for (int64_t j = line.lane(); j < before; j += Of::kLanes)
        kept[j] = from_float<T>(to_float(kept[j]) * factor);
    }
    if (!product.batch_invariant) line.store_target_logit(args.target_logit);
    if (line.lane() != 0) return;
    args.chosen_offset[row] = logit_offset;
    if (!product.batch_invariant)
      add_to_partial<Of>(args.stats, 0, row, old_offset, line_sums, /*is_to_maximum=*/false);
  }
};

template <class T>
struct MakeGradient {
  template <class Of, class Real>
  static __device__ void work(const Line<Of, Real>& line, const GradientArgsOf<Real>& args) {
    const LogitsProductOf<Real>& product = line.product;
    const int64_t row = line.row;
    const bool is_ignored = product.target[row] == kIgnoredRow;
    const int64_t target = line.target();
    const float factor = args.factor != nullptr ? *args.factor : 1.0f;
    const Real lse = args.lse[row], low = args.lse_residual != nullptr ? args.lse_residual[row] : 0;
    const RowCoefficients<Real> k = {args.a[row], args.b != nullptr ? args.b[row] : 0,
                                     args.c != nullptr ? args.c[row] : 0, args.g[row]};
    const Stored<T> stored(args.dz, row, line.column);
    const auto element = [&](int j, Real z, Real q) {
      const bool has_weight = !Of::kPlain && args.class_weight != nullptr;
      const Real v =
          dz_element(k, (z - lse) - low, has_weight ? args.class_weight[line.column + j] : Real(1), q);
      if (is_ignored) return Real(0);
      return Of::kPlain ? v * factor : v * product.transform.slope(z, line.inverse_temperature) * factor;
    };
    line.for_each([&](int j, const Real* z, int count) {
      stored.store(j, count, [&](int i) { return element(j + i, z[i], Real(0)); });
      // The target's element is made again separately, which keeps the loop short.
      if (target >= j && target < j + count && target < stored.columns) {
        const int at = static_cast<int>(target);
        stored.out[at] = from_real<T>(element(at, line.logit(at), Real(1)));
      }
    });
  }
};

}  // namespace logitless::cuda::portable
