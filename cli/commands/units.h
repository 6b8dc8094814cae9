#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::cli {

// "256MiB", "1GB", "64k", "1.5GiB", "4096": k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024, the B may
// be left out. Throws UsageError naming the option.
uint64_t parse_size(const std::string& option, const std::string& text);

// Whole numbers with an optional suffix, "4096" or "4k" or "128Ki". Throws UsageError naming the option.
int64_t parse_count(const std::string& option, const std::string& text);

// The decimal number that a text begins with, such as -10 or 1.5 or, with `exponent`, 1e-3, and how many
// characters it has: 0 where there is none, and then it is NaN.
struct LeadingNumber {
  double value;
  size_t length;
};
LeadingNumber leading_number(std::string_view text, bool exponent);

// The parts of a list such as "1,2,3".
std::vector<std::string> split(const std::string& text, char separator);

}  // namespace logitless::cli
