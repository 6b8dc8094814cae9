// Kernels of the largest logits. No include guard: kernels-inl.h includes this once per target.

int64_t select_row(const SelectRow& row) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const VF least = hn::Set(df, row.least);
  int64_t count = 0;
  for (int64_t j = 0; j < row.padded_columns; j += lanes) {
    const VF z = hn::LoadU(df, row.z + j);
    const auto found = hn::Not(hn::Lt(z, least));
    if (hn::AllFalse(df, found)) continue;
    const auto columns = hn::Iota(di, static_cast<int32_t>(j));
    hn::CompressStore(columns, hn::RebindMask(di, found), di, row.columns + count);
    count += static_cast<int64_t>(hn::CompressStore(z, found, df, row.logits + count));
  }
  return count;
}
