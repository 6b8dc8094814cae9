// Writes first inputs into two folders: small valid files of every kind that the readers take, and random
// bytes, long enough for all fields of a problem.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "io/tensor_files.h"

int main(int argc, char** argv) {
  using namespace logitless::cli;
  if (argc != 3) {
    std::fprintf(stderr, "usage: fuzz_seeds FILES PROBLEMS\n");
    return 2;
  }
  try {
    const std::filesystem::path folder(argv[1]);
    std::filesystem::create_directories(folder);
    const std::vector<float> numbers{1, 2, 3, 4, 5, 6};
    const auto bytes = std::as_bytes(std::span(numbers));
    const auto path = [&](const char* name) { return (folder / name).string(); };
    write_safetensors(path("empty.safetensors"), {});
    write_safetensors(path("one.safetensors"), {{"x", ElementType::kF32, {2, 3}, bytes}});
    write_safetensors(path("three.safetensors"),
                      {{"a", ElementType::kBF16, {12}, bytes},
                       {"b", ElementType::kI64, {3, 1}, bytes},
                       {"c", ElementType::kF4, {0, 7}, {}}},
                      {{"format", "pt"}});
    write_npy(path("matrix.npy"), {"", ElementType::kF32, {2, 3}, bytes});
    write_npy(path("scalar.npy"), {"", ElementType::kI64, {}, bytes.first(8)});

    const std::filesystem::path problems(argv[2]);
    std::filesystem::create_directories(problems);
    std::mt19937 random(1);
    for (int i = 0; i < 64; ++i) {
      std::string text(200, '\0');
      for (char& byte : text) byte = static_cast<char>(random());
      std::ofstream(problems / std::to_string(i), std::ios::binary) << text;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_seeds: %s\n", error.what());
    return 1;
  }
  return 0;
}
