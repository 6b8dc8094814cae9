// The contract of engines/logits.h for the Hopper engine, one row at a time in plain C++. So plans, row
// kernels and gradients are tested with the values that it stores. Its own kernels need a Hopper GPU.
#include <cuda_fp8.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/sparsification.h"
#include "cuda/engines/portable/row_kernels.cuh"
#include "cuda/engines/sm90/config.h"
#include "cuda/engines/sm90/launch.h"
#include "cuda/rows/exp2.cuh"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/softcap.h"

namespace logitless::cuda::sm90 {
namespace {

using portable::add_options;

// A thread of a kernel has every fourth pair of columns of a tile. Each such share draws by itself and has a
// maximum of its own.
constexpr int kShares = 4;
constexpr int kShareColumns = kTileColumns / kShares;

int64_t column_of_share(int share, int i) {
  return 2 * share + 8 * (i / 2) + i % 2;
}

float operand(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kE4M3) return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(data)[index]);
  return dtype == DType::kBF16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index])
                               : __half2float(static_cast<const __half*>(data)[index]);
}

void store(const StoredColumns& to, DType dtype, int64_t row, int64_t column, float value) {
  const int64_t at = row * to.stride + column;
  if (dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(to.data)[at] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(to.data)[at] = __float2half_rn(value);
  }
}

float exp_of(float z, const SplitOffset& logit_offset) {
  return exp2_approx(std::fma(z - logit_offset.far, kLog2E, logit_offset.shift));
}

struct Row {
  const LogitsProduct& product;
  int64_t row;
  int32_t target;
  float inverse_temperature;
  std::vector<float> z;  // logits of the window

  // Takes the weight's elements as numbers, and the factor of the row's elements.
  Row(const LogitsProduct& given, const std::vector<float>& weight, int64_t number, float factor)
      : product(given),
        row(number),
        target(given.target == nullptr ? -1 : given.target[number]),
        inverse_temperature(given.transform.inverse_temperature_of(number)),
        z(static_cast<size_t>(given.columns)) {
    std::vector<float> hidden(static_cast<size_t>(product.depth));
    for (int64_t k = 0; k < product.depth; ++k) {
      hidden[static_cast<size_t>(k)] =
          operand(product.hidden, product.dtype, row * product.hidden_stride + k) * factor;
    }
    const int32_t* mask = product.mask_of_row(row);
    for (int64_t j = 0; j < product.columns; ++j) {
      if (mask != nullptr && !ColumnMask::has(mask, product.column_offset + j)) {
        z[static_cast<size_t>(j)] = -INFINITY;
        continue;
      }
      const float dot =
          std::inner_product(hidden.begin(), hidden.end(), weight.begin() + j * product.depth, 0.0f);
      z[static_cast<size_t>(j)] =
          product.transform.logit(dot, product.transform.bias_of(j), inverse_temperature);
    }
  }

  float at(int64_t column) const {
    return column < product.columns ? z[static_cast<size_t>(column)] : -INFINITY;
  }

  // The partial of the tile at a column of the window.
  int64_t partial(int64_t column) const {
    return product.batch_invariant ? (product.column_offset + column) / kTileColumns : 0;
  }
  int64_t place(const PartialStats& partials, int64_t column) const {
    return partial(column) * partials.stride + row;
  }
  bool is_target(int64_t column) const { return column == target - product.column_offset; }
};

template <class Body>
void for_tiles(const Row& r, Body body) {
  for (int64_t first = 0; first < r.product.columns; first += kTileColumns) {
    body(first, std::min<int64_t>(r.product.columns, first + kTileColumns));
  }
}

void write_target_logit(const Row& r, const RowSums& args) {
  if (args.target_logit == nullptr) return;
  for (int64_t j = 0; j < r.product.columns; ++j) {
    if (r.is_target(j)) args.target_logit[r.row] = r.at(j);
  }
}

void join_maximum(const Row& r, const PartialStats& partials, int64_t first, int64_t end) {
  if (partials.max == nullptr) return;
  const int64_t place = r.place(partials, first);
  for (int64_t j = first; j < end; ++j) {
    const auto column = static_cast<int32_t>(r.product.column_offset + j);
    const int32_t known =
        partials.argmax != nullptr && partials.argmax[place] >= 0 ? partials.argmax[place] : INT32_MAX;
    if (!is_better(r.at(j), column, partials.max[place], known)) continue;
    partials.max[place] = r.at(j);
    if (partials.argmax != nullptr) partials.argmax[place] = column;
  }
}

double weight_of(const RowSums& args, int64_t column) {
  return args.class_weight != nullptr ? double{args.class_weight[column]} : 1;
}

void add_parts(const PartialStats& partials, int64_t place, const RowStats<double>& parts) {
#define LOGITLESS_ADD(name, part, ...) \
  if (partials.part != nullptr) partials.part[place] += static_cast<float>(parts.part);
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_ADD)
#undef LOGITLESS_ADD
}

