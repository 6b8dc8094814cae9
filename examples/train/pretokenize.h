#pragma once

// Cuts text into words, the pieces that byte-pair merges never cross. In the syntax of regular expressions,
// over code points (see kPattern): an optional space and letters, an optional space and up to three digits,
// an optional space and other signs, or white space, whose last space is left to the word that follows.

#include <cstddef>
#include <string_view>

namespace logitless::train {

// No word has more code points than this (white space or a run of signs can go on for kilobytes).
constexpr size_t kLongestWord = 64;

// The same rule for tools that read the saved vocabulary. All beyond ASCII counts as a letter.
constexpr const char* kPattern =
    " ?[A-Za-z_\\x{80}-\\x{10FFFF}]{1,64}| ?[0-9]{1,3}| ?[^ \\t-\\rA-Za-z_0-9\\x{80}-\\x{10FFFF}]{1,64}"
    "|[ \\t-\\r]{1,64}(?= [^ \\t-\\r])|[ \\t-\\r]{1,64}";

// Bytes of the first word of `text`, at least 1. `text` must not be empty.
size_t first_word(std::string_view text);

template <typename Visit>
void for_each_word(std::string_view text, Visit&& visit) {
  while (!text.empty()) {
    const size_t size = first_word(text);
    visit(text.substr(0, size));
    text.remove_prefix(size);
  }
}

}  // namespace logitless::train
