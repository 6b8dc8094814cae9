#include "core/number_text.h"

#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

namespace logitless {
namespace {

// std::to_chars is no choice: not every standard library has it for floating-point numbers.
std::ostringstream plain_stream() {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  return stream;
}

}  // namespace

std::string number_text(double value, int digits) {
  std::ostringstream stream = plain_stream();
  stream << std::setprecision(digits) << value;
  return stream.str();
}

std::string fixed_text(double value, int decimals) {
  std::ostringstream stream = plain_stream();
  stream << std::fixed << std::setprecision(decimals) << value;
  return stream.str();
}

std::string bytes_text(uint64_t bytes) {
  std::string text = std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  if (bytes < 1024) return text;
  const bool is_small = bytes < 1024 * 1024;
  const double size = static_cast<double>(bytes) / (is_small ? 1024.0 : 1024.0 * 1024.0);
  return text + " (" + fixed_text(std::ceil(10 * size) / 10, 1) + (is_small ? " KiB)" : " MiB)");
}

}  // namespace logitless
