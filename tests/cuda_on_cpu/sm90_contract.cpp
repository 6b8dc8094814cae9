// What engines/logits.h promises of the Hopper engine, one row at a time in plain C++: so that plans, row
// kernels and gradients are tested with what it stores and how. Its own kernels need a Hopper GPU.
#include <algorithm>
#include <vector>

#include "core/thinning.h"
#include "cuda/anchor.h"
#include "cuda/engines/portable/row_kernels.cuh"
#include "cuda/engines/sm90/config.h"
#include "cuda/engines/sm90/sm90_launch.h"
#include "cuda/exp2.cuh"
#include "cuda/softcap.h"

namespace headroom::cuda::sm90 {
namespace {

using portable::Parts;

// A thread of a kernel has every fourth pair of columns of a tile: it is what draws, and what has a maximum.
constexpr int kShares = 4;
constexpr int kShareColumns = kTileColumns / kShares;

int64_t column_of_share(int share, int i) {
  return 2 * share + 8 * (i / 2) + i % 2;
}

float operand(const void* data, DType dtype, int64_t index) {
  return dtype == DType::kBF16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index])
                               : __half2float(static_cast<const __half*>(data)[index]);
}

void store(const LogitsArgs& args, int64_t row, int64_t column, float value) {
  const int64_t at = row * args.out_stride + column;
  if (args.dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(args.out)[at] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(args.out)[at] = __float2half_rn(value);
  }
}

float exp_of(float z, const SplitAnchor& anchor) {
  return exp2_approx(std::fma(z - anchor.far, kLog2E, anchor.shift));
}

struct Row {
  const LogitsArgs& args;
  int64_t row;
  int32_t target;
  float inverse_temperature;
  std::vector<float> z;  // of the window

  Row(const LogitsArgs& given, int64_t number)
      : args(given),
        row(number),
        target(given.target == nullptr ? -1 : given.target[number]),
        inverse_temperature(portable::inverse_temperature_of(given, number)),
        z(static_cast<size_t>(given.columns)) {
    std::vector<float> hidden(static_cast<size_t>(args.depth));
    for (int64_t k = 0; k < args.depth; ++k) {
      hidden[static_cast<size_t>(k)] = operand(args.hidden, args.dtype, row * args.hidden_stride + k);
    }
    for (int64_t j = 0; j < args.columns; ++j) {
      float dot = 0;
      for (int64_t k = 0; k < args.depth; ++k) {
        dot += hidden[static_cast<size_t>(k)] *
               operand(args.classifier, args.dtype, j * args.classifier_stride + k);
      }
      z[static_cast<size_t>(j)] = portable::transformed(args, dot, j, inverse_temperature);
      if (j == target - args.column_offset && args.target_logit != nullptr) {
        args.target_logit[row] = z[static_cast<size_t>(j)];
      }
    }
  }

  float at(int64_t column) const {
    return column < args.columns ? z[static_cast<size_t>(column)] : -INFINITY;
  }

  // The slot of the tile at a column of the window.
  int64_t slot(int64_t column) const {
    return args.batch_invariant ? (args.column_offset + column) / kTileColumns : 0;
  }
  int64_t place(int64_t column) const { return slot(column) * args.stats.stride + row; }
};

template <class Body>
void for_tiles(const LogitsArgs& args, Body body) {
  for (int64_t first = 0; first < args.columns; first += kTileColumns) {
    body(first, std::min<int64_t>(args.columns, first + kTileColumns));
  }
}

void join_maximum(const Row& r, int64_t first, int64_t end) {
  const StatSlots& slots = r.args.stats;
  if (slots.max == nullptr) return;
  const int64_t place = r.place(first);
  for (int64_t j = first; j < end; ++j) {
    const auto column = static_cast<int32_t>(r.args.column_offset + j);
    const int32_t known =
        slots.argmax != nullptr && slots.argmax[place] >= 0 ? slots.argmax[place] : INT32_MAX;
    if (!is_better(r.at(j), column, slots.max[place], known)) continue;
    slots.max[place] = r.at(j);
    if (slots.argmax != nullptr) slots.argmax[place] = column;
  }
}

