// Vectorised natural logarithm. No include guard: kernels-inl.h includes this once per target.

// Logarithm of positive normal numbers; NaN stays NaN. x = 2^e m with m in [1/sqrt(2), sqrt(2)), and log m =
// 2 atanh(s), s = (m - 1) / (m + 1), |s| <= 0.172. The series of atanh ends before a term below 2^-31 of it.
HWY_INLINE VF log_lanes(VF x) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  const VF one = hn::Set(df, 1.0f);
  const auto root_half = hn::Set(di, 0x3f3504f3);  // the bits of 1/sqrt(2)
  const auto bits = hn::BitCast(di, x);
  const auto exponent = hn::ShiftRight<23>(hn::Sub(bits, root_half));
  const VF m = hn::BitCast(df, hn::Sub(bits, hn::ShiftLeft<23>(exponent)));
  const VF e = hn::ConvertTo(df, exponent);
  const VF f = hn::Sub(m, one);  // exact
  const VF s = hn::Div(f, hn::Add(m, one));
  const VF s2 = hn::Mul(s, s);
  VF series = hn::Set(df, 2.0f / 9);
  series = hn::MulAdd(series, s2, hn::Set(df, 2.0f / 7));
  series = hn::MulAdd(series, s2, hn::Set(df, 2.0f / 5));
  series = hn::MulAdd(series, s2, hn::Set(df, 2.0f / 3));
  // 2 s = f - s f keeps f itself, without a rounding, as the large part of log m.
  VF log = hn::MulAdd(s, hn::Sub(hn::Mul(s2, series), f), f);
  log = hn::MulAdd(e, hn::Set(df, 1.42860677e-06f), log);
  log = hn::MulAdd(e, hn::Set(df, 0.693145752f), log);  // ln 2, upper 16 bits: e * it is exact
  return hn::IfThenElse(hn::IsNaN(x), x, log);
}
