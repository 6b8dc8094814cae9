#pragma once
// Stands in for CUDA's header of this name, for products of 16 x 16 elements of 16 bits. A lane has 8 sums of
// one row, and of the operands what these need.
#include "language.h"

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int, int, int, class T, class Layout = void>
struct fragment;
template <class T>
struct fragment<matrix_a, 16, 16, 16, T, row_major> {
  float x[16];  // of the lane's row
};
template <class T>
struct fragment<matrix_b, 16, 16, 16, T, col_major> {
  float x[16][8];  // of the lane's columns
};
template <>
struct fragment<accumulator, 16, 16, 16, float> {
  float x[8];
};

namespace on_cpu {
inline int row() {
  return cuda_on_cpu::lane_of_warp() / 2;
}
inline int first_column() {
  return cuda_on_cpu::lane_of_warp() % 2 * 8;
}
inline float number(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
inline float number(__half x) {
  return __half2float(x);
}
// Checks the requirements of a device for a matrix in memory.
template <class T>
void check(const T* matrix, unsigned stride) {
  if (reinterpret_cast<uintptr_t>(matrix) % 32 != 0) cuda_on_cpu::fail("a fragment is not at 32 bytes");
  if (stride * sizeof(T) % 16 != 0) cuda_on_cpu::fail("rows of a fragment are not 16 bytes apart");
}
}  // namespace on_cpu

inline void fill_fragment(fragment<accumulator, 16, 16, 16, float>& f, float value) {
  for (float& x : f.x) x = value;
}
template <class T>
void load_matrix_sync(fragment<matrix_a, 16, 16, 16, T, row_major>& f, const T* matrix, unsigned stride) {
  on_cpu::check(matrix, stride);
  for (int k = 0; k < 16; ++k) f.x[k] = on_cpu::number(matrix[on_cpu::row() * stride + k]);
}
template <class T>
void load_matrix_sync(fragment<matrix_b, 16, 16, 16, T, col_major>& f, const T* matrix, unsigned stride) {
  on_cpu::check(matrix, stride);
  const T* first = matrix + on_cpu::first_column() * stride;
  for (int k = 0; k < 16; ++k) {
    for (int j = 0; j < 8; ++j) f.x[k][j] = on_cpu::number(first[j * stride + k]);
  }
}
template <class T>
void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
              const fragment<matrix_a, 16, 16, 16, T, row_major>& a,
              const fragment<matrix_b, 16, 16, 16, T, col_major>& b,
              const fragment<accumulator, 16, 16, 16, float>& c) {
  d = c;
  for (int k = 0; k < 16; ++k) {
    for (int j = 0; j < 8; ++j) d.x[j] += a.x[k] * b.x[k][j];
  }
}
inline void store_matrix_sync(float* matrix, const fragment<accumulator, 16, 16, 16, float>& f,
                              unsigned stride, layout_t layout) {
  on_cpu::check(matrix, stride);
  if (layout != mem_row_major) cuda_on_cpu::fail("a fragment is stored by columns");
  for (int j = 0; j < 8; ++j) matrix[on_cpu::row() * stride + on_cpu::first_column() + j] = f.x[j];
}

}  // namespace nvcuda::wmma
