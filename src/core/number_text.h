#pragma once
#include <string>

namespace logitless {

// Texts of numbers for messages. The decimal point is always a point; printf() and streams would follow the
// host's locale. Nine digits are as many as a float has; 17 digits give a double back.
std::string number_text(double value, int digits = 9);
std::string fixed_text(double value, int decimals);  // digits after the point

}  // namespace logitless
