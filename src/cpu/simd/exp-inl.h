// Vectorised exp and tanh. No include guard: kernels-inl.h includes this once per target.

// Multiplies x by 2^n for an integral n in [-150, 128]. It takes two halves, because 2^128 and subnormal
// powers do not fit an exponent.
HWY_INLINE VF scale_by_power_of_two(VF x, VF n) {
#if HWY_TARGET == HWY_AVX3
  return VF{_mm512_scalef_ps(x.raw, n.raw)};
#else
  const DF df;
  const hn::RebindToSigned<DF> di;
#if LOGITLESS_PORTABLE
  // In plain C++ a NaN has no integer. x is NaN then, so any n will do.
  n = hn::IfThenZeroElse(hn::IsNaN(n), n);
#endif
  const auto ni = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(ni);
  const auto bias = hn::Set(di, 127);
  const VF low = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const VF high = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(hn::Sub(ni, half), bias)));
  return hn::Mul(hn::Mul(x, low), high);
#endif
}

// Clamps x to [-104, 89], where exp is 0 and infinity in fp32; NaN stays NaN.
HWY_INLINE VF clamp_exponent(VF x) {
  const DF df;
  const VF low = hn::Set(df, -104.0f);
  const VF high = hn::Set(df, 89.0f);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  return hn::Min(high, hn::Max(low, x));  // x86 returns the second operand when either is NaN
#else
  x = hn::IfThenElse(hn::Lt(x, low), low, x);
  return hn::IfThenElse(hn::Gt(x, high), high, x);
#endif
}

// exp of a clamped argument. exp(x) = 2^n exp(r), r = x - n ln 2 in two steps, |r| <= ln(2) / 2. The
// polynomial's own relative error is 3e-9, so the whole error is about one unit in the last place.
HWY_INLINE VF exp_clamped(VF x) {
  const DF df;
  const VF magic = hn::Set(df, 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VF n = hn::Sub(hn::MulAdd(x, hn::Set(df, 1.442695041f), magic), magic);
  VF r = hn::NegMulAdd(n, hn::Set(df, 0.693145752f), x);  // ln 2, upper 16 bits: n * it is exact
  r = hn::NegMulAdd(n, hn::Set(df, 1.42860677e-06f), r);
  VF p = hn::Set(df, 0.0013814540f);
  p = hn::MulAdd(p, r, hn::Set(df, 0.0083687452f));
  p = hn::MulAdd(p, r, hn::Set(df, 0.0416683908f));
  p = hn::MulAdd(p, r, hn::Set(df, 0.1666652040f));
  p = hn::MulAdd(p, r, hn::Set(df, 0.4999999343f));
  const VF one = hn::Set(df, 1.0f);
  p = hn::MulAdd(p, r, one);
  p = hn::MulAdd(p, r, one);
  return scale_by_power_of_two(p, n);
}

HWY_INLINE VF exp_lanes(VF x) {
  return exp_clamped(clamp_exponent(x));
}

// tanh: an odd polynomial near zero (relative error 5e-9), else from exp(-2|x|).
HWY_INLINE VF tanh_lanes(VF x) {
  const DF df;
  const VF one = hn::Set(df, 1.0f);
  const VF magnitude = hn::Abs(x);
  const VF e = exp_lanes(hn::Mul(magnitude, hn::Set(df, -2.0f)));
  const VF large = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  const VF s = hn::Mul(x, x);
  VF q = hn::Set(df, -0.0056973511f);
  q = hn::MulAdd(q, s, hn::Set(df, 0.0206325180f));
  q = hn::MulAdd(q, s, hn::Set(df, -0.0537377897f));
  q = hn::MulAdd(q, s, hn::Set(df, 0.1333142029f));
  q = hn::MulAdd(q, s, hn::Set(df, -0.3333328118f));
  const VF small = hn::MulAdd(hn::Mul(q, s), x, x);
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(df, 0.625f)), small, large);
}

void exp_row(const float* x, int64_t count, float* out) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) hn::StoreU(exp_lanes(hn::LoadU(df, x + j)), df, out + j);
  if (j < count) {
    HWY_ALIGN float tail[HWY_MAX_BYTES / sizeof(float)] = {};
    std::memcpy(tail, x + j, static_cast<size_t>(count - j) * sizeof(float));
    hn::Store(exp_lanes(hn::Load(df, tail)), df, tail);
    std::memcpy(out + j, tail, static_cast<size_t>(count - j) * sizeof(float));
  }
}
