# HEADROOM_HIGHWAY_INCLUDE_DIR: the folder of Highway's headers, which are installed before. Nothing of it is linked.
find_path(HEADROOM_HIGHWAY_INCLUDE_DIR hwy/highway.h DOC "Folder that holds hwy/highway.h")
if(NOT HEADROOM_HIGHWAY_INCLUDE_DIR)
  message(FATAL_ERROR "Highway's headers (hwy/highway.h), which the CPU's kernels are written with, are not installed. "
    "Install libhwy-dev (Debian, Ubuntu), highway-devel (Fedora) or highway (Homebrew, vcpkg, conan), "
    "or name their folder: -DHEADROOM_HIGHWAY_INCLUDE_DIR=FOLDER; "
    "with pip: -C cmake.define.HEADROOM_HIGHWAY_INCLUDE_DIR=FOLDER")
endif()
