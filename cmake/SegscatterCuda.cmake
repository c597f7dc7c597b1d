# SPDX-License-Identifier: Apache-2.0
# Decides whether CUDA kernels are built (SEGSCATTER_WITH_CUDA), with which nvcc and for which architectures
# (SEGSCATTER_CUDA_ARCHITECTURES, as people write them). Never asks for a GPU.

set(SEGSCATTER_WITH_CUDA OFF)
if(SEGSCATTER_CUDA STREQUAL "")
  set(SEGSCATTER_CUDA AUTO)
endif()
string(TOUPPER ${SEGSCATTER_CUDA} SEGSCATTER_CUDA)
if(NOT SEGSCATTER_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "SEGSCATTER_CUDA must be AUTO, ON or OFF, but is ${SEGSCATTER_CUDA}")
endif()
if(SEGSCATTER_CUDA STREQUAL "OFF")
  message(STATUS "segscatter: no CUDA kernels (SEGSCATTER_CUDA=OFF)")
  return()
endif()

if(SEGSCATTER_TORCH AND NOT SEGSCATTER_TORCH_CUDA)
  if(NOT SEGSCATTER_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "SEGSCATTER_CUDA=ON, but torch ${SEGSCATTER_TORCH_VERSION} is built without CUDA. Install a CUDA "
                        "build of torch, or set SEGSCATTER_CUDA=OFF.")
  endif()
  message(STATUS "segscatter: no CUDA kernels (torch ${SEGSCATTER_TORCH_VERSION} is built without CUDA)")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  find_program(SEGSCATTER_NVCC nvcc
               HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH ENV CUDAToolkit_ROOT ${CUDAToolkit_ROOT}
                     ${CUDA_TOOLKIT_ROOT_DIR} /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT SEGSCATTER_NVCC AND SEGSCATTER_CUDA STREQUAL "AUTO" AND NOT SEGSCATTER_TORCH)
    message(STATUS "segscatter: no CUDA kernels (no nvcc found)")
    return()
  endif()
  if(NOT SEGSCATTER_NVCC)
    message(FATAL_ERROR
            "segscatter: no nvcc was found to build CUDA kernels (torch: ${SEGSCATTER_TORCH_VERSION}, its CUDA: "
            "${SEGSCATTER_TORCH_CUDA}). CUDA runtime images have none; devel images do. Install that CUDA Toolkit and set "
            "CUDA_HOME, or build for the CPU only: SEGSCATTER_CUDA=OFF")
  endif()
  set(CMAKE_CUDA_COMPILER ${SEGSCATTER_NVCC})
endif()

# "7.5 8.6+PTX" becomes "75-real;86-real;86-virtual".
set(arch_list "$ENV{TORCH_CUDA_ARCH_LIST}")
if(DEFINED TORCH_CUDA_ARCH_LIST)
  set(arch_list "${TORCH_CUDA_ARCH_LIST}")
endif()
if(arch_list STREQUAL "")
  set(arch_list "7.5 8.0 8.6 8.9 9.0 10.0 12.0+PTX")
endif()
string(REGEX REPLACE "[ ,]+" ";" arch_list "${arch_list}")
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(arch IN LISTS arch_list)
  if(NOT arch MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST names '${arch}', which is no compute capability. Write them like "
                        "\"8.0 9.0+PTX\".")
  endif()
  if(CMAKE_MATCH_1 LESS 7 OR "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}" VERSION_LESS 7.5)
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST names ${arch}, but segscatter's kernels need compute capability 7.5 or newer")
  endif()
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real)
  if(CMAKE_MATCH_3)
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${CMAKE_MATCH_1}${CMAKE_MATCH_2}-virtual)
  endif()
endforeach()
list(JOIN arch_list " " SEGSCATTER_CUDA_ARCHITECTURES)

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # the one that torch has loaded
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(SEGSCATTER_CUDA_VERSION ${CMAKE_CUDA_COMPILER_VERSION})

if(SEGSCATTER_TORCH)
  string(REGEX MATCH "^[0-9]+" torch_major "${SEGSCATTER_TORCH_CUDA}")
  string(REGEX MATCH "^[0-9]+" nvcc_major "${CMAKE_CUDA_COMPILER_VERSION}")
  if(NOT torch_major EQUAL nvcc_major)
    message(FATAL_ERROR "nvcc is of CUDA ${CMAKE_CUDA_COMPILER_VERSION}, but torch ${SEGSCATTER_TORCH_VERSION} is built "
                        "for CUDA ${SEGSCATTER_TORCH_CUDA}; their major versions must agree. Set CUDA_HOME to a CUDA "
                        "${torch_major} Toolkit, or install another torch, or build for the CPU only: SEGSCATTER_CUDA=OFF")
  endif()
  if(NOT CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL SEGSCATTER_TORCH_CUDA)
    message(STATUS "segscatter: nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than torch's CUDA ${SEGSCATTER_TORCH_CUDA}, "
                   "which usually works")
  endif()
endif()

set(SEGSCATTER_WITH_CUDA ON)
message(STATUS "segscatter: CUDA ${CMAKE_CUDA_COMPILER_VERSION} kernels for ${SEGSCATTER_CUDA_ARCHITECTURES}")
