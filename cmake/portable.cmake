# LOGITLESS_PORTABLE: builds for other machines.
#
# The OpenMP runtime lies next to the library under its own name. A process that has already loaded one, as PyTorch does,
# goes on with that one: two would each have their own threads. The C++ runtime is the machine's, as a static one would need
# a newer C library than everything else. Device code is compressed and has no line numbers.
if(NOT LOGITLESS_PORTABLE)
  return()
endif()
list(APPEND CMAKE_INSTALL_RPATH $ORIGIN)
if(OpenMP_CXX_FOUND)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libgomp.so.1 OUTPUT_VARIABLE runtime
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  file(REAL_PATH "${runtime}" runtime)
  if(NOT EXISTS "${runtime}")
    message(FATAL_ERROR "LOGITLESS_PORTABLE needs GCC's OpenMP runtime, libgomp.so.1, and ${CMAKE_CXX_COMPILER} has none")
  endif()
  install(FILES ${runtime} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libgomp.so.1 COMPONENT library)
endif()
