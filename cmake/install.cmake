# find_package(headroom) and pkg-config.
include(CMakePackageConfigHelpers)
install(TARGETS headroom EXPORT headroom_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY include/headroom DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(EXPORT headroom_targets NAMESPACE headroom:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/headroom
  COMPONENT development)
configure_package_config_file(cmake/headroom-config.cmake.in ${PROJECT_BINARY_DIR}/headroom-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/headroom)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/headroom-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/headroom-config.cmake ${PROJECT_BINARY_DIR}/headroom-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/headroom COMPONENT development)
# The prefix from where headroom.pc lies, so that --prefix works and an installation may be moved.
file(RELATIVE_PATH HEADROOM_PREFIX_FROM_PKGCONFIG /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" HEADROOM_PREFIX_FROM_PKGCONFIG "${HEADROOM_PREFIX_FROM_PKGCONFIG}")
configure_file(cmake/headroom.pc.in ${PROJECT_BINARY_DIR}/headroom.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/headroom.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
