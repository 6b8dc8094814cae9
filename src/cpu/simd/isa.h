#pragma once
#include <span>
#include <string>

#include "core/problem.h"
#include "cpu/simd/kernels.h"

namespace logitless::cpu {

// Kernels compiled in, best first: avx512, avx2, neon, portable.
std::span<const Kernels> fp32_kernels();
// The bf16 dot product's, null where not compiled in.
const Kernels* bf16_pair_kernels();

// Names of the instruction sets that this machine can run, best first: "avx512_bf16, avx512, avx2, portable".
std::string usable_isas();

// Empty when `isa` (empty: the best) can run here, else why not.
std::string why_isa_unavailable(const std::string& isa);

// The kernels for the problem's types. `isa` empty picks the best: bf16 pairs for bf16 inputs where their dot
// product is faster than fp32 arithmetic. "avx512_bf16" means pairs for bf16 inputs and avx512 for all
// others. Tells why these in `reason` when it is not null.
const Kernels& select_kernels(const Problem& problem, const std::string& isa, std::string* reason = nullptr);

}  // namespace logitless::cpu
