// Packing of panel operands. No include guard: kernels-inl.h includes this once per target.

inline constexpr int64_t kPair = static_cast<int64_t>(sizeof(uint32_t) / sizeof(Element));
inline constexpr int64_t kPackChunk = 128;  // units of K packed at a time: a 16 KiB stretch of the panel

// Returns units [first, first + count) of row `row`: from memory when it holds elements already, else through
// `buffer`. A row past the end, and the odd last element of a pair, are zeros.
HWY_INLINE const Element* row_chunk(const MatrixView& source, int64_t row, int64_t rows, int64_t depth,
                                    int64_t first, int64_t count, Element* buffer) {
  const int64_t begin = first * kPair;
  const int64_t wanted = count * kPair;
  const int64_t present = row < rows ? HWY_MIN(wanted, depth - begin) : 0;
  const bool direct = source.dtype == (kPair == 2 ? DType::kBF16 : DType::kF32) && !source.rounds();
  const auto* data =
      static_cast<const uint8_t*>(source.data) +
      (row < rows ? (row * source.stride + begin) * static_cast<int64_t>(size_of(source.dtype)) : 0);
  if (direct && present == wanted) return reinterpret_cast<const Element*>(data);
  if (present > 0) convert_elements(data, source.dtype, source.round_to, present, buffer);
  std::memset(buffer + present, 0, static_cast<size_t>(wanted - present) * sizeof(Element));
  return buffer;
}

#if HWY_TARGET == HWY_SCALAR
inline constexpr int kPackRows = 2;
#else
inline constexpr int kPackRows = 4;
#endif

// Prefetches `count` elements of a row from `column` on, as far as they exist. Packing reads short stretches
// of many rows, each on a page of its own, where hardware prefetchers see nothing coming.
HWY_INLINE void prefetch_row(const MatrixView& source, int64_t row, int64_t rows, int64_t column,
                             int64_t count, int64_t columns) {
  if (row >= rows || column >= columns) return;
  const auto bytes = static_cast<int64_t>(size_of(source.dtype));
  const auto* data = static_cast<const uint8_t*>(source.data) + (row * source.stride + column) * bytes;
  const int64_t wanted = HWY_MIN(count, columns - column) * bytes;
  for (int64_t i = 0; i < wanted; i += 64) hwy::Prefetch(data + i);
}

// Transposes kPackRows rows of units, 4 x 4 at a time; column k goes to out + k * nr.
HWY_INLINE void transpose_rows(const Element* const rows[kPackRows], int64_t count, int64_t nr,
                               uint32_t* HWY_RESTRICT out) {
  int64_t k = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Full128<uint32_t> d;
  const hn::Full128<uint64_t> d64;
  const auto load = [](const Element* p, int64_t k) HWY_ATTR {
    return hn::BitCast(hn::Full128<uint32_t>(),
                       hn::LoadU(hn::Full128<uint8_t>(), reinterpret_cast<const uint8_t*>(p + k * kPair)));
  };
  for (; k + 4 <= count; k += 4) {
    const auto r0 = load(rows[0], k);
    const auto r1 = load(rows[1], k);
    const auto r2 = load(rows[2], k);
    const auto r3 = load(rows[3], k);
    const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
    const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
    const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
    const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
    hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), d, out + k * nr);
    hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), d, out + (k + 1) * nr);
    hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), d, out + (k + 2) * nr);
    hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), d, out + (k + 3) * nr);
  }
#endif
  for (; k < count; ++k) {
    for (int i = 0; i < kPackRows; ++i) std::memcpy(out + k * nr + i, rows[i] + k * kPair, sizeof(uint32_t));
  }
}

