# Decides whether the CPU's kernels are built (LOGITLESS_WITH_CPU). They need Highway's headers, which must be installed;
# LOGITLESS_HIGHWAY_INCLUDE_DIR is their folder. Nothing of Highway is linked.
set(LOGITLESS_WITH_CPU OFF)
if(NOT LOGITLESS_CPU STREQUAL OFF)
  find_path(LOGITLESS_HIGHWAY_INCLUDE_DIR hwy/highway.h DOC "Folder that holds hwy/highway.h")
  if(LOGITLESS_HIGHWAY_INCLUDE_DIR)
    set(LOGITLESS_WITH_CPU ON)
  else()
    set(missing "Highway's headers (hwy/highway.h), which the CPU's kernels are written with, are not installed. \
Install libhwy-dev (Debian, Ubuntu), highway-devel (Fedora) or highway (Homebrew, vcpkg, conan), \
or name their folder: -DLOGITLESS_HIGHWAY_INCLUDE_DIR=FOLDER; \
with pip: -C cmake.define.LOGITLESS_HIGHWAY_INCLUDE_DIR=FOLDER.")
    if(LOGITLESS_CPU STREQUAL AUTO)
      message(WARNING "${missing} Without them problems in host memory run on the reference backend alone, which is \
correct and slow.")
    else()
      message(FATAL_ERROR "${missing} LOGITLESS_CPU=OFF builds without them.")
    endif()
  endif()
endif()
message(STATUS "CPU backend: ${LOGITLESS_WITH_CPU}")
