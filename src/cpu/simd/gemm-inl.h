// Register-tiled GEMM kernels.
// No include guard: kernels-inl.h includes this once per target.
// Rows x two vectors of accumulators stay in registers over kSumUnits of K. Each K step loads two vectors of
// the panel and broadcasts one unit of every row.

#if HWY_TARGET == HWY_AVX3
inline constexpr int kMr = 14;  // 28 accumulators + 2 panel vectors + 1 broadcast of 32 registers
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kMr = 6;  // 12 + 2 + 1 of 16
#elif HWY_TARGET == HWY_NEON
inline constexpr int kMr = 12;  // 24 + 2 + 1 of 32
#else
inline constexpr int kMr = 4;
#endif

inline constexpr size_t kPrefetchSteps = 12;

// Units of K in one partial sum; the last one has the rest, fewer than twice as many.
// The rounding error of a sum of n terms in order grows as n. With partial sums of 256 terms, added in order,
// it grows as 16 sqrt(n) up to n = 2^16.
inline constexpr int64_t kSumUnits = 256;

#if LOGITLESS_BF16_PAIRS
HWY_INLINE VF multiply_add_unit(VF acc, const uint32_t* a, const uint32_t* b) {
  const __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*a)));
  return VF{_mm512_dpbf16_ps(acc.raw, x, reinterpret_cast<__m512bh>(_mm512_load_si512(b)))};
}
#else
HWY_INLINE VF multiply_add_unit(VF acc, const uint32_t* a, const uint32_t* b) {
  const DF df;
  return hn::MulAdd(hn::Set(df, *reinterpret_cast<const float*>(a)),
                    hn::Load(df, reinterpret_cast<const float*>(b)), acc);
}
#endif

// Computes one register tile over the `units` of K that a and b begin at. A rows operand has a pointer for
// every third row and reaches the others from it, so that 14 rows take five address registers and no spill.
template <int kRows, bool kColumnsOperand>
HWY_INLINE void multiply_tile(const GemmStrip& g, const uint32_t* HWY_RESTRICT a_begin,
                              const uint32_t* HWY_RESTRICT b, int64_t units, bool add,
                              float* HWY_RESTRICT c) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const int64_t stride = g.a_stride;
  const int64_t c_stride = g.c_stride;
  VF acc[kRows][2];
  LOGITLESS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    acc[i][0] = hn::Zero(df);
    acc[i][1] = hn::Zero(df);
  }
  if (add) {
    LOGITLESS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      hwy::Prefetch(c + i * c_stride);
      hwy::Prefetch(c + i * c_stride + lanes);
    }
  }
  constexpr int kGroups = (kRows + 2) / 3;
  const uint32_t* a[kGroups];
  LOGITLESS_UNROLL
  for (int i = 0; i < kGroups; ++i) a[i] = kColumnsOperand ? a_begin + 3 * i : a_begin + 3 * i * stride;
  const int64_t row_step = kColumnsOperand ? 1 : stride;
  const int64_t k_step = kColumnsOperand ? stride : 1;
  for (int64_t k = 0; k < units; ++k) {
    // Hardware prefetchers stop at every 4 KiB page, which a panel crosses every 32 steps.
    hwy::Prefetch(b + kPrefetchSteps * 2 * lanes);
    hwy::Prefetch(b + kPrefetchSteps * 2 * lanes + lanes);
    LOGITLESS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const uint32_t* unit = a[i / 3] + (i % 3) * row_step;
      acc[i][0] = multiply_add_unit(acc[i][0], unit, b);
      acc[i][1] = multiply_add_unit(acc[i][1], unit, b + lanes);
    }
    LOGITLESS_UNROLL
    for (int i = 0; i < kGroups; ++i) a[i] += k_step;
    b += 2 * lanes;
  }
  LOGITLESS_UNROLL
  for (int i = 0; i < kRows; ++i) {
    float* row = c + i * c_stride;
    if (add) {
      acc[i][0] = hn::Add(acc[i][0], hn::LoadU(df, row));
      acc[i][1] = hn::Add(acc[i][1], hn::LoadU(df, row + lanes));
    }
    hn::StoreU(acc[i][0], df, row);
    hn::StoreU(acc[i][1], df, row + lanes);
  }
}

template <int kRows, bool kColumnsOperand>
void multiply_strip(const GemmStrip& g) {
  const auto nr = static_cast<int64_t>(2 * hn::Lanes(DF()));
  const int64_t a_step = kColumnsOperand ? g.a_stride : 1;
  for (int64_t p = 0; p < g.panels; ++p) {
    const uint32_t* b = g.b + p * g.b_panel_stride;
    for (int64_t k = 0, units = 0; k < g.k; k += units) {
      units = g.k - k < 2 * kSumUnits ? g.k - k : kSumUnits;
      multiply_tile<kRows, kColumnsOperand>(g, g.a + k * a_step, b + k * nr, units, g.add || k > 0,
                                            g.c + p * nr);
    }
  }
}

// Picks the kernel with as many rows as the strip has: a short last strip costs no more than its rows.
template <bool kColumnsOperand, int kRows = kMr>
void multiply_rows(const GemmStrip& g) {
  if constexpr (kRows > 0) {
    if (g.rows == kRows) return multiply_strip<kRows, kColumnsOperand>(g);
    multiply_rows<kColumnsOperand, kRows - 1>(g);
  }
}

void gemm_rows(const GemmStrip& g) {
  multiply_rows<false>(g);
}
void gemm_columns(const GemmStrip& g) {
  multiply_rows<true>(g);
}
