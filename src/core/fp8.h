#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

// Numbers of 8-bit logits, all of them or a screen's: e4m3 with one power of two for each row. Three bits of
// mantissa stay, whatever the power of two is, so the largest element of a row decides only which elements
// vanish: those below 2^-19 of it. A power of two also makes every rounded number exact in bf16 and float32,
// so engines without 8-bit products see the same numbers. (fp16 has them if the row's exponent is in its
// range.)
namespace logitless {

inline constexpr int kLargestFp8Exponent = 8;    // of 448 = 1.75 x 2^8
inline constexpr int kSmallestFp8Exponent = -6;  // of normal numbers; below it steps of 2^-9 remain
inline constexpr float kLargestFp8 = 448;

// Returns e of a row's scale 2^e from its largest magnitude: scaled by 2^-e that is at most 448. Such a
// scale and its inverse are normal float32 numbers. A row with infinities or NaN has no scale, and a row of
// zeros needs none: 0.
LOGITLESS_HD inline int fp8_row_exponent(float largest) {
  if (!(largest > 0) || !(largest < INFINITY)) return 0;
  int exponent = 0;
  const float fraction = std::frexp(largest, &exponent);  // in [0.5, 1)
  const int scale = exponent - 1 - kLargestFp8Exponent + (fraction > kLargestFp8 / 512 ? 1 : 0);
  return scale < -118 ? -118 : scale;
}

// Returns 2^exponent, for exponents of normal numbers.
LOGITLESS_HD inline float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// Returns the e4m3 number nearest to value, to even between two. Magnitudes above 448, and NaN, become NaN:
// a row's scale leaves none but infinities there.
LOGITLESS_HD inline float round_to_fp8(float value) {
  const float magnitude = std::fabs(value);
  if (!(magnitude <= kLargestFp8)) return NAN;
  // The sum's last place is the step of value's binade: three bits below its leading one.
  const uint32_t binade = std::bit_cast<uint32_t>(magnitude) >> 23;
  const uint32_t least = static_cast<uint32_t>(kSmallestFp8Exponent + 127);
  const float shifter = std::bit_cast<float>(((binade > least ? binade : least) + 20) << 23);
  const float rounded = (magnitude + shifter) - shifter;
  return value < 0 ? -rounded : rounded;
}

// Returns an element as a product of rounded rows sees it. exponent: the row's.
LOGITLESS_HD inline float screened(float value, int exponent) {
  return round_to_fp8(value * power_of_two(-exponent)) * power_of_two(exponent);
}

}  // namespace logitless
