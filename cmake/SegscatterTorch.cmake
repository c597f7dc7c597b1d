# SPDX-License-Identifier: Apache-2.0
# The targets segscatter_libtorch and segscatter_libtorch_cuda: headers and libraries of the torch to build against; and
# SEGSCATTER_TORCH_VERSION, SEGSCATTER_TORCH_CUDA (the CUDA version of that torch, or empty).
#
# A LibTorch that CMAKE_PREFIX_PATH or Torch_DIR names is taken, unless Python_EXECUTABLE is given. Else a Python that
# imports torch is asked for that torch's paths. find_package(Torch) would find it too, but for a CUDA torch it insists on
# a CUDA Toolkit even where nothing of ours needs one.

set(SEGSCATTER_TORCH_MINIMUM 2.8)

if(NOT Python_EXECUTABLE)
  find_package(Torch QUIET)
  if(NOT Torch_FOUND)
    find_package(Python COMPONENTS Interpreter QUIET)
  endif()
endif()
set(ask_torch [[
import torch, torch.utils.cpp_extension as extension
facts = torch.__version__, torch.version.cuda or "", extension.TORCH_LIB_PATH, int(torch.compiled_with_cxx11_abi())
print(*facts, *extension.include_paths(), sep="\n")
]])
if(Python_EXECUTABLE AND NOT Torch_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${ask_torch}" OUTPUT_VARIABLE answer ERROR_VARIABLE error
                  RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()

add_library(segscatter_libtorch INTERFACE)
if(DEFINED failed AND NOT failed)
  string(REPLACE "\n" ";" answer "${answer}")
  list(POP_FRONT answer SEGSCATTER_TORCH_VERSION SEGSCATTER_TORCH_CUDA SEGSCATTER_TORCH_LIB_DIR cxx11_abi)
  target_include_directories(segscatter_libtorch SYSTEM INTERFACE ${answer})
  foreach(library torch torch_cpu c10)
    target_link_libraries(segscatter_libtorch INTERFACE ${SEGSCATTER_TORCH_LIB_DIR}/lib${library}.so)
  endforeach()
  target_compile_definitions(segscatter_libtorch INTERFACE _GLIBCXX_USE_CXX11_ABI=${cxx11_abi})
  add_library(segscatter_libtorch_cuda INTERFACE)
  target_link_libraries(segscatter_libtorch_cuda INTERFACE ${SEGSCATTER_TORCH_LIB_DIR}/libc10_cuda.so)
else()
  if(NOT Torch_FOUND)
    message(FATAL_ERROR
            "segscatter needs torch >= ${SEGSCATTER_TORCH_MINIMUM} to build its operators and found none. Either install "
            "it into the Python that builds (pip install torch), or name a LibTorch: "
            "-DCMAKE_PREFIX_PATH=<libtorch>, or build the torch-free core alone: -DSEGSCATTER_TORCH=OFF.\n${error}")
  endif()
  set(SEGSCATTER_TORCH_VERSION ${Torch_VERSION})
  set(SEGSCATTER_TORCH_CUDA ${CUDA_VERSION})
  target_link_libraries(segscatter_libtorch INTERFACE ${TORCH_LIBRARIES})
  add_library(segscatter_libtorch_cuda INTERFACE)  # TORCH_LIBRARIES has it all
endif()

if(SEGSCATTER_TORCH_VERSION VERSION_LESS ${SEGSCATTER_TORCH_MINIMUM})
  message(FATAL_ERROR "segscatter needs torch >= ${SEGSCATTER_TORCH_MINIMUM}, but found ${SEGSCATTER_TORCH_VERSION}. "
                      "Upgrade it: pip install 'torch>=${SEGSCATTER_TORCH_MINIMUM}'")
endif()

# The headers of torch 2.13 and newer are C++20.
if(SEGSCATTER_TORCH_VERSION VERSION_GREATER_EQUAL 2.13)
  set(SEGSCATTER_TORCH_CXX_STANDARD 20)
else()
  set(SEGSCATTER_TORCH_CXX_STANDARD 17)
endif()
target_compile_features(segscatter_libtorch INTERFACE cxx_std_${SEGSCATTER_TORCH_CXX_STANDARD})

# at::parallel_for is a template that needs OpenMP's code generation. The runtime must be torch's own, which libtorch_cpu
# brings along: linking another one would start a second pool of threads.
target_compile_options(segscatter_libtorch INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:-fopenmp>)
message(STATUS "segscatter: torch ${SEGSCATTER_TORCH_VERSION}, C++${SEGSCATTER_TORCH_CXX_STANDARD}")
