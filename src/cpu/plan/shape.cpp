#include "cpu/plan/shape.h"

#include <algorithm>

namespace logitless::cpu {
namespace {

// 448 = 14 * 32: no register tile of AVX-512 is left part empty, whichever side the block is on. A block's
// panels (448 x D) stay near the second level cache; rows of more units get half the block, which is no
// slower and leaves more of a small budget for exps.
constexpr int64_t kVocabBlock = 448;
constexpr int64_t kWideUnits = 1280;
constexpr int64_t kPanelColumns = 32;  // of the widest register tile; the block is a multiple for all
constexpr int64_t kTokenUnits = 256;   // K of one partial sum of d_classifier
constexpr int64_t kMaxRange = 1024;

// Rows a multiple of 1 KiB apart would share few sets of the first level cache.
int64_t avoid_aliasing(int64_t words) {
  return words % 256 == 0 ? words + 16 : words;
}

}  // namespace

Shape make_shape(const Problem& p, const Kernels& k) {
  Shape s;
  const int64_t block = ceil_div(p.hidden, k.pair) > kWideUnits ? kVocabBlock / 2 : kVocabBlock;
  s.vocab_block = std::min(block, round_up(std::max<int64_t>(p.vocab, 1), kPanelColumns));
  s.blocks = ceil_div(p.vocab, s.vocab_block);
  s.token_block = kTokenUnits * k.pair;
  s.hidden_units = ceil_div(p.hidden, k.pair);
  s.hidden_stride = avoid_aliasing(round_up(s.hidden_units, 16));
  s.hidden_padded = round_up(p.hidden, k.nr);
  s.gradient_stride = avoid_aliasing(s.hidden_padded);
  s.ranges = ceil_div(s.hidden_padded, kMaxRange);
  s.range = round_up(ceil_div(s.hidden_padded, s.ranges), k.nr);
  s.ranges = ceil_div(s.hidden_padded, s.range);
  return s;
}

}  // namespace logitless::cpu