void add_parts(const StatSlots& slots, int64_t place, const Parts& parts) {
#define HEADROOM_ADD(name, part, ...) \
  if (slots.part != nullptr) slots.part[place] += static_cast<float>(parts.part);
  HEADROOM_OPTIONAL_SUMS(HEADROOM_ADD)
#undef HEADROOM_ADD
}

void make_stats(const Row& r) {
  const StatSlots& slots = r.args.stats;
  for_tiles(r.args, [&](int64_t first, int64_t end) {
    RowStats<double> mine;
    mine.max = -INFINITY;
    int32_t at = INT32_MAX;
    float largest = -INFINITY;
    for (int64_t j = first; j < end; ++j) {
      if (is_better(r.at(j), static_cast<int32_t>(j), largest, at))
        largest = r.at(j), at = static_cast<int32_t>(j);
    }
    Parts parts;
    double sum = 0;
    for (int64_t j = first; j < end; ++j) {
      const float e = r.at(j) == -INFINITY ? 0.0f : std::exp(r.at(j) - largest);
      sum += e;
      parts.add(r.args, j, r.at(j), largest, e);
    }
    mine.max = largest;
    mine.sum_exp = sum;
#define HEADROOM_SUM(name, part, kind, ...) \
  mine.name = sum_of_part<double>(SumKind::kind, parts.part, largest, sum);
    HEADROOM_OPTIONAL_SUMS(HEADROOM_SUM)
#undef HEADROOM_SUM
    mine.argmax = r.args.column_offset + at;
    const int64_t place = r.place(first);
    const RowStats<double> all = merge(stats_of_slot(slots, r.slot(first), r.row), mine);
    slots.max[place] = static_cast<float>(all.max);
    slots.sum[place] = static_cast<float>(all.sum_exp);
#define HEADROOM_STORE(name, part, kind, ...) \
  if (slots.part != nullptr)                  \
    slots.part[place] = static_cast<float>(part_of_sum(SumKind::kind, all.name, all.max, all.sum_exp));
    HEADROOM_OPTIONAL_SUMS(HEADROOM_STORE)
#undef HEADROOM_STORE
    if (slots.argmax != nullptr) slots.argmax[place] = static_cast<int32_t>(all.argmax);
  });
}

void make_exps(const Row& r) {
  const LogitsArgs& args = r.args;
  const SplitAnchor anchor = split_anchor(args.anchor[r.row]);
  const float inverse_cap = inverse_softcap(args.softcap * r.inverse_temperature);
  for_tiles(args, [&](int64_t first, int64_t end) {
    join_maximum(r, first, end);
    float sum = 0;
    Parts parts;
    for (int64_t j = first; j < end; ++j) {
      const float e = exp_of(r.at(j), anchor);
      sum += e;
      parts.add(args, j, r.at(j), effective_anchor(anchor), e);
      if (j >= args.out_columns) continue;
      const float slope = args.softcap == 0 ? 1.0f : softcap_slope(r.at(j), inverse_cap);
      store(args, r.row, j, std::ldexp(e * slope, kKeptExponent));
    }
    args.stats.sum[r.place(first)] += sum;
    add_parts(args.stats, r.place(first), parts);
  });
}

void make_gradient(const Row& r) {
  const LogitsArgs& args = r.args;
  const auto value = [&](const float* of_rows) { return of_rows != nullptr ? of_rows[r.row] : 0.0f; };
  const RowCoefficients<float> k = {value(args.a), value(args.b), value(args.c), value(args.g)};
  const float factor = args.out_scale != nullptr ? *args.out_scale : 1.0f;
  for (int64_t j = 0; j < args.columns; ++j) {
    const float weight = args.class_weight != nullptr ? args.class_weight[j] : 1.0f;
    const float v = dz_element(k, (r.at(j) - args.lse[r.row]) - value(args.lse_low), weight,
                               j == r.target - args.column_offset);
    store(args, r.row, j, v * portable::slope(args, r.at(j), r.inverse_temperature) * factor);
  }
}

