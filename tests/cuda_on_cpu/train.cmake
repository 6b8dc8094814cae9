# The demonstration's CUDA code on the CPU, as the library's: included by examples/train. cuBLASLt is left out.
set(here ${PROJECT_SOURCE_DIR}/tests/cuda_on_cpu)
find_package(Boost REQUIRED COMPONENTS context)
list(FILTER cuda_sources EXCLUDE REGEX "cuda/(cublaslt|products)\\.cpp")
target_sources(logitless_train PRIVATE ${cuda_sources} ${cuda_kernels} ${here}/train_products.cpp ${here}/grid.cpp
  ${here}/launches.cpp)
set_source_files_properties(${cuda_kernels} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++;-w;-include;language.h")
set_source_files_properties(${cuda_sources} ${cuda_kernels} ${here}/train_products.cpp ${here}/grid.cpp ${here}/launches.cpp
  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_include_directories(logitless_train BEFORE PRIVATE ${here}/include)
target_link_libraries(logitless_train PRIVATE logitless_cuda_runtime Boost::context)