void pack_transposed(const MatrixView& source, int64_t rows, int64_t depth, int64_t panels, uint32_t* out) {
  const auto nr = static_cast<int64_t>(2 * hn::Lanes(DF()));
  const int64_t units = (depth + kPair - 1) / kPair;
  HWY_ALIGN Element buffer[kPackRows][kPackChunk * kPair];
  for (int64_t p = 0; p < panels; ++p) {
    uint32_t* panel = out + p * units * nr;
    for (int64_t first = 0; first < units; first += kPackChunk) {
      const int64_t count = HWY_MIN(kPackChunk, units - first);
      for (int64_t r = 0; r < nr; r += kPackRows) {
        const Element* group[kPackRows];
        for (int i = 0; i < kPackRows; ++i) {
          const int64_t row = p * nr + r + i;
          group[i] = row_chunk(source, row, rows, depth, first, count, buffer[i]);
          const bool last = first + count >= units;  // then the next panel's first chunk comes
          prefetch_row(source, last ? row + nr : row, rows, last ? 0 : (first + count) * kPair,
                       kPackChunk * kPair, depth);
        }
        transpose_rows(group, count, nr, panel + first * nr + r);
      }
    }
  }
}

#if LOGITLESS_BF16_PAIRS
// Returns `count` elements of a row from `column` on, where they lie or converted into the buffer; null where
// there is no such row.
HWY_INLINE const uint16_t* elements_of_row(const MatrixView& source, int64_t row, int64_t rows,
                                           int64_t column, int64_t count, uint16_t* buffer) {
  if (row >= rows) return nullptr;
  const auto* data = static_cast<const uint8_t*>(source.data) +
                     (row * source.stride + column) * static_cast<int64_t>(size_of(source.dtype));
  if (source.dtype == DType::kBF16) return reinterpret_cast<const uint16_t*>(data);
  convert_elements(data, source.dtype, source.round_to, count, buffer);
  return buffer;
}
#endif

// Interleaves columns [column, column + width) of unit row `unit`: a whole number of vectors, at most two.
HWY_INLINE void interleave_units(const MatrixView& source, int64_t rows, int64_t columns, int64_t unit,
                                 int64_t column, int64_t width, uint32_t* HWY_RESTRICT out) {
  const int64_t present = HWY_MAX(int64_t{0}, HWY_MIN(width, columns - column));
#if LOGITLESS_BF16_PAIRS
  HWY_ALIGN uint16_t buffer[2][2 * HWY_MAX_BYTES / sizeof(float)];
  const uint16_t* first = elements_of_row(source, unit * 2, rows, column, present, buffer[0]);
  const uint16_t* second = elements_of_row(source, unit * 2 + 1, rows, column, present, buffer[1]);
  int64_t j = 0;
  if (second != nullptr) {
    for (; j + 16 <= present; j += 16) {
      const __m512i low =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + j)));
      const __m512i high =
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second + j)));
      _mm512_store_si512(out + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
  for (; j < width; ++j) {
    const uint32_t low = first != nullptr && j < present ? first[j] : 0;
    const uint32_t high = second != nullptr && j < present ? second[j] : 0;
    out[j] = low | (high << 16);
  }
#else
  const int64_t kept = unit < rows ? present : 0;
  const auto* data = static_cast<const uint8_t*>(source.data);
  auto* elements = reinterpret_cast<Element*>(out);
  if (kept > 0) {
    data += (unit * source.stride + column) * static_cast<int64_t>(size_of(source.dtype));
    convert_elements(data, source.dtype, source.round_to, kept, elements);
  }
  std::memset(elements + kept, 0, static_cast<size_t>(width - kept) * sizeof(Element));
#endif
}

void pack_interleaved(const MatrixView& source, int64_t rows, int64_t columns, int64_t units, int64_t panels,
                      int64_t width, uint32_t* out) {
  constexpr int64_t kPanelGroup = 8;  // panels written side by side: long enough reads of every row
  constexpr int64_t kAhead = 6;       // units: a few hundred cycles
  for (int64_t p0 = 0; p0 < panels; p0 += kPanelGroup) {
    const int64_t p1 = HWY_MIN(panels, p0 + kPanelGroup);
    for (int64_t unit = 0; unit < units; ++unit) {
      for (int64_t row = 0; row < kPair; ++row) {
        prefetch_row(source, (unit + kAhead) * kPair + row, rows, p0 * width, (p1 - p0) * width, columns);
      }
      for (int64_t p = p0; p < p1; ++p) {
        interleave_units(source, rows, columns, unit, p * width, width, out + (p * units + unit) * width);
      }
    }
  }
}
