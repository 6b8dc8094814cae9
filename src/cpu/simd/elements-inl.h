// Loads and stores of the caller's types and of elements.
// No include guard: kernels-inl.h includes this once per target.

HWY_INLINE VF bf16_to_lanes(const uint16_t* bits) {
  const DF df;
  const hn::Rebind<uint16_t, DF> du16;
  const hn::Rebind<uint32_t, DF> du32;
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, bits))));
}

HWY_INLINE VF f16_to_lanes(const uint16_t* bits) {
  const DF df;
#if LOGITLESS_PORTABLE
  HWY_ALIGN float values[HWY_MAX_BYTES / sizeof(float)];
  for (size_t i = 0; i < hn::Lanes(df); ++i) values[i] = f16_to_float(bits[i]);
  return hn::Load(df, values);
#else
  const hn::Rebind<hwy::float16_t, DF> df16;
  return hn::PromoteTo(df, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(bits)));
#endif
}

// Rounds to nearest even, NaN stays NaN (as core/dtype.h does it).
HWY_INLINE void lanes_to_bf16(VF v, uint16_t* out) {
#if LOGITLESS_BF16_PAIRS
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v.raw)));
#else
  const hn::Rebind<uint32_t, DF> du32;
  const hn::Rebind<uint16_t, DF> du16;
  const auto bits = hn::BitCast(du32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, odd), hn::Set(du32, 0x7fff)));
  const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du32, 0x40));
  const auto is_nan = hn::RebindMask(du32, hn::Ne(v, v));
  const auto result = hn::IfThenElse(is_nan, quiet_nan, rounded);
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(hn::RebindToSigned<decltype(du32)>(), result)), du16, out);
#endif
}

HWY_INLINE void lanes_to_f16(VF v, uint16_t* out) {
#if LOGITLESS_PORTABLE
  HWY_ALIGN float values[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, DF(), values);
  for (size_t i = 0; i < hn::Lanes(DF()); ++i) out[i] = float_to_f16(values[i]);
#else
  const hn::Rebind<hwy::float16_t, DF> df16;
  hn::StoreU(hn::DemoteTo(df16, v), df16, reinterpret_cast<hwy::float16_t*>(out));
#endif
}

#if LOGITLESS_BF16_PAIRS
using Element = uint16_t;
HWY_INLINE VF load_element(const Element* p) {
  return bf16_to_lanes(p);
}
HWY_INLINE void store_element(VF v, Element* p) {
  lanes_to_bf16(v, p);
}
// Stores two vectors side by side with one conversion.
HWY_INLINE void store_elements2(VF v0, VF v1, Element* p) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v1.raw, v0.raw)));
}
inline void store_scalar(float v, Element* p) {
  *p = float_to_bf16(v);
}
#else
using Element = float;
HWY_INLINE VF load_element(const Element* p) {
  return hn::LoadU(DF(), p);
}
HWY_INLINE void store_element(VF v, Element* p) {
  hn::StoreU(v, DF(), p);
}
HWY_INLINE void store_elements2(VF v0, VF v1, Element* p) {
  store_element(v0, p);
  store_element(v1, p + hn::Lanes(DF()));
}
inline void store_scalar(float v, Element* p) {
  *p = v;
}
#endif

inline float load_scalar(const void* source, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(source)[index];
  const uint16_t bits = static_cast<const uint16_t*>(source)[index];
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

HWY_INLINE VF load_lanes_of(const void* source, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return hn::LoadU(DF(), static_cast<const float*>(source) + index);
  const uint16_t* bits = static_cast<const uint16_t*>(source) + index;
  return dtype == DType::kBF16 ? bf16_to_lanes(bits) : f16_to_lanes(bits);
}

// Rounds to a 16-bit format and back; kF32 leaves the values as they are.
HWY_INLINE VF rounded_lanes(VF v, DType to) {
  HWY_ALIGN uint16_t bits[HWY_MAX_BYTES / sizeof(float)];
  if (to == DType::kBF16) {
    lanes_to_bf16(v, bits);
    return bf16_to_lanes(bits);
  }
  if (to == DType::kF16) {
    lanes_to_f16(v, bits);
    return f16_to_lanes(bits);
  }
  return v;
}

inline float rounded_scalar(float v, DType to) {
  if (to == DType::kBF16) return bf16_to_float(float_to_bf16(v));
  return to == DType::kF16 ? f16_to_float(float_to_f16(v)) : v;
}

// Converts `count` numbers of any input type to elements. Bf16 pairs come from bf16, or from what is rounded
// to it.
void convert_elements(const void* source, DType dtype, DType round_to, int64_t count, Element* out) {
  constexpr DType kElement = sizeof(Element) == 2 ? DType::kBF16 : DType::kF32;
  if (dtype == kElement && (round_to == DType::kF32 || round_to == dtype)) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(Element));
    return;
  }
  const bool rounds = kElement == DType::kF32 && round_to != dtype;
  const DType to = rounds ? round_to : DType::kF32;
  const auto lanes = static_cast<int64_t>(hn::Lanes(DF()));
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    store_element(rounded_lanes(load_lanes_of(source, dtype, j), to), out + j);
  }
  for (; j < count; ++j) store_scalar(rounded_scalar(load_scalar(source, dtype, j), to), out + j);
}

void convert_row(const MatrixView& source, int64_t count, int64_t padded, void* elements) {
  auto* out = static_cast<Element*>(elements);
  convert_elements(source.data, source.dtype, source.round_to, count, out);
  std::memset(out + count, 0, static_cast<size_t>(padded - count) * sizeof(Element));
}

void store_row(const float* values, int64_t count, float factor, bool add, DType dtype, void* out) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF f = hn::Set(df, factor);
  auto* out32 = static_cast<float*>(out);
  auto* out16 = static_cast<uint16_t*>(out);
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    VF v = hn::Mul(hn::LoadU(df, values + j), f);
    if (dtype == DType::kF32) {
      if (add) v = hn::Add(v, hn::LoadU(df, out32 + j));
      hn::StoreU(v, df, out32 + j);
    } else if (dtype == DType::kBF16) {
      lanes_to_bf16(v, out16 + j);
    } else {
      lanes_to_f16(v, out16 + j);
    }
  }
  for (; j < count; ++j) {
    const float v = values[j] * factor;
    if (dtype == DType::kF32) {
      out32[j] = add ? out32[j] + v : v;
    } else {
      out16[j] = dtype == DType::kBF16 ? float_to_bf16(v) : float_to_f16(v);
    }
  }
}

// sums[j] += sum_i dz[i, j], the partial sum of rows in order.
void add_column_sums(const void* dz, int64_t stride, int64_t rows, int64_t columns, float* sums) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto* elements = static_cast<const Element*>(dz);
  for (int64_t j = 0; j < columns; j += 2 * lanes) {  // elements and sums are padded to two vectors
    VF s0 = hn::Zero(df);
    VF s1 = hn::Zero(df);
    for (int64_t i = 0; i < rows; ++i) {
      s0 = hn::Add(s0, load_element(elements + i * stride + j));
      s1 = hn::Add(s1, load_element(elements + i * stride + j + lanes));
    }
    hn::StoreU(hn::Add(hn::LoadU(df, sums + j), s0), df, sums + j);
    hn::StoreU(hn::Add(hn::LoadU(df, sums + j + lanes), s1), df, sums + j + lanes);
  }
}
