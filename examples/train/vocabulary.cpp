#include "train/vocabulary.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <unordered_map>

#include "train/byte_pairs.h"
#include "train/pretokenize.h"

namespace logitless::train {
namespace {

// The byte-level alphabet of GPT-2's tokenizer, in UTF-8: printable bytes of Latin-1 stand for themselves,
// the others for code points from 256 on.
std::vector<std::string> byte_level_alphabet() {
  std::vector<std::string> alphabet;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    const int code_point = printable ? byte : next++;
    if (code_point < 0x80) {
      alphabet.emplace_back(1, static_cast<char>(code_point));
    } else {
      alphabet.push_back(
          {static_cast<char>(0xC0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 0x3F))});
    }
  }
  return alphabet;
}

}  // namespace

Vocabulary::Vocabulary(std::vector<std::pair<int32_t, int32_t>> merges) : merges_(std::move(merges)) {
  for (int byte = 0; byte < 256; ++byte) bytes_.emplace_back(1, static_cast<char>(byte));
  bytes_.emplace_back();
  for (const auto& [left, right] : merges_) {
    const auto token = static_cast<int32_t>(bytes_.size());
    if (left < 0 || right < 0 || left >= token || right >= token) {
      throw std::invalid_argument("merge " + std::to_string(token - kFirstMerged) +
                                  ": expected tokens below " + std::to_string(token) + ", got " +
                                  std::to_string(left) + " and " + std::to_string(right));
    }
    bytes_.push_back(bytes_of(left) + bytes_of(right));
  }
}

std::string Vocabulary::to_json() const {
  using nlohmann::ordered_json;
  const std::vector<std::string> alphabet = byte_level_alphabet();
  std::vector<std::string> names;
  ordered_json vocab = ordered_json::object();
  for (int32_t token = 0; token < static_cast<int32_t>(size()); ++token) {
    std::string name;
    for (char byte : bytes_of(token)) name += alphabet[static_cast<unsigned char>(byte)];
    if (token == kEndOfText) name = "<|endoftext|>";
    names.push_back(name);
  }
  // ordered_json looks a key up by a linear search: fill its vector, whose keys are known to differ.
  auto& entries = vocab.get_ref<ordered_json::object_t&>();
  entries.reserve(names.size());
  for (size_t token = 0; token < names.size(); ++token) {
    static_cast<std::vector<ordered_json::object_t::value_type>&>(entries).emplace_back(names[token], token);
  }
  ordered_json merges = ordered_json::array();
  for (const auto& [left, right] : merges_) {
    merges.push_back({names[static_cast<size_t>(left)], names[static_cast<size_t>(right)]});
  }
  const ordered_json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  const ordered_json split = {
      {"type", "Split"}, {"pattern", {{"Regex", kPattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  const ordered_json end_of_text = {
      {"id", kEndOfText}, {"content", "<|endoftext|>"}, {"single_word", false}, {"lstrip", false},
      {"rstrip", false},  {"normalized", false},        {"special", true}};
  ordered_json pre_tokenizers = ordered_json::array({split, byte_level});
  ordered_json document = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", ordered_json::array({end_of_text})},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", std::move(pre_tokenizers)}}},
      {"post_processor", nullptr},
      {"decoder", byte_level},
  };
  document["model"] = {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false}};
  document["model"]["vocab"] = std::move(vocab);
  document["model"]["merges"] = std::move(merges);
  return document.dump();
}

TokenizedCorpus tokenize(const Corpus& corpus, int64_t size, const std::function<void(int64_t)>& progress) {
  std::unordered_map<std::string_view, uint32_t> index;  // of a word in `words`
  std::vector<CountedWord> words;
  std::vector<std::vector<uint32_t>> documents;
  for (const Document& document : corpus.documents) {
    std::vector<uint32_t>& sequence = documents.emplace_back();
    for_each_word(document.text, [&](std::string_view text) {
      const auto [place, is_new] = index.try_emplace(text, static_cast<uint32_t>(words.size()));
      if (is_new) words.push_back({text, 0});
      if (!document.validation) ++words[place->second].count;
      sequence.push_back(place->second);
    });
  }
  BytePairs pairs =
      learn_byte_pairs(words, Vocabulary::kFirstMerged, size - Vocabulary::kFirstMerged, progress);
  TokenizedCorpus result{Vocabulary(std::move(pairs.merges)), {}, {}, static_cast<int64_t>(words.size())};
  for (size_t d = 0; d < documents.size(); ++d) {
    std::vector<int32_t>& into = corpus.documents[d].validation ? result.validation : result.train;
    for (uint32_t word : documents[d]) {
      const std::span<const int32_t> tokens = pairs.tokens_of(word);
      into.insert(into.end(), tokens.begin(), tokens.end());
    }
    into.push_back(Vocabulary::kEndOfText);
  }
  return result;
}

}  // namespace logitless::train
