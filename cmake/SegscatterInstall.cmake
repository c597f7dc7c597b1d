# SPDX-License-Identifier: Apache-2.0
# One layout for `cmake --install` and for the wheel, whose package folder is the prefix.
include(CMakePackageConfigHelpers)

set(SEGSCATTER_PACKAGE_DIR share/cmake/segscatter)
set(installed_targets segscatter_core)
if(SEGSCATTER_TORCH)
  list(APPEND installed_targets segscatter_torch)
endif()

install(TARGETS ${installed_targets} EXPORT segscatter-targets ARCHIVE DESTINATION lib LIBRARY DESTINATION lib
                                                               RUNTIME DESTINATION bin)
install(DIRECTORY include/segscatter DESTINATION include FILES_MATCHING PATTERN "*.h")
install(EXPORT segscatter-targets NAMESPACE segscatter:: DESTINATION ${SEGSCATTER_PACKAGE_DIR})
configure_package_config_file(cmake/segscatter-config.cmake.in ${PROJECT_BINARY_DIR}/segscatter-config.cmake
                              INSTALL_DESTINATION ${SEGSCATTER_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/segscatter-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/segscatter-config.cmake ${PROJECT_BINARY_DIR}/segscatter-config-version.cmake
        DESTINATION ${SEGSCATTER_PACKAGE_DIR})

if(SEGSCATTER_PYTHON)
  configure_file(cmake/build.json.in ${PROJECT_BINARY_DIR}/_build.json @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/_build.json DESTINATION .)
endif()
