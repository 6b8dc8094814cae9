#include "core/status.h"

namespace logitless {

const char* status_name(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kInvalidArgument:
      return "invalid argument";
    case Status::kInvalidTarget:
      return "invalid target";
    case Status::kBudgetTooSmall:
      return "workspace budget too small";
    case Status::kUnsupported:
      return "unsupported";
    case Status::kBackendUnavailable:
      return "backend unavailable";
    case Status::kOutOfMemory:
      return "out of memory";
    case Status::kInternal:
      return "internal error";
    case Status::kCommunicationFailed:
      return "communication failed";
  }
  return "unknown status";
}

std::string message_of(const ErrorInfo& info) {
  const std::string place = info.place.empty() ? "" : " at " + info.argument + "[" + info.place + "]";
  return info.argument + ": expected " + info.expected + ", got " + info.got + place;
}

void throw_invalid(const std::string& argument, const std::string& expected, const std::string& got) {
  throw Error(Status::kInvalidArgument, ErrorInfo{.argument = argument, .expected = expected, .got = got});
}

}  // namespace logitless
