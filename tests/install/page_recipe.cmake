# Builds the program and the CMake lines of docs/c_and_cpp.md unchanged, with the compiler's default standard and one
# that is too old: by an installation, by FetchContent and by add_subdirectory. Compares its output with the page's.
cmake_minimum_required(VERSION 3.25)
file(READ ${ROOT}/docs/c_and_cpp.md page)

include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

# Reads the first block of a language with that beginning.
function(read_block language beginning variable)
  set(opening "```${language}\n")
  string(FIND "${page}" "${opening}${beginning}" first)
  if(first EQUAL -1)
    message(FATAL_ERROR "the page has no block of ${language} that begins with: ${beginning}")
  endif()
  string(LENGTH "${opening}" length)
  math(EXPR first "${first} + ${length}")
  string(SUBSTRING "${page}" ${first} -1 rest)
  string(FIND "${rest}" "```" end)
  string(SUBSTRING "${rest}" 0 ${end} rest)
  set(${variable} "${rest}" PARENT_SCOPE)
endfunction()

# Writes a folder with the program and the lines that build it, where `how` replaces find_package's line.
read_block(cpp "#include" program)
read_block(text "" shown)
read_block(cmake "cmake_minimum_required" lines)
set(found "find_package(logitless 0.1 REQUIRED)\n")
function(write_program folder how)
  string(REPLACE "${found}" "${how}" changed "${lines}")
  file(WRITE ${WORK}/${folder}/CMakeLists.txt "${changed}")
  file(WRITE ${WORK}/${folder}/program.cpp "${program}")
endfunction()
set(configure -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_C_COMPILER=${C})
function(build_and_run folder)
  run(${CMAKE_COMMAND} -S ${WORK}/${folder} -B ${WORK}/${folder}/build ${configure} ${ARGN})
  run(${CMAKE_COMMAND} --build ${WORK}/${folder}/build)
  run(${WORK}/${folder}/build/program)
  if(NOT output STREQUAL "${shown}")
    message(FATAL_ERROR "${folder}: the program printed\n${output}where the page shows\n${shown}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
foreach(component library development)
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix --component ${component})
endforeach()
write_program(installed "${found}")
build_and_run(installed -DCMAKE_PREFIX_PATH=${WORK}/prefix)
build_and_run(installed -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_STANDARD=17)

# The library alone is built: without kernels, which take a minute.
set(small -DCMAKE_BUILD_TYPE=Debug -DLOGITLESS_CPU=OFF -DLOGITLESS_CUDA=OFF -DCMAKE_UNITY_BUILD=ON)
read_block(cmake "include(FetchContent)" fetched)
write_program(fetched "${fetched}")
run(${CMAKE_COMMAND} -E chdir ${ROOT} ${CMAKE_COMMAND} -E tar czf ${WORK}/fetched/logitless.tar.gz
  CMakeLists.txt cmake include src)
build_and_run(fetched ${small})
read_block(cmake "add_subdirectory" subdirectory)
write_program(subdirectory "${subdirectory}")
file(CREATE_LINK ${ROOT} ${WORK}/subdirectory/logitless SYMBOLIC)
run(${CMAKE_COMMAND} -S ${WORK}/subdirectory -B ${WORK}/subdirectory/build ${configure} ${small})

# Without CMake, an older standard is an error that says so.
execute_process(COMMAND ${CXX} -std=c++17 -fsyntax-only -I${ROOT}/include ${WORK}/installed/program.cpp
  RESULT_VARIABLE result ERROR_VARIABLE output)
if(result EQUAL 0 OR NOT output MATCHES "logitless.hpp: expected C\\+\\+20 .*, got an older standard")
  message(FATAL_ERROR "C++17: ${result}\n${output}")
endif()
