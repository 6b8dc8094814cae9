#include "train/cuda/products.h"

#include <bit>
#include <stdexcept>
#include <utility>

#include "train/cuda/cublaslt.h"

namespace logitless::train::cuda {
namespace {

constexpr int64_t kScratchBytes = int64_t{32} << 20;  // for the sums of split products

void check_lt(int status, const char* what) {
  if (status != 0) {
    throw std::runtime_error(std::string("cuBLASLt: ") + what + ": status " + std::to_string(status));
  }
}

// What every row of a matrix is aligned to whose first is to 256 bytes.
uint32_t alignment_of(int64_t stride) {
  const uint64_t bytes = (static_cast<uint64_t>(stride) * sizeof(float)) | 256U;
  return 1U << std::countr_zero(bytes);
}

}  // namespace

// cuBLASLt's matrices are column by column: ours, row by row, are their transposes, and C = op(A) op(B) is
// C^T = op(B)^T op(A)^T there. So its first operand is our b.
class Products::Operation {
 public:
  Operation(void* handle, const ProductForm& p) {
    check_lt(lib_.desc_create(&desc_, lt::kComputeF32, lt::kRealF32), "MatmulDescCreate");
    const bool a_turned = p.a_op == Op::kTranspose, b_turned = p.b_op == Op::kTranspose;
    set_operation(lt::kTransA, b_turned);
    set_operation(lt::kTransB, a_turned);
    make_layout(first_, b_turned ? p.k : p.n, b_turned ? p.n : p.k, p.ldb);
    make_layout(second_, a_turned ? p.m : p.k, a_turned ? p.k : p.m, p.lda);
    make_layout(result_, p.n, p.m, p.ldc);
    find_algorithm(handle, p);
  }
  ~Operation() {
    for (void* layout : {first_, second_, result_}) {
      if (layout != nullptr) lib_.layout_destroy(layout);
    }
    if (desc_ != nullptr) lib_.desc_destroy(desc_);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void run(void* handle, const float* a, const float* b, float beta, float* c,
           const Memory<std::byte>& scratch, cudaStream_t stream) const {
    const float alpha = 1;
    check_lt(lib_.matmul(handle, desc_, &alpha, b, first_, a, second_, &beta, c, result_, c, result_,
                         &algorithm_, scratch.data(), static_cast<size_t>(scratch.bytes()), stream),
             "Matmul");
  }

 private:
  void set_operation(int attribute, bool turned) {
    const int32_t operation = turned ? lt::kOpT : lt::kOpN;
    check_lt(lib_.desc_set(desc_, attribute, &operation, sizeof operation), "MatmulDescSetAttribute");
  }

  void make_layout(void*& layout, int64_t rows, int64_t columns, int64_t stride) {
    check_lt(lib_.layout_create(&layout, lt::kRealF32, static_cast<uint64_t>(rows),
                                static_cast<uint64_t>(columns), stride),
             "MatrixLayoutCreate");
  }

  void find_algorithm(void* handle, const ProductForm& p) {
    void* preference = nullptr;
    check_lt(lib_.preference_create(&preference), "MatmulPreferenceCreate");
    int status = 0;
    const auto set = [&](int attribute, auto value) {
      if (status == 0) status = lib_.preference_set(preference, attribute, &value, sizeof value);
    };
    set(lt::kWorkspaceBytes, static_cast<uint64_t>(kScratchBytes));
    set(lt::kReductionSchemes, lt::kReduceInWorkspace);
    const uint32_t alignments[] = {alignment_of(p.ldb), alignment_of(p.lda), alignment_of(p.ldc),
                                   alignment_of(p.ldc)};
    for (size_t i = 0; i < 4; ++i) set(lt::kAlignments[i], alignments[i]);
    lt::Heuristic best{};
    int found = 0;
    if (status == 0) {
      status = lib_.heuristic(handle, desc_, first_, second_, result_, result_, preference, 1, &best, &found);
    }
    lib_.preference_destroy(preference);
    if (status != 0 || found == 0 || best.state != 0) {
      throw std::runtime_error("cuBLASLt: no algorithm for m " + std::to_string(p.m) + ", n " +
                               std::to_string(p.n) + ", k " + std::to_string(p.k) + ": status " +
                               std::to_string(status != 0 ? status : best.state));
    }
    algorithm_ = best.algorithm;
  }

  const CublasLt& lib_ = cublaslt();
  void* desc_ = nullptr;
  void* first_ = nullptr;
  void* second_ = nullptr;
  void* result_ = nullptr;
  lt::Algorithm algorithm_{};
};

Products::Products(cudaStream_t stream, HeldBytes& held) : stream_(stream) {
  if (const std::string why_not = why_no_products(); !why_not.empty()) {
    throw std::runtime_error("train: " + why_not);
  }
  scratch_ = Memory<std::byte>(held, kScratchBytes);
  check_lt(cublaslt().create(&handle_), "Create");
}

Products::~Products() {
  operations_.clear();
  if (handle_ != nullptr) cublaslt().destroy(handle_);
}

void Products::multiply(const ProductForm& form, const float* a, const float* b, float beta, float* c) {
  std::unique_ptr<Operation>& operation = operations_[form];
  if (operation == nullptr) operation = std::make_unique<Operation>(handle_, form);
  operation->run(handle_, a, b, beta, c, scratch_, stream_);
}

std::string why_no_products() {
  const std::string& why_not = cublaslt().why_not;
  if (why_not.empty()) return "";
  return "cuBLASLt, which multiplies the matrices, cannot be opened (its file may be named in "
         "LOGITLESS_CUBLASLT): " +
         why_not;
}

std::string products_library() {
  const size_t version = cublaslt().version();  // major * 10000 + minor * 100 + patch
  return "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace logitless::train::cuda
