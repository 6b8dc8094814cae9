// Kernels that find elements of a row, drawn or large, and kernels of sparsified gradients.
// No include guard: kernels-inl.h includes this once per target.

// Appends the columns from j on that are in the mask, with their logits z, to the `count` that the row has.
// Returns how many.
template <class Row, class Mask>
HWY_INLINE int64_t append_elements(const Row& row, int64_t count, int64_t j, VF z, Mask mask) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  const auto columns = hn::Iota(di, static_cast<int32_t>(j));
  hn::CompressStore(columns, hn::RebindMask(di, mask), di, row.columns + count);
  return static_cast<int64_t>(hn::CompressStore(z, mask, df, row.logits + count));
}

int64_t select_row(const SelectRow& row) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF least = hn::Set(df, row.least);
  int64_t count = 0;
  for (int64_t j = 0; j < row.padded_columns; j += lanes) {
    const VF z = hn::LoadU(df, row.z + j);
    const auto mask = hn::Not(hn::Lt(z, least));
    if (!hn::AllFalse(df, mask)) count += append_elements(row, count, j, z, mask);
  }
  return count;
}

// One systematic draw over all columns of the row, lane by lane. Elements of q < threshold lie end to end in
// the order of lanes. One is kept where its stretch reaches the next multiple of the threshold past the
// offset.
// A lane only needs to know where its stretch begins, from the sums of the lanes before, so all lanes run
// side by side. Whatever rounding those sums have, every lane begins at a uniform point, so no probability
// depends on it.
int64_t draw_row(const DrawRow& row) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF lse_estimate = hn::Set(df, row.lse_estimate);
  const VF threshold = hn::Set(df, row.threshold);
  VF sum = hn::Zero(df);
  for (int64_t j = 0; j < row.padded_columns; j += lanes) {
    const VF q = exp_lanes(hn::Sub(hn::LoadU(df, row.z + j), lse_estimate));
    hn::StoreU(q, df, row.q + j);
    sum = hn::Add(sum, hn::IfThenElseZero(hn::Lt(q, threshold), q));
  }
  HWY_ALIGN float begin[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(sum, df, begin);
  float at = row.offset * row.threshold;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const float length = begin[lane];
    at -= row.threshold * std::floor(at / row.threshold);
    if (!(at < row.threshold)) at = 0;
    begin[lane] = at;
    at += length;
  }
  VF reached = hn::Load(df, begin);
  int64_t count = 0;
  for (int64_t j = 0; j < row.padded_columns; j += lanes) {
    const VF q = hn::LoadU(df, row.q + j);
    reached = hn::Add(reached, hn::IfThenElseZero(hn::Lt(q, threshold), q));
    const auto drawn = hn::Ge(reached, threshold);
    const auto kept = hn::Or(drawn, hn::Ge(q, threshold));
    if (hn::AllFalse(df, kept)) continue;
    reached = hn::Sub(reached, hn::IfThenElseZero(drawn, threshold));
    count += append_elements(row, count, j, hn::LoadU(df, row.z + j), kept);
  }
  return count;
}

// mix_upper_bits() and mix_bits(), on lanes.
HWY_INLINE VU mix_upper_lanes(VU h, uint32_t addend = 0) {
  const DU du;
  h = hn::Mul(hn::Xor(h, hn::ShiftRight<16>(h)), hn::Set(du, kFirstMix));
  h = hn::Add(h, hn::Set(du, addend));
  return hn::Mul(hn::Xor(h, hn::ShiftRight<15>(h)), hn::Set(du, kSecondMix));
}
HWY_INLINE VU mix_lanes(VU h) {
  h = mix_upper_lanes(h);
  return hn::Xor(h, hn::ShiftRight<16>(h));
}

// Multiplies the numbers of columns from j on by a factor, and adds a number.
HWY_INLINE VU counter_lanes(uint32_t j, uint32_t factor, uint32_t addend) {
  const DU du;
  return hn::Add(hn::Mul(hn::Iota(du, j), hn::Set(du, factor)), hn::Set(du, addend));
}

