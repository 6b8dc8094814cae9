// Text: words, byte pairs, vocabulary, corpus and batches.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/batches.h"
#include "train/byte_pairs.h"
#include "train/corpus.h"
#include "train/pretokenize.h"
#include "train/random.h"
#include "train/vocabulary.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for_each_word(text, [&](std::string_view word) { words.emplace_back(word); });
  return words;
}

TEST(TrainWords, FollowThePattern) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(words_of("def f(x1):\n    return x"),
            (Words{"def", " f", "(", "x", "1", "):", "\n   ", " return", " x"}));
  EXPECT_EQ(words_of("12345 67"), (Words{"123", "45", " 67"}));
  EXPECT_EQ(words_of("a  b \n c  "), (Words{"a", " ", " b", " \n", " c", "  "}));
  EXPECT_EQ(words_of("na\xC3\xAFve _x"), (Words{"na\xC3\xAFve", " _x"}));
  EXPECT_EQ(words_of(" "), (Words{" "}));
  EXPECT_EQ(words_of("\n\nx"), (Words{"\n\n", "x"}));
  EXPECT_TRUE(words_of("").empty());
}

TEST(TrainWords, HaveBoundedLengthAndKeepEveryByte) {
  Random random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::string text;
    const int64_t runs = random.below(12);
    for (int64_t r = 0; r < runs; ++r) {
      const char byte = static_cast<char>(random.below(4) == 0 ? ' ' : random.below(256));
      text.append(static_cast<size_t>(random.below(200)), byte);
    }
    std::string joined;
    for (const std::string& word : words_of(text)) {
      EXPECT_LE(word.size(), 1 + 4 * kLongestWord);
      EXPECT_FALSE(word.empty());
      joined += word;
    }
    EXPECT_EQ(joined, text);
  }
}

// Byte pairs by the definition: count all pairs, join the most frequent, start again.
std::vector<std::pair<int32_t, int32_t>> slow_merges(const std::vector<CountedWord>& words, int64_t most) {
  std::vector<std::vector<int32_t>> tokens;
  for (const CountedWord& word : words) {
    auto& sequence = tokens.emplace_back();
    for (const char byte : word.text) sequence.push_back(static_cast<unsigned char>(byte));
  }
  std::vector<std::pair<int32_t, int32_t>> merges;
  for (int32_t merged = 257; static_cast<int64_t>(merges.size()) < most; ++merged) {
    std::map<std::pair<int32_t, int32_t>, int64_t> counts;
    for (size_t w = 0; w < words.size(); ++w) {
      for (size_t i = 0; i + 1 < tokens[w].size(); ++i)
        counts[{tokens[w][i], tokens[w][i + 1]}] += words[w].count;
    }
    std::pair<int32_t, int32_t> best;
    int64_t best_count = 1;
    for (const auto& [pair, count] : counts) {
      if (count > best_count) {
        best = pair;
        best_count = count;
      }
    }
    if (best_count < 2) break;
    merges.push_back(best);
    for (auto& sequence : tokens) {
      std::vector<int32_t> joined;
      for (size_t i = 0; i < sequence.size(); ++i) {
        const bool here =
            i + 1 < sequence.size() && sequence[i] == best.first && sequence[i + 1] == best.second;
        joined.push_back(here ? merged : sequence[i]);
        i += here ? 1 : 0;
      }
      sequence = joined;
    }
  }
  return merges;
}

// What a tokenizer makes of a word: the earliest merge first, its left-most place first.
std::vector<int32_t> encode(const std::string& word, const std::vector<std::pair<int32_t, int32_t>>& merges) {
  std::vector<int32_t> tokens;
  for (const char byte : word) tokens.push_back(static_cast<unsigned char>(byte));
  for (size_t m = 0; m < merges.size(); ++m) {
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      if (tokens[i] != merges[m].first || tokens[i + 1] != merges[m].second) continue;
      tokens[i] = Vocabulary::kFirstMerged + static_cast<int32_t>(m);
      tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
  }
  return tokens;
}

std::string decode(const Vocabulary& vocabulary, std::span<const int32_t> tokens) {
  std::string text;
  for (const int32_t token : tokens) text += vocabulary.bytes_of(token);
  return text;
}

TEST(TrainBytePairs, EqualTheDefinition) {
  Random random(2);
  for (int trial = 0; trial < 60; ++trial) {
    std::vector<std::string> texts;
    std::vector<CountedWord> words;
    const int64_t count = 1 + random.below(30);
    for (int64_t w = 0; w < count; ++w) {
      std::string text;
      const int64_t length = 1 + random.below(12);
      // Two letters only, so that runs such as "aaaa" are common.
      for (int64_t i = 0; i < length; ++i) text += random.below(3) == 0 ? 'b' : 'a';
      texts.push_back(text);
    }
    for (const std::string& text : texts) words.push_back({text, random.below(5)});
    const BytePairs fast = learn_byte_pairs(words, 257, 40, [](int64_t) {});
    EXPECT_EQ(fast.merges, slow_merges(words, 40)) << "trial " << trial;
    // The words come out as an encoder with these merges splits them.
    const Vocabulary vocabulary(fast.merges);
    for (size_t w = 0; w < words.size(); ++w) {
      const std::span<const int32_t> tokens = fast.tokens_of(w);
      EXPECT_EQ(std::vector<int32_t>(tokens.begin(), tokens.end()), encode(texts[w], fast.merges));
      EXPECT_EQ(decode(vocabulary, tokens), texts[w]);
    }
  }
}

