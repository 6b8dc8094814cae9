#pragma once

// Byte-pair encoding over words with counts: repeatedly joins the most frequent pair of neighbouring tokens.

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace logitless::train {

struct CountedWord {
  std::string_view text;
  int64_t count;  // 0: takes part only to be encoded
};

struct BytePairs {
  // Merge k joins two tokens into token first_merged + k. Tokens below 256 are the bytes.
  std::vector<std::pair<int32_t, int32_t>> merges;
  // The tokens of word w are symbols[starts[w] .. starts[w] + lengths[w]).
  std::vector<int32_t> symbols;
  std::vector<size_t> starts;
  std::vector<uint32_t> lengths;

  std::span<const int32_t> tokens_of(size_t word) const {
    return std::span(symbols).subspan(starts[word], lengths[word]);
  }
};

// Learns up to `max_merges` merges; fewer when no pair is left that occurs twice. Ties go to the pair with
// the smaller tokens, so the result depends on the words and counts alone. `progress` is told the merges so
// far.
BytePairs learn_byte_pairs(std::span<const CountedWord> words, int32_t first_merged, int64_t max_merges,
                           const std::function<void(int64_t)>& progress);

}  // namespace logitless::train
