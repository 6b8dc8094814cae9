// Divergences of rows of two heads; core/divergence.h has the arithmetic of one column in scalars.
// No include guard: kernels-inl.h includes this once per target.

// Columns that are logits at once. Sums of a block are added up in double.
inline constexpr int64_t kDivergenceBlock = 512;

// Logits of a block of a row, -inf past its end.
struct LogitBlock {
  HWY_ALIGN float z[kDivergenceBlock];
};

// Loads columns [first, first + count) of a row. Returns their number, rounded up to whole vectors.
HWY_INLINE int64_t load_logits(const HeadProducts& head, int64_t row, int64_t first, int64_t count,
                               LogitBlock* block) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const int64_t padded = (count + lanes - 1) / lanes * lanes;
  const float* dots = static_cast<const float*>(head.data) + row * head.stride + first;
  const float* bias = head.bias == nullptr ? nullptr : static_cast<const float*>(head.bias) + first;
  const VF scale = hn::Set(df, static_cast<float>(head.scale));
  const VF bias_scale = hn::Set(df, static_cast<float>(head.bias_scale));
  const auto softcap = static_cast<float>(head.softcap);
  const auto transform = [&](VF dot, VF b) {
    return transform_lanes(dot, scale, hn::Mul(b, bias_scale), softcap);
  };
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    const VF b = bias == nullptr ? hn::Zero(df) : hn::LoadU(df, bias + j);
    hn::Store(transform(hn::LoadU(df, dots + j), b), df, block->z + j);
  }
  if (j == count) return padded;
  HWY_ALIGN float dot[HWY_MAX_BYTES / sizeof(float)] = {};
  HWY_ALIGN float b[HWY_MAX_BYTES / sizeof(float)] = {};
  const auto rest = static_cast<size_t>(count - j);
  std::memcpy(dot, dots + j, rest * sizeof(float));
  if (bias != nullptr) std::memcpy(b, bias + j, rest * sizeof(float));
  hn::Store(transform(hn::Load(df, dot), hn::Load(df, b)), df, block->z + j);
  for (j = count; j < padded; ++j) block->z[j] = kNegativeInfinity;
  return padded;
}

template <class F>
HWY_INLINE void for_blocks(int64_t columns, F&& body) {
  for (int64_t first = 0; first < columns; first += kDivergenceBlock) {
    const int64_t left = columns - first;
    body(first, left < kDivergenceBlock ? left : kDivergenceBlock);
  }
}

struct LogSumAndEntropy {
  float lse = 0, entropy = 0;
};

HWY_INLINE LogSumAndEntropy log_sum_and_entropy(const HeadProducts& head, int64_t row, int64_t columns) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  LogitBlock block;
  VF largest = hn::Set(df, kNegativeInfinity);
  for_blocks(columns, [&](int64_t first, int64_t count) {
    const int64_t padded = load_logits(head, row, first, count, &block);
    for (int64_t j = 0; j < padded; j += lanes) largest = hn::Max(largest, hn::Load(df, block.z + j));
  });
  float max = max_of_lanes(largest);
  if (max == kNegativeInfinity) max = 0;  // of a part without a possible column
  double sum = 0, offsets = 0;
  for_blocks(columns, [&](int64_t first, int64_t count) {
    const int64_t padded = load_logits(head, row, first, count, &block);
    VF s = hn::Zero(df), o = hn::Zero(df);
    for (int64_t j = 0; j < padded; j += lanes) {
      const VF offset = clamp_exponent(hn::Sub(hn::Load(df, block.z + j), hn::Set(df, max)));
      const VF e = exp_clamped(offset);
      s = hn::Add(s, e);
      o = hn::MulAdd(e, offset, o);
    }
    sum += static_cast<double>(sum_of_lanes(s));
    offsets += static_cast<double>(sum_of_lanes(o));
  });
  const double log_sum = std::log(sum);
  return {static_cast<float>(max + log_sum), static_cast<float>(log_sum - offsets / sum)};
}