void make_stats(const Row& r, const RowSums& args) {
  write_target_logit(r, args);
  const PartialStats& partials = args.stats;
  for_tiles(r, [&](int64_t first, int64_t end) {
    int32_t at = INT32_MAX;
    float largest = -INFINITY;
    for (int64_t j = first; j < end; ++j) {
      if (is_better(r.at(j), static_cast<int32_t>(j), largest, at))
        largest = r.at(j), at = static_cast<int32_t>(j);
    }
    RowStats<double> parts;
    double sum = 0;
    for (int64_t j = first; j < end; ++j) {
      const float e = r.at(j) == -INFINITY ? 0.0f : std::exp(r.at(j) - largest);
      sum += e;
      add_options(parts, args.stats, double{r.at(j)}, weight_of(args, j), double{r.at(j)} - largest,
                  double{e});
    }
    RowStats<double> mine = parts;
    mine.max = largest, mine.sum_exp = sum;
    mine.argmax = r.product.column_offset + at;
    const int64_t place = r.place(partials, first);
    const RowStats<double> all = merge(stats_of_partial(partials, r.partial(first), r.row), mine);
    store_partial(partials, place, all);
    if (partials.argmax != nullptr) partials.argmax[place] = static_cast<int32_t>(all.argmax);
  });
}

void make(const Row& r, const StatsArgs& args) {
  make_stats(r, args);
}

// Stores the exp logits of a tile that begins at column `first`.
void store_exp_logits(const Row& r, const ExpLogitsArgs& args, int64_t first,
                      const std::vector<float>& kept) {
  int exponent = kKeptExponent;
  if (r.product.dtype == DType::kF16) {
    float largest = 0;
    for (const float e : kept) {
      if (!(e <= largest)) largest = e;
    }
    exponent = shared_exponent(largest);
    args.exponents.data[r.row * args.exponents.stride + first / kExponentColumns] =
        static_cast<int8_t>(exponent);
  }
  for (int64_t j = first; j < std::min<int64_t>(args.exp_logits.columns, first + std::ssize(kept)); ++j) {
    store(args.exp_logits, stored_dtype(r.product.dtype), r.row, j,
          kept[static_cast<size_t>(j - first)] * power_of_two(exponent));
  }
}

void make(const Row& r, const ExpLogitsArgs& args) {
  write_target_logit(r, args);
  const SplitOffset logit_offset = split_offset(args.logit_offset[r.row]);
  const float softcap = r.product.transform.softcap;
  const float inverse_cap = inverse_softcap(softcap * r.inverse_temperature);
  for_tiles(r, [&](int64_t first, int64_t end) {
    join_maximum(r, args.stats, first, end);
    float sum = 0;
    RowStats<double> parts;
    std::vector<float> kept;
    for (int64_t j = first; j < end; ++j) {
      const float e = exp_of(r.at(j), logit_offset);
      sum += e;
      add_options(parts, args.stats, double{r.at(j)}, weight_of(args, j),
                  r.at(j) - rounded_offset(logit_offset), double{e});
      kept.push_back(softcap == 0 ? e : e * softcap_slope(r.at(j), inverse_cap));
    }
    if (first < args.exp_logits.columns) store_exp_logits(r, args, first, kept);
    args.stats.sum[r.place(args.stats, first)] += sum;
    add_parts(args.stats, r.place(args.stats, first), parts);
  });
}

void make(const Row& r, const GradientArgs& args) {
  const auto value = [&](const float* of_rows) { return of_rows != nullptr ? of_rows[r.row] : 0.0f; };
  const RowCoefficients<float> k = {value(args.a), value(args.b), value(args.c), value(args.g)};
  const float factor = args.factor != nullptr ? *args.factor : 1.0f;
  for (int64_t j = 0; j < r.product.columns; ++j) {
    const float weight = args.class_weight != nullptr ? args.class_weight[j] : 1.0f;
    const float v =
        dz_element(k, (r.at(j) - args.lse[r.row]) - value(args.lse_residual), weight, r.is_target(j));
    const float slope = r.product.transform.slope(r.at(j), r.inverse_temperature);
    store(args.dz, stored_dtype(r.product.dtype), r.row, j, v * slope * factor);
  }
}

// Draws from one share of a tile; returns the expected number of kept elements, times threshold.
float draw(const Row& r, const Draws& draws, int64_t first, int share, const SplitOffset& logit_offset,
           int64_t index) {
  const float threshold = draws.threshold[r.row], certain = draws.certain_share * threshold;
  const auto first_column = static_cast<int32_t>(r.product.column_offset + first);
  const uint32_t stream =
      kFirstDrawStream + draws.first_stream + static_cast<uint32_t>(first_column + 2 * share);
  float running =
      threshold * (1 - draw_uniform(draw_bits(*draws.seed, static_cast<uint32_t>(index), stream)));
  float expected = 0;
  for (int i = 0; i < kShareColumns; ++i) {
    const int64_t j = first + column_of_share(share, i);
    const float q = exp_of(r.at(j), logit_offset);
    const bool large = q >= certain;
    expected += large ? threshold : q;
    if (!large) running += q;
    const bool passed = running >= threshold;
    if (passed) running -= threshold;
    const auto column = static_cast<int32_t>(r.product.column_offset + j);
    if (!(large || passed) || !(threshold < INFINITY) || draws.role[column] >= 0) continue;
    const int32_t at = draws.count[index]++;
    if (at < draws.capacity - 1) draws.elements[index * draws.capacity + at] = {2 * column + large, r.at(j)};
  }
  return expected;
}

