# LOGITLESS_VERSION: the three numbers of logitless.h, which is the only place with the version.
set(header ${CMAKE_CURRENT_SOURCE_DIR}/include/logitless/logitless.h)
file(STRINGS ${header} numbers REGEX "^#define LOGITLESS_VERSION_")
string(REGEX REPLACE "[^;0-9]" "" numbers "${numbers}")
string(REPLACE ";" "." LOGITLESS_VERSION "${numbers}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
