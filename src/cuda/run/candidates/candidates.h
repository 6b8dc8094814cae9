#pragma once
// Kernels of logits at lists of columns, and of the lists that their gradients are gathered by. Every
// launcher only queues; pointers are on the device. No list is trusted: ids and offsets are compared before
// they lead anywhere.
#include <cstddef>
#include <cstdint>

#include "core/candidates.h"
#include "cuda/rows/gathers.h"

namespace logitless::cuda {

// Elements of a warp of the products, which are neighbours in the lists.
inline constexpr int kUnit = 32;
// Columns of elements without a product.
inline constexpr int32_t kNoElement = -1, kInvalidElement = -2;

// WrongLists counts what the kernels find wrong. All of it is 0 at first.
struct WrongLists {
  int32_t offsets;    // 1: they are not ascending from 0 to E
  int32_t ids;        // number of ids out of range
  int32_t from_last;  // E minus the first of these elements
};

// Slices of the hidden size that the products take one after the other, with partial sums of each.
struct ProductSlices {
  int lanes = 32;       // threads of a candidate's slice
  int64_t columns = 0;  // of a slice
  int64_t count = 0;    // of all slices
  int64_t at_once = 0;  // slices of a launch
};

// A warp adds up a row of a tile, some columns of dz, in shared memory.
inline constexpr int64_t kTileBytes = 8192;
inline constexpr int64_t kTileUnit = 16;     // a tile is a multiple of so many columns
inline constexpr int kTileWarps = 4;         // of a block; a window is a multiple of so many tiles
inline constexpr int64_t kMostTiles = 1024;  // of all columns
// Groups of rows whose shares of d_bias are summed one by one.
inline constexpr int64_t kBiasGroups = 64;

// Products with the whole weight instead of gathers, where lists are a large part of it.
struct WholeProducts {
  int64_t rows = 0;          // of hidden states, whose products with all columns exist at one time
  int64_t stride = 0;        // of these products
  int64_t tile = 0;          // columns of a tile
  int64_t tiles = 0;         // of all columns; 0: lists are gathered
  int64_t window_tiles = 0;  // of dz that exist at one time

  bool used() const { return tiles > 0; }
  int64_t window() const { return window_tiles * tile; }
};

template <class Real>
struct CandidatesArenaOf {
  WrongLists* wrong = nullptr;
  WholeProducts whole;
  void* gemm = nullptr;      // scratch of products
  void* products = nullptr;  // [whole.rows, V] of Real, or [N, whole.window()] dz of the operands' dtype
  Real* d_hidden = nullptr;  // [N, D] sum of the windows, if d_hidden is no such matrix itself
  // The first stage.
  ProductSlices slices;
  int32_t* column = nullptr;    // [E] or kNoElement, kInvalidElement
  int32_t* unit_row = nullptr;  // [E / kUnit, rounded up] the row of a unit's first element
  Real* partial = nullptr;      // [slices.at_once, E]
  // The second stage.
  KeptOf<Real>* kept = nullptr;           // [E] with s u, or with u in order of tiles
  int32_t* kept_count = nullptr;          // [N]
  int32_t* tile_start = nullptr;          // [N, whole.tiles + 1] where tiles begin in a row's list
  Real* bias_sums = nullptr;              // [kBiasGroups, V]
  KeptRowOf<Real>* by_element = nullptr;  // [E] with u
  int32_t* key = nullptr;                 // [2, E] the column, V for none; as they are and sorted
  int32_t* order = nullptr;               // [2, E] elements, as they are and sorted
  void* sort = nullptr;                   // scratch of the sort
  size_t sort_bytes = 0;
  KeptRowOf<Real>* sorted = nullptr;  // [E] with s u
  int32_t* start = nullptr;           // [V + 1]
  int32_t* heavy = nullptr;           // [1 + E / kHeavyColumn]
};

// ---- lists.cu
//
// Scratch for sorting E elements by column.
size_t sort_bytes(int64_t elements);
// Checks offsets into wrong->offsets.
void launch_check_offsets(const CandidateLists& lists, WrongLists* wrong, const Queue& queue);
// Makes columns and rows of units, and counts wrong ids.
void launch_columns(const CandidateLists& lists, int32_t* column, int32_t* unit_row, WrongLists* wrong,
                    const Queue& queue);
// Makes the list of each row: its columns with s u, without elements of u = 0.
template <class Real>
void launch_row_lists(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue);
// Makes the list of each row tile after tile: its columns with u, without elements of u = 0. Elements of a
// tile keep their order.
template <class Real>
void launch_tile_lists(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue);
// Makes the list of each column, in the order of elements, without those of u = 0; and d_bias if it is
// wanted.
template <class Real>
void launch_column_lists(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue);

// ---- logits.cu
//
// Makes the dot products of all elements, in slices of the hidden size.
template <class Real>
void launch_products(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue);
// Makes z of all elements from sums of slices, and invalid_ids if it is wanted.
template <class Real>
void launch_candidate_logits(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue);

// ---- dense.cu
//
// Picks the elements of rows out of their products with all columns.
template <class Real>
void launch_pick_products(const CandidateLists& lists, const int32_t* column, int64_t first_row, int64_t rows,
                          const ConstMatrix& products, Real* picked, const Queue& queue);
// Makes `tiles` tiles of dz = s u, [N, tiles * whole.tile], from the lists of tiles. Columns past V are 0.
template <class Real>
void launch_spread(const Candidates& c, const CandidatesArenaOf<Real>& arena, int64_t first_tile,
                   int64_t tiles, const Matrix& dz, const Queue& queue);
// Makes d_bias from the lists of tiles.
template <class Real>
void launch_whole_bias(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue);

}  // namespace logitless::cuda