// The draw of one share of a tile; returns the expected number of kept elements, times threshold.
float draw(const Row& r, int64_t first, int share, const SplitAnchor& anchor, int64_t index) {
  const Draws& draws = r.args.draws;
  const float threshold = draws.threshold[r.row], certain = draws.certain_share * threshold;
  const auto first_column = static_cast<int32_t>(r.args.column_offset + first);
  const uint32_t stream =
      kFirstDrawStream + draws.first_stream + static_cast<uint32_t>(first_column + 2 * share);
  float running =
      threshold * (1 - draw_uniform(draw_bits(*draws.seed, static_cast<uint32_t>(index), stream)));
  float expected = 0;
  for (int i = 0; i < kShareColumns; ++i) {
    const int64_t j = first + column_of_share(share, i);
    const float q = exp_of(r.at(j), anchor);
    const bool large = q >= certain;
    expected += large ? threshold : q;
    if (!large) running += q;
    const bool passed = running >= threshold;
    if (passed) running -= threshold;
    const auto column = static_cast<int32_t>(r.args.column_offset + j);
    if (!(large || passed) || !(threshold < INFINITY) || draws.role[column] >= 0) continue;
    const int32_t at = draws.count[index]++;
    if (at < draws.capacity - 1) draws.elements[index * draws.capacity + at] = {2 * column + large, r.at(j)};
  }
  return expected;
}

void make_thin(const Row& r) {
  const LogitsArgs& args = r.args;
  const int64_t index = args.draws.row != nullptr ? args.draws.row[r.row] : r.row;
  const float low = args.draws.guess_low != nullptr ? args.draws.guess_low[index] : 0.0f;
  const SplitAnchor anchor = split_anchor(args.anchor[r.row], low);
  for_tiles(args, [&](int64_t first, int64_t end) {
    join_maximum(r, first, end);
    float sum = 0, expected = 0;
    Parts parts;
    for (int64_t j = first; j < end; ++j) {
      const float q = exp_of(r.at(j), anchor);
      sum += q;
      parts.add(args, j, r.at(j), effective_anchor(anchor), q);
    }
    for (int share = 0; share < kShares; ++share) expected += draw(r, first, share, anchor, index);
    if (args.stats.sum == nullptr) return;
    args.stats.sum[r.place(first)] += sum;
    args.stats.expected[r.place(first)] += expected;
    add_parts(args.stats, r.place(first), parts);
  });
}

void make_top(const Row& r) {
  const TopLogits& top = r.args.top;
  if (top.group_max != nullptr) {
    for_tiles(r.args, [&](int64_t first, int64_t) {
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
  for (int64_t j = 0; j < r.args.columns; ++j) {
    if (r.at(j) < top.threshold[r.row]) continue;
    const int32_t at = top.count[r.row]++;
    const auto column = static_cast<int32_t>(r.args.column_offset + j);
    if (at < top.capacity) top.listed[r.row * top.capacity + at] = {r.at(j), column};
  }
  make_stats(r);
}

void clear_row(const LogitsArgs& args, int64_t row) {
  for (int64_t j = 0; j < args.out_columns; ++j) store(args, row, j, 0);
}

void make_row(const LogitsArgs& args, int64_t row) {
  if (args.row_block_active != nullptr && args.row_block_active[row / kRowBlock] == 0) return;
  const int64_t count = existing(args.row_count, args.rows);
  if (row >= (count + kRowBlock - 1) / kRowBlock * kRowBlock) return;
  if (row >= count || (args.target != nullptr && args.target[row] == kIgnoredRow))
    return clear_row(args, row);
  const Row r(args, row);
  switch (args.epilogue) {
    case Epilogue::kStats:
      return make_stats(r);
    case Epilogue::kExps:
      return make_exps(r);
    case Epilogue::kGradient:
      return make_gradient(r);
    case Epilogue::kThin:
      return make_thin(r);
    case Epilogue::kTop:
      return make_top(r);
  }
}

}  // namespace

void launch_logits(const LogitsArgs& args, const Queue& queue, After /*after*/) {
  queue.call([args](cudaStream_t) {
    for (int64_t row = 0; row < args.rows; ++row) make_row(args, row);
  });
}

}  // namespace headroom::cuda::sm90
