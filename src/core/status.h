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
  kInvalidTarget = 2,   // a target outside [0, vocab_total) that is not ignore_index
  kBudgetTooSmall = 3,  // no plan fits max_workspace_bytes; the message names the smallest budget that works
  kUnsupported = 4,     // no backend of the context can run the problem
  kBackendUnavailable = 5,  // the chosen backend or engine cannot be used here
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
  uint64_t required_bytes = 0;  // a size that works, if one was refused
  int64_t row = -1;             // element of the argument; with several targets a row, row * K + k
  std::string place = {};       // this element for people; empty: none
};

// Returns "<argument>: expected <expected>, got <got>", followed by " at <argument>[<place>]" if there is a
// place.
std::string message_of(const ErrorInfo& info);

// The library's only exception. Messages name the argument, what was expected and what was got.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Error(Status status, const ErrorInfo& info)
      : std::runtime_error(message_of(info)),
        status_(status),
        info_(std::make_shared<const ErrorInfo>(info)) {}
  Status status() const { return status_; }
  const ErrorInfo* info() const { return info_.get(); }  // null: only a message

 private:
  Status status_;
  std::shared_ptr<const ErrorInfo> info_;  // shared, so that copying the exception does not throw
};

[[noreturn]] void throw_invalid(const std::string& argument, const std::string& expected,
                                const std::string& got);

inline void expect(bool ok, const std::string& argument, const std::string& expected,
                   const std::string& got) {
  if (!ok) throw_invalid(argument, expected, got);
}

// Returns the elements between rows. stride 0: as many as a row has; `unit` names these.
inline int64_t stride_of(int64_t stride, int64_t columns, const std::string& argument, const char* unit) {
  if (stride == 0) return columns;
  expect(stride >= columns, argument, std::string("0 or at least ") + unit, std::to_string(stride));
  return stride;
}

template <class T>
T* required(T* pointer, const char* argument) {
  if (pointer == nullptr) throw_invalid(argument, "a pointer", "null");
  return pointer;
}

}  // namespace logitless
