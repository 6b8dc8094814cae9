#include "cuda/runtime/gemm.h"

#include <library_types.h>

#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/status.h"
#include "cuda/plan/sizes.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {
namespace {

void check_lt(int status, const char* what) {
  if (status != 0)
    throw Error(Status::kInternal, std::string("cuBLASLt: ") + what + ": status " + std::to_string(status));
}

int type_of(DType dtype) {  // cudaDataType_t
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kF64:
      return CUDA_R_64F;
    default:
      throw Error(Status::kInternal, std::string("no matrix product in ") + dtype_name(dtype));
  }
}

int compute_of(const Gemm& g) {
  if (g.a.dtype == DType::kF64) return lt::kComputeF64;
  return g.allow_tf32 && g.a.dtype == DType::kF32 ? lt::kComputeF32FastTF32 : lt::kComputeF32;
}

// Returns the largest power of two up to 256 that divides the address of a matrix and the bytes of its rows.
uint32_t alignment_of(const ConstMatrix& m) {
  const uint64_t bits =
      reinterpret_cast<uint64_t>(m.data) | static_cast<uint64_t>(m.stride) * size_of(m.dtype) | 256u;
  return 1u << std::countr_zero(bits);
}

// Returns the part of an extent that is whole pieces of 16 bytes. If an operand's contiguous extent has a
// remainder, cuBLASLt takes kernels that are five times slower, whatever the stride. float64 is not affected.
int64_t whole_pieces(int64_t extent, DType dtype) {
  if (dtype == DType::kF64) return extent;
  const auto lanes = static_cast<int64_t>(16 / size_of(dtype));
  return extent / lanes * lanes;
}

// The properties of a product that its algorithm depends on: the key of remembered operations.
struct Form {
  int device;
  Gemm g;  // its pointers are null, except alpha if there is one
  uint32_t align_a, align_b, align_c;
  size_t scratch_bytes;

  auto operator<=>(const Form&) const = default;
};

Form form_of(const Gemm& g, int device, size_t scratch_bytes) {
  static const float any = 1;
  Form form{device, g, alignment_of(g.a), alignment_of(g.b), alignment_of(g.c), scratch_bytes};
  form.g.a.data = form.g.b.data = form.g.c.data = nullptr;
  form.g.alpha = g.alpha != nullptr ? &any : nullptr;
  form.g.zero_one = nullptr;
  return form;
}

// Rounds the number of A's rows in memory, which are tokens, up to the largest of its class. The search for
// an algorithm takes the host longer than a small product takes the device, so one search serves a class.
Form largest_form(Form form) {
  int64_t& rows = form.g.transpose_a ? form.g.k : form.g.m;
  rows = largest_of_class(rows);
  return form;
}

// cuBLASLt is column-major: row-major C = op(A) op(B) is C^T = op(B)^T op(A)^T there, so its A is our B.
class Operation {
 public:
  Operation(const CublasLt& functions, const Form& form) : f(functions) {
    const Gemm& g = form.g;
    const int type = type_of(g.a.dtype);
    check_lt(f.desc_create(&desc, compute_of(g), type == CUDA_R_64F ? type : CUDA_R_32F), "MatmulDescCreate");
    const int32_t trans_a = g.transpose_b ? lt::kOpT : lt::kOpN;
    const int32_t trans_b = g.transpose_a ? lt::kOpT : lt::kOpN;
    check_lt(f.desc_set(desc, lt::kTransA, &trans_a, sizeof trans_a), "MatmulDescSetAttribute");
    check_lt(f.desc_set(desc, lt::kTransB, &trans_b, sizeof trans_b), "MatmulDescSetAttribute");
    const int32_t mode = g.alpha != nullptr ? lt::kModeDevice : lt::kModeHost;
    check_lt(f.desc_set(desc, lt::kPointerMode, &mode, sizeof mode), "MatmulDescSetAttribute");
    const auto m = static_cast<uint64_t>(g.m), n = static_cast<uint64_t>(g.n), k = static_cast<uint64_t>(g.k);
    check_lt(f.layout_create(&a, type, g.transpose_b ? k : n, g.transpose_b ? n : k, g.b.stride),
             "LayoutCreate");
    check_lt(f.layout_create(&b, type, g.transpose_a ? m : k, g.transpose_a ? k : m, g.a.stride),
             "LayoutCreate");
    check_lt(f.layout_create(&c, type_of(g.c.dtype), n, m, g.c.stride), "LayoutCreate");
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    for (void* layout : {a, b, c}) {
      if (layout != nullptr) f.layout_destroy(layout);
    }
    if (desc != nullptr) f.desc_destroy(desc);
  }

