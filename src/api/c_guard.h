#pragma once
// What the entry points of the C ABI have in common: each catches everything and turns it into a status and
// the thread's message.
#include <new>
#include <string>

#include "api/run.h"
#include "core/status.h"
#include "logitless/logitless.h"

struct logitless_context {
  logitless::Context context;
};

struct logitless_plan {
  logitless::PlannedProblem planned;
};

namespace logitless {

// The calling thread's last failure.
struct LastError {
  Status status = Status::kOk;
  std::string message;
  ErrorInfo info;
};
inline LastError& last_error() {
  static thread_local LastError error;
  return error;
}

inline logitless_status fail(Status status, const char* message, const ErrorInfo* info = nullptr) noexcept {
  LastError& last = last_error();
  last.status = status;
  try {
    last.info = info != nullptr ? *info : ErrorInfo{};
    last.message = message;
  } catch (...) {
    last.message.clear();
  }
  return static_cast<logitless_status>(status);
}

template <class F>
logitless_status guarded(F&& body) noexcept {
  try {
    body();
    return LOGITLESS_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what(), error.info());
  } catch (const std::bad_alloc&) {
    return fail(Status::kOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return fail(Status::kInternal, error.what());
  } catch (...) {
    return fail(Status::kInternal, "an unknown exception");
  }
}

template <class T>
T* required(T* pointer, const char* argument) {
  if (pointer == nullptr) throw_invalid(argument, "a pointer", "null");
  return pointer;
}

}  // namespace logitless
