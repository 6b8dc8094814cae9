#include "train/byte_pairs.h"

#include <algorithm>
#include <queue>
#include <unordered_map>

namespace logitless::train {
namespace {

uint64_t key_of(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

struct HashKey {
  size_t operator()(uint64_t key) const { return (key ^ (key >> 29)) * 0x9E3779B97F4A7C15ULL; }
};

// A pair's count grows only while the merge that makes its newer token is under way; from then on it falls.
// So a pair below this count will never be joined and is dropped.
constexpr int64_t kLeastCount = 2;

struct Pair {
  int64_t count = 0;
  std::vector<uint32_t> words;  // words that hold the pair, or held it; may name a word twice
};

struct Candidate {
  int64_t count;  // may be out of date: too high, never too low
  uint64_t key;
  // For a heap: less is worse.
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : key > other.key;
  }
};

class Learner {
 public:
  Learner(std::span<const CountedWord> words, BytePairs& result) : words_(words), result_(result) {
    for (size_t w = 0; w < words.size(); ++w) {
      result_.starts.push_back(result_.symbols.size());
      result_.lengths.push_back(static_cast<uint32_t>(words[w].text.size()));
      for (char byte : words[w].text) result_.symbols.push_back(static_cast<unsigned char>(byte));
    }
    for (size_t w = 0; w < words.size(); ++w) {
      const std::span<const int32_t> tokens = result_.tokens_of(w);
      for (size_t i = 0; i + 1 < tokens.size(); ++i) {
        Pair& pair = pairs_[key_of(tokens[i], tokens[i + 1])];
        pair.count += words[w].count;
        if (pair.words.empty() || pair.words.back() != w) pair.words.push_back(static_cast<uint32_t>(w));
      }
    }
    std::erase_if(pairs_, [](const auto& entry) { return entry.second.count < kLeastCount; });
    for (const auto& [key, pair] : pairs_) heap_.push({pair.count, key});
  }

  // Joins the most frequent pair into `merged`; false when none occurs twice.
  bool merge_best(int32_t merged) {
    while (!heap_.empty()) {
      const Candidate best = heap_.top();
      heap_.pop();
      const auto found = pairs_.find(best.key);
      if (found->second.count < kLeastCount) {
        pairs_.erase(found);
        continue;
      }
      if (found->second.count != best.count) {
        heap_.push({found->second.count, best.key});
        continue;
      }
      const Pair pair = std::move(found->second);
      pairs_.erase(found);
      join(best.key, pair, merged);
      return true;
    }
    return false;
  }

 private:
  void join(uint64_t key, const Pair& pair, int32_t merged) {
    const auto left = static_cast<int32_t>(key >> 32);
    const auto right = static_cast<int32_t>(key & 0xFFFFFFFFU);
    result_.merges.emplace_back(left, right);
    created_.clear();
    for (uint32_t word : pair.words) rewrite(word, left, right, merged);
    std::sort(created_.begin(), created_.end());
    created_.erase(std::unique(created_.begin(), created_.end()), created_.end());
    for (uint64_t made : created_) {
      const auto found = pairs_.find(made);
      if (found->second.count >= kLeastCount) {
        heap_.push({found->second.count, made});
      } else {
        pairs_.erase(found);
      }
    }
  }

  // Replaces the pair in one word. All its pairs are counted out and in again, which keeps runs such as "aaa"
  // simple; pairs without the new token are in the word's list already.
  void rewrite(uint32_t word, int32_t left, int32_t right, int32_t merged) {
    int32_t* tokens = result_.symbols.data() + result_.starts[word];
    const uint32_t length = result_.lengths[word];
    uint32_t first = 0;
    while (first + 1 < length && (tokens[first] != left || tokens[first + 1] != right)) ++first;
    if (first + 1 >= length) return;  // an earlier merge took it
    const int64_t count = words_[word].count;
    for (uint32_t i = 0; i + 1 < length; ++i) count_known(tokens[i], tokens[i + 1], -count);
    uint32_t kept = first;
    for (uint32_t i = first; i < length; ++kept) {
      const bool here = i + 1 < length && tokens[i] == left && tokens[i + 1] == right;
      tokens[kept] = here ? merged : tokens[i];
      i += here ? 2 : 1;
    }
    result_.lengths[word] = kept;
    for (uint32_t i = 0; i + 1 < kept; ++i) {
      if (tokens[i] != merged && tokens[i + 1] != merged) {
        count_known(tokens[i], tokens[i + 1], count);
        continue;
      }
      const uint64_t made = key_of(tokens[i], tokens[i + 1]);
      Pair& pair = pairs_[made];
      pair.count += count;
      if (pair.words.empty() || pair.words.back() != word) pair.words.push_back(word);
      created_.push_back(made);
    }
  }

  // Pairs that were dropped stay dropped.
  void count_known(int32_t left, int32_t right, int64_t count) {
    const auto found = pairs_.find(key_of(left, right));
    if (found != pairs_.end()) found->second.count += count;
  }

  std::span<const CountedWord> words_;
  BytePairs& result_;
  std::unordered_map<uint64_t, Pair, HashKey> pairs_;
  std::priority_queue<Candidate> heap_;
  std::vector<uint64_t> created_;
};

}  // namespace

BytePairs learn_byte_pairs(std::span<const CountedWord> words, int32_t first_merged, int64_t max_merges,
                           const std::function<void(int64_t)>& progress) {
  BytePairs result;
  Learner learner(words, result);
  for (int64_t k = 0; k < max_merges; ++k) {
    if (!learner.merge_best(first_merged + static_cast<int32_t>(k))) break;
    progress(k + 1);
  }
  return result;
}

}  // namespace logitless::train
