#include "core/number_text.h"

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

}  // namespace logitless