  lt::Algorithm find_algorithm(CublasLt::Handle handle, const Form& form) const {
    void* preference = nullptr;
    check_lt(f.preference_create(&preference), "PreferenceCreate");
    const auto set = [&](int attribute, auto value) {
      check_lt(f.preference_set(preference, attribute, &value, sizeof value), "PreferenceSetAttribute");
    };
    set(lt::kWorkspaceBytes, form.scratch_bytes);
    set(lt::kReductionSchemes, uint32_t{lt::kReduceInWorkspace});
    set(lt::kAlignA, form.align_b);
    set(lt::kAlignB, form.align_a);
    set(lt::kAlignC, form.align_c);
    set(lt::kAlignD, form.align_c);
    lt::Heuristic best;
    int count = 0;
    const int status = f.heuristic(handle, desc, a, b, c, c, preference, 1, &best, &count);
    f.preference_destroy(preference);
    check_lt(status, "no algorithm for this product");
    if (count == 0) throw Error(Status::kInternal, "cuBLASLt: no algorithm for this product");
    return best.algorithm;
  }

  bool takes(CublasLt::Handle handle, const Form& form, const lt::Algorithm& other) const {
    lt::Heuristic result{};
    return f.check(handle, desc, a, b, c, c, &other, &result) == 0 && result.state == 0 &&
           result.workspace_bytes <= form.scratch_bytes;
  }

  const CublasLt& f;
  void* desc = nullptr;
  void* a = nullptr;
  void* b = nullptr;
  void* c = nullptr;
  lt::Algorithm algorithm{};
};

// Remembered handles, algorithms and operations. A cache that grows too large is cleared.
class Known {
 public:
  static Known& instance() {
    static Known* const kept = new Known;  // outlives the driver's own teardown
    return *kept;
  }

  CublasLt::Handle handle(const CublasLt& f, int device) {
    const std::lock_guard lock(mutex_);
    CublasLt::Handle& kept = handles_[device];
    if (kept == nullptr) check_lt(f.create(&kept), "Create");
    return kept;
  }

  std::shared_ptr<const Operation> operation(const CublasLt& f, CublasLt::Handle handle, const Form& form) {
    const std::lock_guard lock(mutex_);
    const auto at = operations_.find(form);
    if (at != operations_.end()) return at->second;
    auto made = std::make_shared<Operation>(f, form);
    const Form largest = largest_form(form);
    made->algorithm = algorithm(f, handle, largest);
    if (largest != form && !made->takes(handle, form, made->algorithm)) {
      made->algorithm = made->find_algorithm(handle, form);
    }
    if (operations_.size() >= kMost) operations_.clear();
    return operations_.emplace(form, std::move(made)).first->second;
  }

 private:
  static constexpr size_t kMost = 4096;

  const lt::Algorithm& algorithm(const CublasLt& f, CublasLt::Handle handle, const Form& form) {
    const auto at = algorithms_.find(form);
    if (at != algorithms_.end()) return at->second;
    if (algorithms_.size() >= kMost) algorithms_.clear();
    return algorithms_.emplace(form, Operation(f, form).find_algorithm(handle, form)).first->second;
  }

