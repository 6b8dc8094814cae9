/* Handlers of XLA's foreign functions, through which JAX runs plans. C ABI, beside logitless.h.
 *
 * logitless.jax registers them (jax.ffi.register_ffi_target) and makes their calls, whose attributes belong
 * to this version of the library: src/api/xla_ffi.cpp lists them. XLA's structs are declared in jaxlib's
 * header xla/ffi/api/c_api.h, which neither this header nor the library needs. */
#ifndef LOGITLESS_XLA_H_
#define LOGITLESS_XLA_H_

#include <logitless/logitless.h>

#ifdef __cplusplus
extern "C" {
#endif

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

/* Runs a plan on buffers in host memory, for the platform "cpu". */
LOGITLESS_API struct XLA_FFI_Error* logitless_xla_cpu(struct XLA_FFI_CallFrame* call_frame);
/* Queues a plan on XLA's stream, for the platform "CUDA". */
LOGITLESS_API struct XLA_FFI_Error* logitless_xla_cuda(struct XLA_FFI_CallFrame* call_frame);

#ifdef __cplusplus
}
#endif

#endif /* LOGITLESS_XLA_H_ */
