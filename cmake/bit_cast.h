// Included before all else where the standard library has no std::bit_cast, as that of emscripten 3.1.6.
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
