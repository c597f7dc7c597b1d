# SPDX-License-Identifier: Apache-2.0
# One layout for `cmake --install` and for the wheel, whose package folder is the prefix.

set(SEGSCATTER_PACKAGE_DIR share/cmake/segscatter)
set(installed_targets segscatter_core)
if(SEGSCATTER_TORCH)
  list(APPEND installed_targets segscatter_torch)
endif()

install(TARGETS ${installed_targets} EXPORT segscatter-targets ARCHIVE DESTINATION lib LIBRARY DESTINATION lib
                                                               RUNTIME DESTINATION bin)
install(DIRECTORY include/segscatter DESTINATION include FILES_MATCHING PATTERN "*.h")
install(EXPORT segscatter-targets NAMESPACE segscatter:: DESTINATION ${SEGSCATTER_PACKAGE_DIR})

if(SEGSCATTER_PYTHON)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/build.json.in ${PROJECT_BINARY_DIR}/_build.json @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/_build.json DESTINATION .)
endif()
