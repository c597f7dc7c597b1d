# SPDX-License-Identifier: Apache-2.0
# Decides whether CUDA kernels are built (SEGSCATTER_WITH_CUDA). Never asks for a GPU.
set(SEGSCATTER_WITH_CUDA OFF)
