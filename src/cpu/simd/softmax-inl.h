// The work on a strip of dot products while it is in cache.
// No include guard: kernels-inl.h includes this once per target.

inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// The softcap of a row's logits, which are already divided by its temperature.
HWY_INLINE float row_softcap(const LogitTransform<float>& t, int row) {
  return t.softcap * t.inverse_temperature_of(row);
}

HWY_INLINE VF transform_lanes(VF dot, VF scale, VF bias, float softcap) {
  const DF df;
  const VF z = hn::MulAdd(dot, scale, bias);
  if (softcap == 0) return z;
  return hn::Mul(hn::Set(df, softcap), tanh_lanes(hn::Div(z, hn::Set(df, softcap))));
}

// t'(z) = 1 - (z / softcap)^2, with a division so that it is 0 where z has reached the softcap.
HWY_INLINE VF softcap_slope(VF z, VF softcap) {
  const DF df;
  const VF r = hn::Div(z, softcap);
  return hn::NegMulAdd(r, r, hn::Set(df, 1.0f));
}

HWY_INLINE float max_of_lanes(VF v) {
#if LOGITLESS_PORTABLE
  // Highway's own maximum begins at the lowest finite number, which is too high for -inf alone.
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, DF(), lanes);
  float max = kNegativeInfinity;
  for (size_t i = 0; i < hn::Lanes(DF()); ++i) max = max < lanes[i] ? lanes[i] : max;
  return max;
#else
  return hn::GetLane(hn::MaxOfLanes(DF(), v));
#endif
}

// Masked columns become -inf.
HWY_INLINE void apply_mask(float* HWY_RESTRICT z, const LogitStrip& strip, const int32_t* words) {
  const DF df;
  const DU du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VU bit = hn::Shl(hn::Set(du, 1), hn::Iota(du, 0));
  words += strip.mask_column / 32;
  for (int64_t j = 0; j < strip.columns; j += lanes) {
    const VU bits = hn::Set(du, static_cast<uint32_t>(words[j / 32]) >> j % 32);
    const auto stays = hn::RebindMask(df, hn::TestBit(bits, bit));
    hn::StoreU(hn::IfThenElse(stays, hn::LoadU(df, z + j), hn::Set(df, kNegativeInfinity)), df, z + j);
  }
}

// Turns dot products into logits in place; masked columns and those past the end become -inf. Returns the
// row's maximum.
HWY_INLINE float transform_row(float* HWY_RESTRICT z, const LogitStrip& strip, const LogitTransform<float>& t,
                               int row) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  if (t.scale != 1 || t.bias != nullptr || t.softcap != 0) {
    const VF scale = hn::Set(df, t.scale);
    for (int64_t j = 0; j < strip.columns; j += lanes) {  // z and bias are padded to whole vectors
      const VF bias = t.bias != nullptr ? hn::LoadU(df, t.bias + j) : hn::Zero(df);
      hn::StoreU(transform_lanes(hn::LoadU(df, z + j), scale, bias, t.softcap), df, z + j);
    }
  }
  if (t.inverse_temperature != nullptr) {
    const VF inverse = hn::Set(df, t.inverse_temperature[row]);
    for (int64_t j = 0; j < strip.columns; j += lanes) {
      hn::StoreU(hn::Mul(hn::LoadU(df, z + j), inverse), df, z + j);
    }
  }
  if (strip.mask.words != nullptr) apply_mask(z, strip, strip.mask.of_row(strip.mask_row[row]));
  for (int64_t j = strip.columns; j < strip.padded_columns; ++j) z[j] = kNegativeInfinity;
  VF max0 = hn::LoadU(df, z);
  VF max1 = hn::LoadU(df, z + lanes);
  for (int64_t j = 2 * lanes; j < strip.padded_columns; j += 2 * lanes) {
    max0 = hn::Max(max0, hn::LoadU(df, z + j));
    max1 = hn::Max(max1, hn::LoadU(df, z + j + lanes));
  }
  return max_of_lanes(hn::Max(max0, max1));
}

HWY_INLINE float sum_of_lanes(VF v) {
  return hn::GetLane(hn::SumOfLanes(DF(), v));
}

// Sums over exp(z - logit offset): plain, times z - logit offset, and squared.
struct ExpSums {
  float exp = 0, offset = 0, square = 0;
};

// Returns a row's sums, as far as they are wanted. Writes the exp logits times t'(z) to `exp_logits` when not
// null.
template <bool kWantOffset, bool kWantSquare, bool kSoftcap>
HWY_INLINE ExpSums exp_sums(const float* HWY_RESTRICT z, int64_t padded, float logit_offset, float softcap,
                            Element* HWY_RESTRICT exp_logits) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF a = hn::Set(df, logit_offset);
  const VF cap = hn::Set(df, softcap);
  VF sum0 = hn::Zero(df);
  VF sum1 = hn::Zero(df);
  VF offset = hn::Zero(df);
  VF square = hn::Zero(df);
  for (int64_t j = 0; j < padded; j += 2 * lanes) {
    const VF z0 = hn::LoadU(df, z + j);
    const VF z1 = hn::LoadU(df, z + j + lanes);
    const VF d0 = clamp_exponent(hn::Sub(z0, a));
    const VF d1 = clamp_exponent(hn::Sub(z1, a));
    VF e0 = exp_clamped(d0);
    VF e1 = exp_clamped(d1);
    sum0 = hn::Add(sum0, e0);
    sum1 = hn::Add(sum1, e1);
    if constexpr (kWantOffset) offset = hn::MulAdd(e0, d0, hn::MulAdd(e1, d1, offset));
    if constexpr (kWantSquare) square = hn::MulAdd(e0, e0, hn::MulAdd(e1, e1, square));
    if (exp_logits == nullptr) continue;
    if constexpr (kSoftcap) {
      e0 = hn::Mul(e0, softcap_slope(z0, cap));
      e1 = hn::Mul(e1, softcap_slope(z1, cap));
    }
    store_elements2(e0, e1, exp_logits + j);
  }
  ExpSums sums;
  sums.exp = sum_of_lanes(hn::Add(sum0, sum1));
  if constexpr (kWantOffset) sums.offset = sum_of_lanes(offset);
  if constexpr (kWantSquare) sums.square = sum_of_lanes(square);
  return sums;
}

