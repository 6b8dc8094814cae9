#pragma once
// What the entry points of the C ABI have in common: each catches everything and turns it into a status and
// the thread's message.
#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "core/status.h"
#include "logitless/logitless.h"
#include "run.h"

struct logitless_context {
  logitless::Context context;
};

struct logitless_plan {
  logitless::PlannedProblem planned;
};

namespace logitless {

// The calling thread's message.
inline std::string& last_error() {
  static thread_local std::string message;
  return message;
}

inline logitless_status fail(Status status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    last_error().clear();
  }
  return static_cast<logitless_status>(status);
}

template <class F>
logitless_status guarded(F&& body) noexcept {
  try {
    body();
    return LOGITLESS_OK;
  } catch (const Error& error) {
    return fail(error.status(), error.what());
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

// Of the caller's struct, which may be smaller or larger than the library's, every byte and none past it.
template <class T>
void init_struct(T* out, size_t size, T defaults = {}) {
  if (out == nullptr || size < sizeof out->struct_size) return;
  defaults.struct_size = size;
  std::memset(out, 0, size);
  std::memcpy(out, &defaults, std::min(size, sizeof defaults));
}

}  // namespace logitless
