// Defines std::bit_cast where the standard library lacks it, as in emscripten 3.1.6. Included first.
#ifndef LOGITLESS_BIT_CAST_H_
#define LOGITLESS_BIT_CAST_H_
#include <version>
#ifndef __cpp_lib_bit_cast
namespace std {
template <class To, class From>
constexpr To bit_cast(const From& from) noexcept {
  return __builtin_bit_cast(To, from);
}
}  // namespace std
#endif
#endif