using DivergenceLanes = DivergenceColumn<VF>;

HWY_INLINE VF times_log_lanes(VF x, VF log_y) {
  return hn::IfThenZeroElse(hn::Eq(x, hn::Zero(DF())), hn::Mul(x, log_y));
}

// Computes divergence_column() on lanes.
HWY_INLINE DivergenceLanes divergence_lanes(const Mixture<float>& mixture, VF log_p, VF log_q) {
  const DF df;
  const VF zero = hn::Zero(df), none = hn::Set(df, kNegativeInfinity);
  DivergenceLanes out{zero, zero, zero, zero};
  const VF u = hn::IfThenZeroElse(hn::And(hn::Eq(log_p, none), hn::Eq(log_q, none)), hn::Sub(log_q, log_p));
  if (mixture.is_student()) {
    const VF q = exp_lanes(log_q);
    out.p = exp_lanes(log_p);
    out.teacher_term = hn::Add(times_log_lanes(q, u), hn::Sub(out.p, q));
    return out;
  }
  if (mixture.is_teacher()) {
    out.p = exp_lanes(log_p);
    out.log_ratio = hn::Neg(u);
    out.student_term = hn::Add(times_log_lanes(out.p, out.log_ratio), hn::Sub(exp_lanes(log_q), out.p));
    return out;
  }
  const VF beta = hn::Set(df, mixture.beta), rest = hn::Set(df, mixture.rest);
  const auto q_is_larger = hn::Ge(u, zero);
  const VF distance = hn::Abs(u), ratio = exp_lanes(hn::Neg(distance));
  const VF large = exp_lanes(hn::IfThenElse(q_is_larger, log_q, log_p)), small = hn::Mul(large, ratio);
  const VF large_part = hn::IfThenElse(q_is_larger, beta, rest);
  const VF small_part = hn::IfThenElse(q_is_larger, rest, beta);
  // log1p(less) as in divergence_column(): log(near), and the part that the rounding of 1 + less lost.
  const VF one = hn::Set(df, 1.0f), less = hn::Mul(small_part, hn::Sub(ratio, one)),
           near = hn::Add(one, less);
  const auto is_near = hn::Gt(ratio, hn::Set(df, 0.5f));
  const VF over_large = hn::IfThenElse(is_near, near, hn::MulAdd(small_part, ratio, large_part));
  const VF lost = hn::IfThenElseZero(is_near, hn::Sub(less, hn::Sub(near, one)));
  const VF log_large = hn::Neg(hn::Add(log_lanes(over_large), lost));
  const VF log_small = hn::Sub(log_large, distance);
  const VF large_term = times_log_lanes(large, log_large), small_term = times_log_lanes(small, log_small);
  const VF difference = hn::Sub(large, small);
  const VF q_minus_p = hn::IfThenElse(q_is_larger, difference, hn::Neg(difference));
  out.p = hn::IfThenElse(q_is_larger, small, large);
  out.log_ratio = hn::IfThenElse(q_is_larger, log_small, log_large);
  out.student_term = hn::MulAdd(beta, q_minus_p, hn::IfThenElse(q_is_larger, small_term, large_term));
  out.teacher_term = hn::NegMulAdd(rest, q_minus_p, hn::IfThenElse(q_is_larger, large_term, small_term));
  return out;
}

HWY_INLINE float& row_number(void* numbers, int64_t row) {
  return static_cast<float*>(numbers)[row];
}

void divergence_sums(const Divergence& d, int64_t row) {
  const LogSumAndEntropy student = log_sum_and_entropy(d.student, row, d.columns);
  row_number(d.student_lse, row) = student.lse;
  row_number(d.teacher_lse, row) = log_sum_and_entropy(d.teacher, row, d.columns).lse;
  if (d.entropy != nullptr) row_number(d.entropy, row) = student.entropy;
}

