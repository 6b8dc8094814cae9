#include "train/pretokenize.h"

#include <algorithm>

namespace logitless::train {
namespace {

enum class Kind { kLetter, kDigit, kSign, kSpace };

Kind kind_of(char c) {
  const auto byte = static_cast<unsigned char>(c);
  if (byte == ' ' || (byte >= '\t' && byte <= '\r')) return Kind::kSpace;
  if (byte >= '0' && byte <= '9') return Kind::kDigit;
  const unsigned char lower = byte | 0x20;
  if (byte >= 0x80 || byte == '_' || (lower >= 'a' && lower <= 'z')) return Kind::kLetter;
  return Kind::kSign;
}

bool continues_code_point(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

size_t first_space(std::string_view text) {
  size_t run = 1;
  // One more than the longest word, to see whether a longer run ends in the space of the next word.
  while (run < text.size() && run <= kLongestWord && kind_of(text[run]) == Kind::kSpace) ++run;
  const bool word_follows = run < text.size() && kind_of(text[run]) != Kind::kSpace;
  if (word_follows && text[run - 1] == ' ' && run > 1) return run - 1;
  return std::min(run, kLongestWord);
}

}  // namespace

size_t first_word(std::string_view text) {
  const size_t start = text[0] == ' ' && text.size() > 1 && kind_of(text[1]) != Kind::kSpace ? 1 : 0;
  const Kind kind = kind_of(text[start]);
  if (kind == Kind::kSpace) return first_space(text);
  const size_t longest = kind == Kind::kDigit ? 3 : kLongestWord;
  size_t end = start;
  size_t code_points = 0;
  while (end < text.size() && kind_of(text[end]) == kind) {
    // Broken UTF-8 can hold any number of continuation bytes: bound the bytes too.
    if (end - start >= 4 * longest) break;
    if (!(continues_code_point(text[end]) && end > start) && ++code_points > longest) break;
    ++end;
  }
  return end;
}

}  // namespace logitless::train