Corpus corpus_of(const std::string& train, const std::string& validation) {
  Corpus corpus;
  corpus.documents.push_back({"train", train, false});
  corpus.documents.push_back({"validation", validation, true});
  return corpus;
}

TEST(TrainVocabulary, EncodesBothPartsAndLearnsFromOne) {
  std::string train;
  for (int k = 0; k < 50; ++k) train += "the cat sat on the mat\n";
  const std::string validation = "zebra zebra zebra the cat\xFF\n";
  const TokenizedCorpus corpus = tokenize(corpus_of(train, validation), 300, [](int64_t) {});
  const Vocabulary& vocabulary = corpus.vocabulary;
  EXPECT_EQ(decode(vocabulary, corpus.train), train);
  EXPECT_EQ(decode(vocabulary, corpus.validation), validation);
  EXPECT_EQ(corpus.train.back(), Vocabulary::kEndOfText);
  for (int32_t token = 0; token < static_cast<int32_t>(vocabulary.size()); ++token) {
    EXPECT_EQ(vocabulary.bytes_of(token).find("ze"), std::string::npos) << "learned from validation text";
  }
  EXPECT_LT(vocabulary.size(), 300) << "there is nothing more to join";
}

TEST(TrainVocabulary, SavesEveryTokenOnce) {
  const TokenizedCorpus corpus =
      tokenize(corpus_of("aaaa abab\t\"\\\" abab \xC3\xA9 \xC3\xA9 aaaa", ""), 270, [](int64_t) {});
  const nlohmann::json saved = nlohmann::json::parse(corpus.vocabulary.to_json());
  const nlohmann::json& vocab = saved.at("model").at("vocab");
  EXPECT_EQ(static_cast<int64_t>(vocab.size()), corpus.vocabulary.size());
  EXPECT_EQ(vocab.at("<|endoftext|>"), Vocabulary::kEndOfText);
  EXPECT_EQ(vocab.at("a"), 'a');
  EXPECT_EQ(vocab.at("\xC4\xA0"), ' ');  // GPT-2's letter for a space, U+0120
  for (const auto& merge : saved.at("model").at("merges")) {
    const std::string joined = merge.at(0).get<std::string>() + merge.at(1).get<std::string>();
    EXPECT_TRUE(vocab.contains(joined)) << joined;
  }
}

class TrainCorpus : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("logitless-corpus-" + std::to_string(::getpid()));
    fs::create_directories(folder_ / "inner" / ".hidden");
  }
  void TearDown() override { fs::remove_all(folder_); }
  void write(const fs::path& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  Corpus read(int64_t max_bytes = 1 << 20) const {
    CorpusOptions options;
    options.paths = {folder_};
    options.max_bytes = max_bytes;
    return read_corpus(options);
  }
  fs::path folder_;
};

TEST_F(TrainCorpus, SplitsManyFilesByFile) {
  for (int k = 0; k < 100; ++k) write(fs::path("f").concat(std::to_string(k)), std::string(1000, 'a'));
  write("binary", std::string("a\0b", 3));
  write("empty", "");
  write(fs::path("inner") / ".hidden" / "secret", "not read");
  const Corpus corpus = read();
  EXPECT_EQ(corpus.documents.size(), 100U);
  EXPECT_EQ(corpus.skipped_files, 2);
  EXPECT_EQ(corpus.bytes, 100000);
  EXPECT_EQ(corpus.validation_bytes, 5000);
  EXPECT_EQ(read(50500).bytes, 50500);
}

TEST_F(TrainCorpus, CutsFewFilesInside) {
  write("only", std::string(950, 'a') + std::string(50, 'b'));
  const Corpus corpus = read();
  ASSERT_EQ(corpus.documents.size(), 2U);
  EXPECT_EQ(corpus.documents[0].text, std::string(950, 'a'));
  EXPECT_EQ(corpus.documents[1].text, std::string(50, 'b'));
  EXPECT_TRUE(corpus.documents[1].validation);
}

TEST_F(TrainCorpus, SaysWhatIsWrong) {
  EXPECT_THROW(read(), std::runtime_error);  // nothing to read
  CorpusOptions options;
  options.paths = {folder_ / "missing"};
  EXPECT_THROW(read_corpus(options), std::runtime_error);
}

TEST(TrainBatches, TargetsFollowTheTokens) {
  std::vector<int32_t> text(1000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i);
  RandomBatches batches(text, {4, 10}, 1);
  for (int k = 0; k < 100; ++k) {
    const Batch batch = batches.next();
    ASSERT_EQ(batch.tokens.size(), 40U);
    for (size_t i = 0; i < batch.tokens.size(); ++i) EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
  }
  const std::vector<Batch> even = even_batches(text, {4, 10}, 3);
  ASSERT_EQ(even.size(), 3U);
  EXPECT_EQ(even.front().tokens.front(), 0);
  EXPECT_EQ(even.back().targets.back(), 999);
  EXPECT_EQ(even_batches(text, {4, 100}, 9).size(), 2U);  // as many as fit
  EXPECT_THROW(RandomBatches(std::span(text).first(10), {4, 10}, 1), std::runtime_error);
}

}  // namespace
}  // namespace logitless::train
