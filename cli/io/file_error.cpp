#include "io/file_error.h"

#include <cstdio>

namespace logitless::cli {

std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxLength = 120;
  std::string out = "'";
  for (const char c : text.substr(0, kMaxLength)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\x%02x", byte);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + (text.size() > kMaxLength ? "...'" : "'");
}

}  // namespace logitless::cli
