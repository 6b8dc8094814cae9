#pragma once
// Functions on one row's numbers are shared by the host and by device kernels.
#ifdef __CUDACC__
#define LOGITLESS_HD __host__ __device__
#else
#define LOGITLESS_HD
#endif
