# Builds planner.js: `logitless plan` as one JavaScript file that contains WebAssembly, for the planner page
# (scripts/planner). CLI11 and nlohmann_json only have headers. These may lie next to this machine's C library's, which the
# compiler must not see, so a separate folder has links to them.
foreach(header CLI nlohmann)
  find_path(LOGITLESS_${header}_INCLUDE_DIR ${header} PATHS /usr/include /usr/local/include REQUIRED NO_CMAKE_FIND_ROOT_PATH)
  file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/include)
  file(CREATE_LINK ${LOGITLESS_${header}_INCLUDE_DIR}/${header} ${CMAKE_CURRENT_BINARY_DIR}/include/${header} SYMBOLIC)
endforeach()

add_executable(planner
  application.cpp planner.cpp
commands/options.cpp commands/plan.cpp commands/plan_model.cpp
  commands/plan_text.cpp io/files.cpp io/json.cpp io/model_config.cpp io/tensor.cpp support/format.cpp)
target_include_directories(planner PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
target_include_directories(planner SYSTEM PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/include)
target_link_libraries(planner PRIVATE logitless_internal logitless_options)
target_link_options(planner PRIVATE
  -sSINGLE_FILE -sMODULARIZE -sEXPORT_NAME=createLogitlessPlanner -sENVIRONMENT=web,node
  -sALLOW_MEMORY_GROWTH -sEXPORTED_FUNCTIONS=_logitless_planner -sEXPORTED_RUNTIME_METHODS=ccall)
