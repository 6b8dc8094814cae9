# HEADROOM_HIGHWAY_INCLUDE_DIR: Highway's headers, the system's or else fetched. Nothing of it is linked.
find_path(HEADROOM_HIGHWAY_INCLUDE_DIR hwy/highway.h)
if(NOT HEADROOM_HIGHWAY_INCLUDE_DIR)
  message(STATUS "Highway's headers (libhwy-dev) are not installed: fetching them")
  include(FetchContent)
  FetchContent_Declare(highway GIT_REPOSITORY https://github.com/google/highway.git GIT_TAG 1.2.0 GIT_SHALLOW ON
    SOURCE_SUBDIR headers_only) # a folder without a CMakeLists.txt: the sources are fetched and not built
  FetchContent_MakeAvailable(highway)
  set(HEADROOM_HIGHWAY_INCLUDE_DIR ${highway_SOURCE_DIR} CACHE PATH "Highway's headers" FORCE)
endif()
