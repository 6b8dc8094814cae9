#include "cpu/simd/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <string>
#include <string_view>

#include "core/status.h"

namespace logitless::cpu {
namespace {

#if defined(__x86_64__)
// Reads cpuid, because not every compiler's __builtin_cpu_supports knows the name.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// Returns why this machine cannot run the kernels of that name, or an empty view. Runs call it, so it
// allocates nothing.
std::string_view why_machine_lacks(std::string_view name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  if (name == "avx2" && !avx2) return "the processor lacks AVX2, FMA or F16C";
  if (name == "avx512" && !avx512) return "the processor lacks AVX-512 F, VL, DQ or BW";
  if (name == "avx512_bf16" && !(avx512 && __builtin_cpu_supports("avx512bf16"))) {
    return "the processor lacks AVX-512 BF16";
  }
#else
  (void)name;
#endif
  return "";
}

// The bf16 dot product runs at twice the rate of fp32 FMA on AMD, at half of it on Intel.
bool bf16_dot_is_fast() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return ebx == signature_AMD_ebx && ecx == signature_AMD_ecx && edx == signature_AMD_edx;
#else
  return false;
#endif
}

// The dtype that the products round an operand to.
DType product_dtype(const Problem& problem, DType dtype) {
  return problem.rounds(dtype) ? problem.product_dtype() : dtype;
}

void set_reason(std::string* reason, std::string_view text) {
  if (reason != nullptr) *reason = text;
}

const Kernels* usable_bf16_pairs() {
  const Kernels* k = bf16_pair_kernels();
  return k != nullptr && why_machine_lacks(k->name).empty() ? k : nullptr;
}

// Names the engines that are compiled in, or only those that this machine runs.
std::string engines(bool usable) {
  std::string names;
  const auto add = [&](const Kernels& k) {
    if (!usable || why_machine_lacks(k.name).empty())
      names += (names.empty() ? "" : ", ") + std::string(k.name);
  };
  if (bf16_pair_kernels() != nullptr) add(*bf16_pair_kernels());
  for (const Kernels& k : fp32_kernels()) add(k);
  return names;
}

const Kernels& best_fp32(std::string* reason) {
  std::string_view lacking;  // why not the better ones
  for (const Kernels& k : fp32_kernels()) {
    const std::string_view why_not = why_machine_lacks(k.name);
    if (why_not.empty()) {
      set_reason(reason, lacking.empty() ? std::string_view("the best of this build") : lacking);
      return k;
    }
    lacking = why_not;
  }
  throw Error(Status::kBackendUnavailable,
              "this machine runs none of the instruction sets " + engines(false));
}

}  // namespace

std::string usable_engines() {
  return engines(true);
}

std::string why_engine_unavailable(const std::string& engine) {
  if (engine.empty()) return "";
  if (bf16_pair_kernels() != nullptr && engine == bf16_pair_kernels()->name)
    return std::string(why_machine_lacks(engine));
  for (const Kernels& k : fp32_kernels()) {
    if (engine == k.name) return std::string(why_machine_lacks(engine));
  }
  return "engine: expected one of " + engines(false) + ", got " + engine;
}

const Kernels& select_kernels(const Problem& problem, const std::string& engine, std::string* reason) {
  const std::string why = why_engine_unavailable(engine);
  if (!why.empty()) throw Error(Status::kBackendUnavailable, why);
  const bool bf16 = product_dtype(problem, problem.dtype.hidden) == DType::kBF16 &&
                    product_dtype(problem, problem.dtype.weight) == DType::kBF16;
  const Kernels* pairs = usable_bf16_pairs();
  if (pairs != nullptr && bf16 && (engine == pairs->name || (engine.empty() && bf16_dot_is_fast()))) {
    set_reason(reason, engine.empty() ? "bf16 operands, whose dot product is the faster here" : "requested");
    return *pairs;
  }
  for (const Kernels& k : fp32_kernels()) {
    if (engine != k.name) continue;
    set_reason(reason, "requested");
    return k;
  }
  const Kernels& best = best_fp32(reason);
  if (pairs != nullptr && !engine.empty()) {
    if (reason != nullptr) *reason = engine + " multiplies bf16 by bf16 only";
  } else if (pairs != nullptr && bf16) {
    set_reason(reason, "the bf16 dot product is no faster here");
  }
  return best;
}

}  // namespace logitless::cpu