// Columns are candidates unless their group's share is beyond 1 + 16 exp(z - least), see core/sampling.h.
// Groups repeat after 8 columns, within 64.
int64_t sample_row(const SampleLogits& row) {
  const DF df;
  const DU du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF least = hn::Set(df, row.least), one = hn::Set(df, 1.0f);
  const VF columns = hn::Set(df, static_cast<float>(kSampleGroup));
  const bool repeats = lanes % 8 == 0 && row.first % lanes == 0;
  VF share = one;
  int64_t count = 0;
  for (int64_t j = 0; j < row.padded_columns; j += lanes) {
    const uint32_t first = row.first + static_cast<uint32_t>(j);
    if (j == 0 || !repeats || first % 64 == 0) {
      const VU column = hn::Iota(du, first);
      const VU group = hn::Or(hn::ShiftLeft<2>(hn::ShiftRight<6>(column)),
                              hn::And(hn::ShiftRight<1>(column), hn::Set(du, 3)));
      const VU counter =
          hn::Add(hn::Mul(group, hn::Set(du, kSampleStep)), hn::Set(du, row.key.high));  // of groups
      const VU high = mix_upper_lanes(counter, row.key.low);
      share = hn::BitCast(df, hn::Or(hn::ShiftRight<9>(high), hn::Set(du, 0x3f800000u)));
    }
    const VF z = hn::LoadU(df, row.z + j);
    const VF d = hn::Sub(z, least);
    const auto mask = hn::Or(hn::IsNaN(d), hn::Not(hn::Gt(share, hn::MulAdd(columns, exp_lanes(d), one))));
    if (!hn::AllFalse(df, mask)) count += append_elements(row, count, j, z, mask);
  }
  return count;
}

// draw_uniform() of draw_stream_bits(), on lanes.
HWY_INLINE VF uniform_lanes(const DrawRow& row, int64_t j) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  const VU h =
      hn::ShiftRight<9>(mix_lanes(counter_lanes(row.stream + static_cast<uint32_t>(j), 0x85ebca77u,
                                                row.row_bits + static_cast<uint32_t>(row.seed >> 32))));
  return hn::Mul(hn::Add(hn::ConvertTo(df, hn::BitCast(di, h)), hn::Set(df, 0.5f)), hn::Set(df, 0x1p-23f));
}

int64_t draw_each_row(const DrawRow& row) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF lse_estimate = hn::Set(df, row.lse_estimate);
  const VF threshold = hn::Set(df, row.threshold);
  int64_t count = 0;
  for (int64_t j = 0; j < row.padded_columns; j += lanes) {
    const VF z = hn::LoadU(df, row.z + j);
    const VF q = exp_lanes(hn::Sub(z, lse_estimate));
    const auto kept = hn::Or(hn::Ge(q, threshold), hn::Lt(hn::Mul(uniform_lanes(row, j), threshold), q));
    if (hn::AllFalse(df, kept)) continue;
    count += append_elements(row, count, j, z, kept);
  }
  return count;
}

// sums += rows[0..kRows) with their weights. The next group is fetched meanwhile, because rows lie anywhere.
template <DType kType, bool kRounds, int kRows>
HWY_INLINE void add_row_group(const AddRows& g, const SparseElement* rows, const SparseElement* next) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto bytes = static_cast<int64_t>(size_of(kType));
  const auto* data = static_cast<const uint8_t*>(g.matrix.data);
  const uint8_t* from[kRows];
  const uint8_t* ahead[kRows];
  VF weight[kRows];
  for (int r = 0; r < kRows; ++r) {
    from[r] = data + rows[r].index * g.matrix.stride * bytes;
    ahead[r] = data + next[r].index * g.matrix.stride * bytes;
    weight[r] = hn::Set(df, rows[r].value);
  }
  int64_t j = 0;
  for (; j + lanes <= g.columns; j += lanes) {
    VF sum = hn::LoadU(df, g.sums + j);
    for (int r = 0; r < kRows; ++r) {
      hwy::Prefetch(ahead[r] + j * bytes);
      VF row = load_lanes_of(from[r], kType, j);
      if constexpr (kRounds) row = rounded_lanes(row, g.matrix.round_to);
      sum = hn::MulAdd(weight[r], row, sum);
    }
    hn::StoreU(sum, df, g.sums + j);
  }
  for (; j < g.columns; ++j) {
    for (int r = 0; r < kRows; ++r) {
      const float element = load_scalar(from[r], kType, j);
      g.sums[j] += rows[r].value * (kRounds ? rounded_scalar(element, g.matrix.round_to) : element);
    }
  }
}