template <bool kSoftcap>
HWY_INLINE ExpSums wanted_exp_sums(const BlockStats& wanted, const float* HWY_RESTRICT z, int64_t padded,
                                   float logit_offset, float softcap, Element* HWY_RESTRICT exp_logits) {
  const bool offset = wanted.sum_offset != nullptr;
  if (wanted.sum_sq != nullptr) {
    return offset ? exp_sums<true, true, kSoftcap>(z, padded, logit_offset, softcap, exp_logits)
                  : exp_sums<false, true, kSoftcap>(z, padded, logit_offset, softcap, exp_logits);
  }
  return offset ? exp_sums<true, false, kSoftcap>(z, padded, logit_offset, softcap, exp_logits)
                : exp_sums<false, false, kSoftcap>(z, padded, logit_offset, softcap, exp_logits);
}

// sum w (z - logit offset)
HWY_INLINE float weighted_sum(const float* HWY_RESTRICT z, int64_t columns, float logit_offset,
                              const float* HWY_RESTRICT weight) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF a = hn::Set(df, logit_offset);
  VF sum = hn::Zero(df);
  int64_t j = 0;
  for (; j + lanes <= columns; j += lanes) {
    const VF v = hn::Sub(hn::LoadU(df, z + j), a);
    sum = weight == nullptr ? hn::Add(sum, v) : hn::MulAdd(hn::LoadU(df, weight + j), v, sum);
  }
  float total = sum_of_lanes(sum);
  for (; j < columns; ++j) total += (weight == nullptr ? 1.0f : weight[j]) * (z[j] - logit_offset);
  return total;
}

// Returns the first column that holds `value`, which may be a NaN; -1 for none.
HWY_INLINE int32_t first_of(const float* HWY_RESTRICT z, int64_t padded, float value) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF v = hn::Set(df, value);
  for (int64_t j = 0; j < padded; j += lanes) {
    const VF zj = hn::LoadU(df, z + j);
    const auto matches = std::isnan(value) ? hn::IsNaN(zj) : hn::Eq(zj, v);
    const intptr_t at = hn::FindFirstTrue(df, matches);
    if (at >= 0) return static_cast<int32_t>(j + at);
  }
  return -1;
}

void softmax_strip(const LogitStrip& strip, const LogitTransform<float>& t, const BlockStats& out,
                   void* exp_logits, int64_t exp_logits_stride) {
  for (int i = 0; i < strip.rows; ++i) {
    float* z = strip.z + i * strip.stride;
    Element* row_exp_logits =
        exp_logits == nullptr ? nullptr : static_cast<Element*>(exp_logits) + i * exp_logits_stride;
    const float max = transform_row(z, strip, t, i);
    // A masked block is all -inf. Any finite logit offset makes its exp logits 0, where -inf would make them
    // NaN.
    const float logit_offset = max == kNegativeInfinity ? 0.0f : max;
    const auto exp_logits_of_row = t.softcap != 0 ? wanted_exp_sums<true> : wanted_exp_sums<false>;
    const ExpSums sums =
        exp_logits_of_row(out, z, strip.padded_columns, logit_offset, row_softcap(t, i), row_exp_logits);
    if (row_exp_logits != nullptr) {
      for (int64_t j = strip.columns; j < strip.padded_columns; ++j) row_exp_logits[j] = 0;
    }
    // The vector maximum loses a NaN among other logits.
    const bool has_nan = std::isnan(sums.exp) && first_of(z, strip.padded_columns, sums.exp) >= 0;
    out.max[i] = has_nan ? sums.exp : max;
    out.sum_exp[i] = sums.exp;
    if (out.sum_offset != nullptr) out.sum_offset[i] = sums.offset;
    if (out.sum_sq != nullptr) out.sum_sq[i] = sums.square;
    if (out.logit_sum != nullptr) out.logit_sum[i] = weighted_sum(z, strip.columns, 0, nullptr);
    for (int at = i * strip.targets; at < (i + 1) * strip.targets; ++at) {
      if (strip.target[at] >= 0) out.target_logit[at] = z[strip.target[at]];
    }
    if (out.weighted != nullptr) {
      out.weighted[i] = weighted_sum(z, strip.columns, logit_offset, strip.class_weight);
    }
    if (out.argmax != nullptr) out.argmax[i] = first_of(z, strip.padded_columns, out.max[i]);
  }
}
