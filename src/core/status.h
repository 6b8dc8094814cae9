#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace logitless {

// Numbered as logitless_status in the C header.
enum class Status : int {
  kOk = 0,
  kInvalidArgument = 1,
  kInvalidTarget = 2,       // a target outside [0, vocab_total) that is not ignore_index
  kBudgetTooSmall = 3,      // max_workspace_bytes admits no plan; the message names the smallest that works
  kUnsupported = 4,         // no backend of the context can run the problem
  kBackendUnavailable = 5,  // a backend or instruction set asked for by name is not usable here
  kOutOfMemory = 6,
  kInternal = 7,
  kCommunicationFailed = 8,  // a function of a group's communicator failed
};

const char* status_name(Status status);

// A failure as data, as far as it is known.
struct ErrorInfo {
  std::string argument = {};
  std::string expected = {};
  std::string got = {};
  uint64_t required_bytes = 0;  // of a budget that is too small
  int64_t row = -1;             // element of the argument: of several targets a row, row * K + k
  std::string place = {};       // the same for people; empty: none
};

// "<argument>: expected <expected>, got <got>", and where it has a place " at <argument>[<place>]"
std::string message_of(const ErrorInfo& info);

// The one exception of the library; messages name the argument, what was expected and what was got.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Error(Status status, const ErrorInfo& info)
      : std::runtime_error(message_of(info)),
        status_(status),
        info_(std::make_shared<const ErrorInfo>(info)) {}
  Status status() const { return status_; }
  const ErrorInfo* info() const { return info_.get(); }  // null: a message alone

 private:
  Status status_;
  std::shared_ptr<const ErrorInfo> info_;  // copies of exceptions do not throw
};

[[noreturn]] void throw_invalid(const std::string& argument, const std::string& expected,
                                const std::string& got);

template <class T>
T* required(T* pointer, const char* argument) {
  if (pointer == nullptr) throw_invalid(argument, "a pointer", "null");
  return pointer;
}

}  // namespace logitless