void make(const Row& r, const DrawArgs& args) {
  write_target_logit(r, args);
  const int64_t index = args.draws.row != nullptr ? args.draws.row[r.row] : r.row;
  const float low =
      args.draws.lse_estimate_residual != nullptr ? args.draws.lse_estimate_residual[index] : 0.0f;
  const SplitOffset logit_offset = split_offset(args.logit_offset[r.row], low);
  for_tiles(r, [&](int64_t first, int64_t end) {
    join_maximum(r, args.stats, first, end);
    float sum = 0, expected = 0;
    RowStats<double> parts;
    for (int64_t j = first; j < end; ++j) {
      const float q = exp_of(r.at(j), logit_offset);
      sum += q;
      add_options(parts, args.stats, double{r.at(j)}, weight_of(args, j),
                  r.at(j) - rounded_offset(logit_offset), double{q});
    }
    for (int share = 0; share < kShares; ++share) {
      expected += draw(r, args.draws, first, share, logit_offset, index);
    }
    if (args.stats.sum == nullptr) return;
    const int64_t place = r.place(args.stats, first);
    args.stats.sum[place] += sum;
    args.stats.expected[place] += expected;
    add_parts(args.stats, place, parts);
  });
}

void make(const Row& r, const TopArgs& args) {
  const TopLogits& top = args.top;
  if (top.group_max != nullptr) {
    for_tiles(r, [&](int64_t first, int64_t) {
      for (int share = 0; share < kShares; ++share) {
        float largest = -INFINITY;
        for (int i = 0; i < kShareColumns; ++i) {
          const float z = r.at(first + column_of_share(share, i));
          if (is_better(z, 0, largest, 0)) largest = z;
        }
        top.group_max[r.row * top.groups + first / kTileColumns * kTopGroups + share] = largest;
      }
    });
    return;
  }
  for (int64_t j = 0; j < r.product.columns; ++j) {
    if (r.at(j) < top.threshold[r.row]) continue;
    const int32_t at = top.count[r.row]++;
    const auto column = static_cast<int32_t>(r.product.column_offset + j);
    if (at < top.capacity) top.listed[r.row * top.capacity + at] = {r.at(j), column};
  }
  make_stats(r, args);
}

void make(const Row& r, const SampleArgs& args) {
  const Samples& samples = args.samples;
  for (int64_t s = 0; s < samples.count; ++s) {
    const int64_t at = r.row * samples.count + s;
    SampleRace race(samples.key[at], samples.best[at]);
    for (int64_t j = 0; j < r.product.columns; ++j) {
      race.add(r.at(j), samples.first_column + static_cast<uint32_t>(r.product.column_offset + j));
    }
    samples.best[at] = race.best;
  }
  make_stats(r, args);
}

void clear_row(const LogitsArgs& args, int64_t row) {
  const StoredColumns* stored = stored_by(args);
  if (stored == nullptr) return;
  for (int64_t j = 0; j < stored->columns; ++j) store(*stored, stored_dtype(args.dtype), row, j, 0);
}

// The factors of 8-bit operands' rows.
float row_factor(const LogitsArgs& args, int64_t row) {
  return args.dtype == DType::kE4M3 ? args.row_factor[row] : 1;
}
float column_factor(const LogitsArgs& args, int64_t column) {
  return args.dtype == DType::kE4M3 ? args.column_factor[column] : 1;
}

void make_row(const LogitsArgs& args, const std::vector<float>& weight, int64_t row) {
  if (args.row_block_active != nullptr && args.row_block_active[row / kRowBlock] == 0) return;
  const int64_t count = existing(args.row_count, args.rows);
  if (row >= (count + kRowBlock - 1) / kRowBlock * kRowBlock) return;
  if (row >= count || (args.target != nullptr && args.target[row] == kIgnoredRow))
    return clear_row(args, row);
  const Row r(args, weight, row, row_factor(args, row));
  std::visit([&](const auto& of_epilogue) { make(r, of_epilogue); }, args.of_epilogue);
}

}  // namespace

void launch_logits(const LogitsArgs& args, const Queue& queue) {
  fused::checked_raster(args, plan_logits(args, 132, /*any_fewer=*/false).tiling, "sm90");
  queue.call([args](cudaStream_t) {
    std::vector<float> weight;
    for (int64_t j = 0; j < args.columns; ++j) {
      for (int64_t k = 0; k < args.depth; ++k) {
        weight.push_back(operand(args.weight, args.dtype, j * args.weight_stride + k) *
                         column_factor(args, j));
      }
    }
    for (int64_t row = 0; row < args.rows; ++row) make_row(args, weight, row);
  });
}

}  // namespace logitless::cuda::sm90