  std::mutex mutex_;
  std::map<int, CublasLt::Handle> handles_;  // by device, kept for the life of the process
  std::map<Form, lt::Algorithm> algorithms_;
  std::map<Form, std::shared_ptr<const Operation>> operations_;
};

void multiply(const Gemm& g, void* scratch, size_t scratch_bytes, cudaStream_t stream) {
  // cuBLASLt rejects scratch that is not aligned to 256 bytes.
  constexpr size_t kScratchAlignment = 256;
  if (scratch_bytes < 2 * kScratchAlignment) {
    scratch = nullptr;
    scratch_bytes = 0;
  } else {
    const uintptr_t address = reinterpret_cast<uintptr_t>(scratch);
    scratch =
        static_cast<char*>(scratch) + (kScratchAlignment - address % kScratchAlignment) % kScratchAlignment;
    scratch_bytes -= kScratchAlignment;
  }
  if (g.m == 0 || g.n == 0 || g.k == 0) throw Error(Status::kInternal, "matrix product without elements");
  std::string why_not;
  const CublasLt* f = cublaslt(&why_not);
  if (f == nullptr) throw Error(Status::kBackendUnavailable, why_not);
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  Known& known = Known::instance();
  const CublasLt::Handle handle = known.handle(*f, device);
  const std::shared_ptr<const Operation> op = known.operation(*f, handle, form_of(g, device, scratch_bytes));
  const float one = 1;
  const double wide_one = 1, wide_beta = g.beta;
  const void* alpha = g.alpha != nullptr ? g.alpha : &one;
  const void* beta = g.alpha != nullptr ? g.zero_one + (g.beta != 0 ? 1 : 0) : &g.beta;
  if (g.a.dtype == DType::kF64) {
    alpha = &wide_one;
    beta = &wide_beta;
  }
  check_lt(f->matmul(handle, op->desc, alpha, g.b.data, op->a, g.a.data, op->b, beta, g.c.data, op->c,
                     g.c.data, op->c, &op->algorithm, scratch, scratch_bytes, stream),
           "Matmul");
}

// Returns rows [first, first + rows) of a product with a transposed A.
Gemm rows_of(const Gemm& g, int64_t first, int64_t rows) {
  Gemm part = g;
  part.m = rows;
  part.a = g.a.from(0, first);
  part.c = g.c.from(first);
  return part;
}

// Returns terms [first, first + terms) of a product's sums.
Gemm terms_of(const Gemm& g, int64_t first, int64_t terms) {
  Gemm part = g;
  part.k = terms;
  part.a = g.a.from(0, first);
  part.b = g.transpose_b ? g.b.from(0, first) : g.b.from(first);
  return part;
}

void multiply_in_parts(const Gemm& g, void* scratch, size_t scratch_bytes, cudaStream_t stream) {
  // The extent of A that is contiguous in memory.
  const int64_t extent = g.transpose_a ? g.m : g.k;
  const int64_t whole = whole_pieces(extent, g.a.dtype);
  if (whole == extent || whole == 0) {
    multiply(g, scratch, scratch_bytes, stream);
  } else if (g.transpose_a) {
    multiply(rows_of(g, 0, whole), scratch, scratch_bytes, stream);
    multiply(rows_of(g, whole, extent - whole), scratch, scratch_bytes, stream);
  } else {
    // The few terms come first: the other product then reads their result again, and it reads least.
    multiply(terms_of(g, whole, extent - whole), scratch, scratch_bytes, stream);
    Gemm rest = terms_of(g, 0, whole);
    rest.beta = 1;
    multiply(rest, scratch, scratch_bytes, stream);
  }
}

}  // namespace

void gemm(const Gemm& g, void* scratch, size_t scratch_bytes, const Queue& queue) {
  queue.call([=](cudaStream_t stream) { multiply_in_parts(g, scratch, scratch_bytes, stream); });
}

}  // namespace logitless::cuda
