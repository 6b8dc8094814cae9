# LOGITLESS_PORTABLE: builds for other machines.
#
# The OpenMP runtime lies next to the library under its own name. A process that has already loaded one, as PyTorch does,
# goes on with that one: two would each have their own threads. The C++ runtime is linked statically and hidden. What newer
# C libraries have is replaced: glibc_2_28.c has functions, and scripts/older_glibc.py drops versions of symbols. Device code
# is compressed and has no line numbers.
if(NOT LOGITLESS_PORTABLE)
  return()
endif()
foreach(target logitless logitless_cli)
  if(TARGET ${target})
    target_sources(${target} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/glibc_2_28.c)
    target_link_options(${target} PRIVATE -static-libstdc++)
  endif()
endforeach()
set_property(TARGET logitless APPEND PROPERTY INSTALL_RPATH $ORIGIN)
if(TARGET logitless_cli)
  target_compile_definitions(logitless_cli PRIVATE LOGITLESS_PROGRAM)
endif()
if(OpenMP_CXX_FOUND)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libgomp.so.1 OUTPUT_VARIABLE runtime
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  file(REAL_PATH "${runtime}" runtime)
  if(NOT EXISTS "${runtime}")
    message(FATAL_ERROR "LOGITLESS_PORTABLE needs GCC's OpenMP runtime, libgomp.so.1, and ${CMAKE_CXX_COMPILER} has none")
  endif()
  install(FILES ${runtime} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libgomp.so.1 COMPONENT library)
endif()
