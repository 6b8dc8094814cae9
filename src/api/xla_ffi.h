#pragma once
// Our declarations of the part of XLA's FFI C API that xla_ffi.cpp uses. So a build needs no jaxlib, and a
// wheel's bits depend on none. XLA keeps these layouts within a major version and appends fields; struct_size
// tells which there are. tests/jax/test_ffi_layout.py compares each field with the header of the installed
// jaxlib.
#include <cstddef>
#include <cstdint>

struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

namespace logitless::xla {

constexpr int kMajorVersion = 0;
constexpr int kOldestMinorVersion = 3, kNewestMinorVersion = 4;  // of jaxlib 0.10 and 0.11

// Values of XLA's enums.
constexpr int kMetadataExtension = 1;
constexpr int kArrayAttribute = 1;
constexpr int kInt64 = 5;
constexpr int kExecuteStage = 3;
enum class Code : int {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13
};

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

struct Metadata {
  size_t struct_size;
  Version api_version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension extension_base;
  Metadata* metadata;
};

struct ErrorArgs {
  size_t struct_size;
  Extension* extension_start;
  const char* message;
  Code errc;
};

struct StreamArgs {
  size_t struct_size;
  Extension* extension_start;
  void* ctx;
  void* stream;
};

struct OrdinalArgs {
  size_t struct_size;
  Extension* extension_start;
  void* ctx;
  int32_t device_ordinal;
};

// XLA's functions. Those that are not used have no names.
struct Api {
  size_t struct_size;
  Extension* extension_start;
  Version api_version;
  const void* internal_api;
  XLA_FFI_Error* (*XLA_FFI_Error_Create)(ErrorArgs*);
  void* unused_1[3];
  XLA_FFI_Error* (*XLA_FFI_Stream_Get)(StreamArgs*);
  void* unused_2[12];
  XLA_FFI_Error* (*XLA_FFI_DeviceOrdinal_Get)(OrdinalArgs*);
};

struct Buffer {
  size_t struct_size;
  Extension* extension_start;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Args {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  Buffer** args;
};

struct Rets {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  Buffer** rets;
};

struct ByteSpan {
  const char* ptr;
  size_t len;
};

struct Array {
  int dtype;
  size_t size;
  void* data;
};

struct Attrs {
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int* types;
  ByteSpan** names;
  void** attrs;
};

struct CallFrame {
  size_t struct_size;
  Extension* extension_start;
  const Api* api;
  void* ctx;
  int stage;
  Args args;
  Rets rets;
  Attrs attrs;
};

}  // namespace logitless::xla
