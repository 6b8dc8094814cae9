#pragma once
#include <string>

namespace logitless {

// Numbers in messages. A point is a point: printf() and streams would follow the host's locale.
std::string number_text(double value);               // of nine digits, as many as a float has
std::string fixed_text(double value, int decimals);  // digits after the point

}  // namespace logitless
