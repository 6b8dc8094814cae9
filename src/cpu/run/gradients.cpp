#include <algorithm>
#include <cstring>

#include "cpu/run/runner.h"

namespace logitless::cpu {
namespace {

// Columns of a gradient done together: their panels, 256 units deep, stay in the second level cache while all
// strips pass by.
constexpr int64_t kPartColumns = 256;

// Where the sum of d_classifier over chunks is kept, of row j of a block; null when one chunk is all.
float* running_row(const Runner& run, int64_t block, int64_t j, int64_t column) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  if (p.dtype.d_classifier == DType::kF32) {
    return reinterpret_cast<float*>(run.d_classifier_row(block * s.vocab_block + j, column));
  }
  if (run.arena.d_classifier.empty()) return nullptr;
  const int64_t slot = run.schedule.sweeps_vocabulary ? block % run.schedule.backward_window : block;
  return run.arena.d_classifier.data() + (slot * s.vocab_block + j) * s.hidden_padded + column;
}

// d_classifier[block, range] += dz[:, block]^T hidden[:, range], over the chunk's tokens.
void add_range(const Runner& run, const Chunk& chunk, WorkerArena& w, int64_t block, int64_t range,
               bool dz_is_packed) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  const int64_t vocab = s.block_columns(p.vocab, block);
  const int64_t column = range * s.range;
  const int64_t padded = std::min(s.range, s.hidden_padded - column);
  const int64_t columns = std::min(padded, p.hidden - column);
  float* sums = w.d_classifier.data();
  const bool add_to_running = !chunk.is_first || p.accumulate.d_classifier;
  if (add_to_running) {
    for (int64_t j = 0; j < vocab; ++j) {
      std::copy_n(running_row(run, block, j, column), columns, sums + j * padded);
      std::fill_n(sums + j * padded + columns, padded - columns, 0.0f);
    }
  }
  const auto* dz = run.block_gradients(block);
  const int64_t dz_row_bytes = s.vocab_block * element_bytes(k);
  for (int64_t token = 0; token < chunk.count; token += s.token_block) {
    const int64_t tokens = std::min(s.token_block, chunk.count - token);
    const int64_t units = ceil_div(tokens, k.pair);
    const std::byte* dz_rows = dz + token * dz_row_bytes;
    GemmStrip g;
    if (k.pair == 1) {
      g.a = reinterpret_cast<const uint32_t*>(dz_rows);
    } else {
      if (!dz_is_packed) {
        k.pack_interleaved({dz_rows, element_dtype(k), s.vocab_block}, tokens, s.vocab_block, units, 1,
                           s.vocab_block, w.dz_pairs.data());
      }
      g.a = w.dz_pairs.data();
    }
    const uint32_t* a = g.a;
    g.a_stride = s.vocab_block;
    g.k = units;
    const uint32_t* panels =
        run.arena.hidden_panels.data() + token / k.pair * s.hidden_padded + column * units;
    g.b_panel_stride = units * k.nr;
    g.c_stride = padded;
    g.add = token > 0 || add_to_running;
    for (int64_t part = 0; part < padded; part += kPartColumns) {
      g.b = panels + part * units;
      g.panels = std::min(kPartColumns, padded - part) / k.nr;
      for (int64_t j = 0; j < vocab; j += k.mr) {
        g.a = a + j;
        g.c = sums + j * padded + part;
        g.rows = static_cast<int>(std::min<int64_t>(k.mr, vocab - j));
        k.gemm_columns(g);
      }
    }
  }
  for (int64_t j = 0; j < vocab; ++j) {
    const float* from = sums + j * padded;
    if (!chunk.is_last || p.dtype.d_classifier == DType::kF32) {
      std::copy_n(from, columns, running_row(run, block, j, column));
    } else {
      k.store_row(from, columns, 1, false, p.dtype.d_classifier,
                  run.d_classifier_row(block * s.vocab_block + j, column));
    }
  }
}

}  // namespace

void add_d_classifier(const Runner& run, const Chunk& chunk, WorkerArena& w, int64_t block,
                      const Range& ranges) {
  const bool one_token_block = chunk.count <= run.shape.token_block;
  for (int64_t range = ranges.start; range < ranges.end; ++range) {
    add_range(run, chunk, w, block, range, one_token_block && range > ranges.start);
  }
}

// d_hidden[rows, :] += dz[rows, blocks] classifier[blocks, :], one partial sum for every block.
void add_d_hidden(const Runner& run, const Range& blocks, const Range& rows) {
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  const int64_t units = s.vocab_block / k.pair;
  GemmStrip g;
  g.a_stride = units;
  g.k = units;
  g.b_panel_stride = units * k.nr;
  g.c_stride = s.gradient_stride;
  for (int64_t block = blocks.start; block < blocks.end; ++block) {
    g.add = block > 0;
    const auto* dz = reinterpret_cast<const uint32_t*>(run.block_gradients(block));
    for (int64_t part = 0; part < s.hidden_padded; part += kPartColumns) {
      g.b = run.block_panels(block) + part * units;
      g.panels = std::min(kPartColumns, s.hidden_padded - part) / k.nr;
      for (int64_t i = rows.start; i < rows.end; i += k.mr) {
        g.a = dz + i * units;
        g.rows = static_cast<int>(std::min<int64_t>(k.mr, rows.end - i));
        g.c = run.arena.d_hidden.data() + i * s.gradient_stride + part;
        k.gemm_rows(g);
      }
    }
  }
}

void store_d_hidden(const Runner& run, const Chunk& chunk, const Range& rows) {
  const Problem& p = run.problem;
  for (int64_t row = rows.start; row < rows.end; ++row) {
    const int64_t to = run.arena.rows[static_cast<size_t>(chunk.first + row)];
    run.kernels.store_row(run.arena.d_hidden.data() + row * run.shape.gradient_stride, p.hidden, 1,
                          p.accumulate.d_hidden, p.dtype.d_hidden, run.d_hidden_row(to));
  }
}

void store_d_bias(const Runner& run) {
  const Problem& p = run.problem;
  const auto factor = static_cast<float>(p.scale != 0 ? p.bias_scale / p.scale : p.bias_scale);
  run.kernels.store_row(run.arena.d_bias.data(), p.vocab, factor, p.accumulate.d_bias, p.dtype.d_bias,
                        run.buffers.d_bias);
}

void zero_d_hidden(const Runner& run, bool ignored_only) {
  const Problem& p = run.problem;
  if (p.accumulate.d_hidden) return;
  const auto bytes = static_cast<size_t>(p.hidden) * size_of(p.dtype.d_hidden);
  int64_t next = 0;
  for (int64_t row = 0; row < p.tokens; ++row) {
    const bool valid = next < run.row_count && run.arena.rows[static_cast<size_t>(next)] == row;
    if (valid) ++next;
    if (valid && ignored_only) continue;
    std::memset(run.d_hidden_row(row), 0, bytes);
  }
}

void zero_d_classifier(const Runner& run) {
  const Problem& p = run.problem;
  if (p.accumulate.d_classifier) return;
  const auto bytes = static_cast<size_t>(p.hidden) * size_of(p.dtype.d_classifier);
  for (int64_t row = 0; row < p.vocab; ++row) std::memset(run.d_classifier_row(row), 0, bytes);
}

}  // namespace logitless::cpu
