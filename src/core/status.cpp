#include "core/status.h"

#include <iterator>

namespace logitless {

const char* status_name(Status status) {
  static constexpr const char* kNames[] = {"ok",
                                           "invalid argument",
                                           "invalid target",
                                           "workspace budget too small",
                                           "unsupported",
                                           "backend unavailable",
                                           "out of memory",
                                           "internal error",
                                           "communication failed"};
  const auto number = static_cast<size_t>(status);
  return number < std::size(kNames) ? kNames[number] : "unknown status";
}

std::string message_of(const ErrorInfo& info) {
  const std::string place = info.place.empty() ? "" : " at " + info.argument + "[" + info.place + "]";
  return info.argument + ": expected " + info.expected + ", got " + info.got + place;
}

void throw_invalid(const std::string& argument, const std::string& expected, const std::string& got) {
  throw Error(Status::kInvalidArgument, ErrorInfo{.argument = argument, .expected = expected, .got = got});
}

}  // namespace logitless
