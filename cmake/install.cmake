# Installs the library, its headers, and files for find_package(logitless) and pkg-config.
include(CMakePackageConfigHelpers)
install(TARGETS logitless EXPORT logitless_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY include/logitless DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(EXPORT logitless_targets NAMESPACE logitless:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/logitless
  COMPONENT development)
configure_package_config_file(cmake/logitless-config.cmake.in ${PROJECT_BINARY_DIR}/logitless-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/logitless)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/logitless-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/logitless-config.cmake ${PROJECT_BINARY_DIR}/logitless-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/logitless COMPONENT development)
# The prefix is relative to logitless.pc, so --prefix works and an installation may be moved.
file(RELATIVE_PATH LOGITLESS_PREFIX_FROM_PKGCONFIG /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" LOGITLESS_PREFIX_FROM_PKGCONFIG "${LOGITLESS_PREFIX_FROM_PKGCONFIG}")
configure_file(cmake/logitless.pc.in ${PROJECT_BINARY_DIR}/logitless.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/logitless.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
