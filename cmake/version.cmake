# HEADROOM_VERSION: the three numbers of headroom.h, the one place where the version is written.
set(header ${CMAKE_CURRENT_SOURCE_DIR}/include/headroom/headroom.h)
file(STRINGS ${header} numbers REGEX "^#define HEADROOM_VERSION_")
string(REGEX REPLACE "[^;0-9]" "" numbers "${numbers}")
string(REPLACE ";" "." HEADROOM_VERSION "${numbers}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