void divergence_terms(const Divergence& d, int64_t row) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const Mixture<float> mixture = mixture_of<float>(d.beta);
  const VF student_lse = hn::Set(df, row_number(d.student_lse, row));
  const VF teacher_lse = hn::Set(df, row_number(d.teacher_lse, row));
  LogitBlock zs, zt;
  double student_kl = 0, teacher_kl = 0;
  for_blocks(d.columns, [&](int64_t first, int64_t count) {
    const int64_t padded = load_logits(d.student, row, first, count, &zs);
    load_logits(d.teacher, row, first, count, &zt);
    VF s = hn::Zero(df), t = hn::Zero(df);
    for (int64_t j = 0; j < padded; j += lanes) {
      const DivergenceLanes column = divergence_lanes(mixture, hn::Sub(hn::Load(df, zs.z + j), student_lse),
                                                      hn::Sub(hn::Load(df, zt.z + j), teacher_lse));
      s = hn::Add(s, column.student_term);
      t = hn::Add(t, column.teacher_term);
    }
    student_kl += static_cast<double>(sum_of_lanes(s));
    teacher_kl += static_cast<double>(sum_of_lanes(t));
  });
  row_number(d.student_kl, row) = static_cast<float>(student_kl);
  const Mixture<double> wide = mixture_of<double>(d.beta);
  row_number(d.divergence, row) = static_cast<float>(divergence_of(wide, student_kl, teacher_kl));
}

// Writes G of a block of logits in place of the student's logits.
HWY_INLINE void gradient_block(const Divergence& d, int64_t row, int64_t padded, LogitBlock* zs,
                               const LogitBlock& zt) {
  const DF df;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  const Mixture<float> mixture = mixture_of<float>(d.beta);
  const VF student_lse = hn::Set(df, row_number(d.student_lse, row));
  const VF teacher_lse = hn::Set(df, row_number(d.teacher_lse, row));
  const VF student_kl = hn::Set(df, row_number(d.student_kl, row));
  const VF softcap = hn::Set(df, static_cast<float>(d.student.softcap));
  const VF part = hn::Set(df, mixture.is_teacher() ? 1.0f : mixture.rest);
  const VF factor =
      hn::Set(df, static_cast<const float*>(d.grad)[row] * static_cast<float>(d.student.bias_scale));
  for (int64_t j = 0; j < padded; j += lanes) {
    const VF z = hn::Load(df, zs->z + j), log_q = hn::Sub(hn::Load(df, zt.z + j), teacher_lse);
    const DivergenceLanes column = divergence_lanes(mixture, hn::Sub(z, student_lse), log_q);
    VF slope = mixture.is_student()
                   ? hn::Sub(column.p, exp_lanes(log_q))
                   : times_log_lanes(column.p, hn::Mul(part, hn::Sub(column.log_ratio, student_kl)));
    if (d.student.softcap != 0) slope = hn::Mul(slope, softcap_slope(z, softcap));
    hn::Store(hn::Mul(slope, factor), df, zs->z + j);
  }
}

void divergence_gradient(const Divergence& d, int64_t row) {
  auto* out = static_cast<char*>(d.d_logits);
  const auto size = static_cast<int64_t>(size_of(d.gradient_dtype));
  const bool is_zero = static_cast<const float*>(d.grad)[row] == 0;
  LogitBlock zs, zt;
  for_blocks(d.columns, [&](int64_t first, int64_t count) {
    char* to = out + (row * d.d_logits_stride + first) * size;
    if (is_zero) {
      std::memset(to, 0, static_cast<size_t>(count * size));
      return;
    }
    const int64_t padded = load_logits(d.student, row, first, count, &zs);
    load_logits(d.teacher, row, first, count, &zt);
    gradient_block(d, row, padded, &zs, zt);
    store_row(zs.z, count, 1, false, d.gradient_dtype, to);
  });
}
