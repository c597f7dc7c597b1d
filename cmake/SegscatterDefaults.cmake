# SPDX-License-Identifier: Apache-2.0
# What every target of the project is built with.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(SEGSCATTER_CCACHE ccache)
if(SEGSCATTER_CCACHE)
  foreach(language CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${SEGSCATTER_CCACHE})
    endif()
  endforeach()
endif()

# Warnings, exact float64 arithmetic (a fused multiply-add would make bits depend on the compiler), sanitizers.
add_library(segscatter_options INTERFACE)
target_compile_options(
  segscatter_options
  INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Wall -Wextra -ffp-contract=off>
            $<$<AND:$<BOOL:${SEGSCATTER_WERROR}>,$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>>:-Werror>
            $<$<COMPILE_LANG_AND_ID:CXX,MSVC>:/W3 /fp:strict /Zc:preprocessor>)
if(SEGSCATTER_SANITIZE)
  target_compile_options(
    segscatter_options
    INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SEGSCATTER_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  target_link_options(segscatter_options INTERFACE -fsanitize=${SEGSCATTER_SANITIZE})
endif()