template <DType kType, bool kRounds>
void add_rows_of(const AddRows& g) {
  constexpr int kGroup = 4;  // rows for one load and store of the sums
  int64_t k = 0;
  for (; k + kGroup <= g.count; k += kGroup) {
    const SparseElement* rows = g.rows + k;
    add_row_group<kType, kRounds, kGroup>(g, rows, k + 2 * kGroup <= g.count ? rows + kGroup : rows);
  }
  for (; k < g.count; ++k) add_row_group<kType, kRounds, 1>(g, g.rows + k, g.rows + k);
}

template <DType kType>
void add_rows_of(const AddRows& g) {
  g.matrix.rounds() ? add_rows_of<kType, true>(g) : add_rows_of<kType, false>(g);
}

void add_rows(const AddRows& g) {
  if (g.matrix.dtype == DType::kF32) return add_rows_of<DType::kF32>(g);
  if (g.matrix.dtype == DType::kBF16) return add_rows_of<DType::kBF16>(g);
  add_rows_of<DType::kF16>(g);
}

// Loads lanes of the matrix, rounded where the matrix is.
HWY_INLINE VF operand_lanes(const MatrixView& m, int64_t j) {
  return rounded_lanes(load_lanes_of(m.data, m.dtype, j), m.rounds() ? m.round_to : DType::kF32);
}
inline float operand_scalar(const MatrixView& m, int64_t j) {
  return rounded_scalar(load_scalar(m.data, m.dtype, j), m.rounds() ? m.round_to : DType::kF32);
}

// lanes_of(matrix, j): lanes of its first row.
template <class LanesOf>
HWY_INLINE float dot_of(const MatrixView& a, const MatrixView& b, int64_t count, const LanesOf& lanes_of) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  VF even = hn::Zero(df), odd = even;  // two sums, so that an addition waits for the one before the last
  int64_t j = 0;
  for (; j + 2 * lanes <= count; j += 2 * lanes) {
    even = hn::MulAdd(lanes_of(a, j), lanes_of(b, j), even);
    odd = hn::MulAdd(lanes_of(a, j + lanes), lanes_of(b, j + lanes), odd);
  }
  if (j + lanes <= count) {
    even = hn::MulAdd(lanes_of(a, j), lanes_of(b, j), even);
    j += lanes;
  }
  float total = sum_of_lanes(hn::Add(even, odd));
  for (; j < count; ++j) total += operand_scalar(a, j) * operand_scalar(b, j);
  return total;
}

template <DType kType>
float dot_of_type(const MatrixView& a, const MatrixView& b, int64_t count) {
  return dot_of(a, b, count,
                [](const MatrixView& m, int64_t j) HWY_ATTR { return load_lanes_of(m.data, kType, j); });
}

float dot_rows(const MatrixView& a, const MatrixView& b, int64_t count) {
  if (a.dtype == b.dtype && !a.rounds() && !b.rounds()) {
    if (a.dtype == DType::kF32) return dot_of_type<DType::kF32>(a, b, count);
    if (a.dtype == DType::kBF16) return dot_of_type<DType::kBF16>(a, b, count);
    return dot_of_type<DType::kF16>(a, b, count);
  }
  return dot_of(a, b, count, [](const MatrixView& m, int64_t j) HWY_ATTR { return operand_lanes(m, j); });
}
