// Gradients of the dot products, from exp logits or logits.
// No include guard: kernels-inl.h includes this once per target.

void gradient_strip(const LogitStrip& strip, const LogitTransform<float>& t, const StripCoefficients& k,
                    void* dz, int64_t dz_stride) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  for (int i = 0; i < strip.rows; ++i) {
    float* z = strip.z + i * strip.stride;
    Element* out = static_cast<Element*>(dz) + i * dz_stride;
    transform_row(z, strip, t, i);
    const VF softcap = hn::Set(df, row_softcap(t, i));
    const VF lse = hn::Set(df, k.lse[i]);
    const VF lse_residual = hn::Set(df, k.lse_residual[i]);
    const VF a = hn::Set(df, k.a[i]);
    const VF b = hn::Set(df, k.b[i]);
    const VF c = hn::Set(df, k.c[i]);
    for (int64_t j = 0; j < strip.padded_columns; j += lanes) {
      const VF zj = hn::LoadU(df, z + j);
      const VF log_p = hn::Sub(hn::Sub(zj, lse), lse_residual);
      const VF p = exp_lanes(log_p);
      VF v = hn::Mul(p, a);
      if (k.b[i] != 0) {  // p log p is 0 where p is, even for z = -inf
        const VF with_entropy = hn::Mul(p, hn::MulAdd(b, log_p, a));
        v = hn::IfThenElse(hn::Eq(p, hn::Zero(df)), hn::Zero(df), with_entropy);
      }
      if (k.c[i] != 0) {
        v = strip.class_weight == nullptr ? hn::Add(v, c)
                                          : hn::MulAdd(c, hn::LoadU(df, strip.class_weight + j), v);
      }
      if (t.softcap != 0) v = hn::Mul(v, softcap_slope(zj, softcap));
      store_element(v, out + j);
    }
    for (int64_t j = strip.columns; j < strip.padded_columns; ++j) out[j] = 0;
    for (int at = i * strip.targets; at < (i + 1) * strip.targets; ++at) {
      const int32_t y = strip.target[at];
      if (y < 0) continue;
      // At the target p a - g may cancel, so it is computed in double and before any rounding to an element.
      const double zy = z[y];
      const double w = strip.class_weight == nullptr ? 1.0 : strip.class_weight[y];
      const LogSumExp<double> known{k.lse[i], k.lse_residual[i]};
      double v = dz_element<double>({k.a[i], k.b[i], k.c[i], k.g[at]}, known.log_p(zy), w, 1);
      v *= t.slope(zy, t.inverse_temperature_of(i));
      store_scalar(static_cast<float>(v), out + y);
    }
  }
}

void finish_strip(const LogitStrip& strip, const FinishStrip& f) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  for (int i = 0; i < strip.rows; ++i) {
    const Element* exp_logits = static_cast<const Element*>(f.exp_logits) + i * strip.stride;
    Element* row = static_cast<Element*>(f.dz) + i * strip.stride;
    const VF factor = hn::Set(df, f.factor[i]);
    if (f.c == nullptr) {
      for (int64_t j = 0; j < strip.columns;
           j += 2 * lanes) {  // exp logits are padded to two vectors with zeros
        const VF v0 = hn::Mul(load_element(exp_logits + j), factor);
        const VF v1 = hn::Mul(load_element(exp_logits + j + lanes), factor);
        store_elements2(v0, v1, row + j);
      }
    } else {
      const VF c = hn::Set(df, f.c[i]);
      for (int64_t j = 0; j < strip.columns; j += lanes) {
        const VF w =
            strip.class_weight == nullptr ? hn::Set(df, 1.0f) : hn::LoadU(df, strip.class_weight + j);
        store_element(hn::MulAdd(load_element(exp_logits + j), factor, hn::Mul(c, w)), row + j);
      }
    }
    for (int64_t j = strip.columns; j < strip.padded_columns; ++j) row[j] = 0;
    for (int at = i * strip.targets; at < (i + 1) * strip.targets; ++at) {
      if (strip.target[at] >= 0) store_scalar(f.target_value[at], row + strip.target[at]);
    }
  }
}
