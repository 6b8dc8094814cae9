#pragma once
// Marks functions on one row's numbers, which the host and device kernels share.
#ifdef __CUDACC__
#define LOGITLESS_HD __host__ __device__
#else
#define LOGITLESS_HD
#endif
