// SPDX-License-Identifier: Apache-2.0
/// Everything that only a GPU has: threads, barriers, warp and cluster operations, a few instructions without a C++
/// spelling. The kernels use nothing else, so that this header is all that another target has to supply: with
/// SEGSCATTER_SIMT defined, "simt_intrinsics.h" of the host simulator supplies the same names and the kernels compile
/// as plain C++17. All warps have 32 lanes, and every warp operation is called by all 32 together.
#pragma once

#include <cstdint>

#if defined(SEGSCATTER_SIMT)
#include "simt_intrinsics.h"
#else

#include <cuda_runtime.h>

/// A function of the kernels. Always inlined: a call would spill the sums that live in registers.
#define SEGSCATTER_DEVICE __device__ __forceinline__
/// The head of a kernel: `SEGSCATTER_KERNEL(threads, min_blocks_per_multiprocessor) name(...)`.
#define SEGSCATTER_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
/// Marks a kernel's parameter struct as readable where it lies, without a copy of it in local memory.
#define SEGSCATTER_GRID_CONSTANT __grid_constant__
#define SEGSCATTER_UNROLL _Pragma("unroll")

namespace segscatter::core::cuda {

constexpr int kWarpSize = 32;

// ---- threads ----
// Blocks and grids are one-dimensional.

SEGSCATTER_DEVICE int thread_index() {
  return static_cast<int>(threadIdx.x);
}
SEGSCATTER_DEVICE int block_threads() {
  return static_cast<int>(blockDim.x);
}
SEGSCATTER_DEVICE unsigned block_index() {
  return blockIdx.x;
}
SEGSCATTER_DEVICE unsigned grid_blocks() {
  return gridDim.x;
}

/// The block's dynamic shared memory, aligned to 16 bytes; its contents are undefined when the kernel begins.
SEGSCATTER_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char segscatter_shared_memory[];
  return segscatter_shared_memory;
}

// ---- blocks ----

/// Waits for all threads of the block, and orders their accesses to memory.
SEGSCATTER_DEVICE void block_barrier() {
  __syncthreads();
}

/// block_barrier(), and whether `condition` held in any thread.
SEGSCATTER_DEVICE bool block_any(bool condition) {
  return __syncthreads_or(condition) != 0;
}

// ---- warps ----

/// Waits for all lanes of the warp, and orders their accesses to memory.
SEGSCATTER_DEVICE void warp_barrier() {
  __syncwarp();
}

/// Bit i tells whether `condition` holds in lane i.
SEGSCATTER_DEVICE std::uint32_t warp_ballot(bool condition) {
  return __ballot_sync(~0u, condition);
}

SEGSCATTER_DEVICE bool warp_any(bool condition) {
  return __any_sync(~0u, condition) != 0;
}

/// The lanes that have the same `key`.
SEGSCATTER_DEVICE std::uint32_t warp_match(std::uint32_t key) {
  return __match_any_sync(~0u, key);
}

/// The value of lane `lane` modulo 32. T: int32, uint32, int64, uint64, float, double.
template <class T>
SEGSCATTER_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(~0u, value, lane);
}

/// The value of the lane `distance` above; the last `distance` lanes get their own.
template <class T>
SEGSCATTER_DEVICE T shuffle_down(T value, int distance) {
  return __shfl_down_sync(~0u, value, distance);
}

/// The value of the lane whose number differs in the bits of `mask`.
template <class T>
SEGSCATTER_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(~0u, value, mask);
}

// ---- clusters ----
// A cluster is a group of blocks that run at the same time and reach each other's shared memory (sm_90 on). Elsewhere,
// and in a launch that asks for none, every block is a cluster of its own.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

SEGSCATTER_DEVICE unsigned cluster_blocks() {
  return __clusterSizeInBlocks();
}
SEGSCATTER_DEVICE unsigned cluster_rank() {
  return __clusterRelativeBlockRank();
}

/// The two halves of a barrier of all threads of the cluster; what was written before `arrive` is seen after `wait`.
SEGSCATTER_DEVICE void cluster_arrive() {
  __cluster_barrier_arrive();
}
SEGSCATTER_DEVICE void cluster_wait() {
  __cluster_barrier_wait();
}

/// Where `shared` lies in the shared memory of block `rank` of the cluster. That block must have begun and not ended.
template <class T>
SEGSCATTER_DEVICE T* cluster_shared(T* shared, unsigned rank) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, rank));
}

#else

SEGSCATTER_DEVICE unsigned cluster_blocks() {
  return 1;
}
SEGSCATTER_DEVICE unsigned cluster_rank() {
  return 0;
}
SEGSCATTER_DEVICE void cluster_arrive() {}
SEGSCATTER_DEVICE void cluster_wait() {
  __syncthreads();
}
template <class T>
SEGSCATTER_DEVICE T* cluster_shared(T* shared, unsigned) {
  return shared;
}

#endif

// ---- programmatic dependent launch ----
// A kernel launched with the attribute may start while the one before it in the stream still runs. No-ops before sm_90.

/// The next kernel may be brought onto the device from now on. Says nothing about memory: it waits for this one's end.
SEGSCATTER_DEVICE void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Waits for the end of the kernel before this one, whose writes are then visible.
SEGSCATTER_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// ---- instructions ----

SEGSCATTER_DEVICE int count_ones(std::uint32_t x) {
  return __popc(x);
}

/// 32 for 0.
SEGSCATTER_DEVICE int leading_zeros(std::uint32_t x) {
  return __clz(static_cast<int>(x));
}

/// The index of the lowest one; -1 for 0.
SEGSCATTER_DEVICE int lowest_one(std::uint32_t x) {
  return __ffs(static_cast<int>(x)) - 1;
}

/// The sum of the four bytes of `x`, plus `addend`.
SEGSCATTER_DEVICE std::uint32_t add_bytes(std::uint32_t x, std::uint32_t addend) {
  return __dp4a(x, 0x01010101u, addend);
}

/// `bits` where bit 7 of byte `i` of `flags` is set, else 0: two instructions. `i` is 0 to 3, known when compiling.
/// (A selector digit with bit 3 set copies a byte's sign over the whole byte; __byte_perm() would clear that bit.)
SEGSCATTER_DEVICE std::uint32_t select_bits(std::uint32_t bits, std::uint32_t flags, int i) {
  std::uint32_t mask;
  switch (i) {
    case 0:
      asm("prmt.b32 %0, %1, 0, 0x8888;" : "=r"(mask) : "r"(flags));
      break;
    case 1:
      asm("prmt.b32 %0, %1, 0, 0x9999;" : "=r"(mask) : "r"(flags));
      break;
    case 2:
      asm("prmt.b32 %0, %1, 0, 0xaaaa;" : "=r"(mask) : "r"(flags));
      break;
    default:
      asm("prmt.b32 %0, %1, 0, 0xbbbb;" : "=r"(mask) : "r"(flags));
  }
  return bits & mask;
}

/// `x`, but the compiler forgets where it came from and keeps it in a register instead of computing it again.
/// T: int32, uint32.
template <class T>
SEGSCATTER_DEVICE T keep(T x) {
  asm("" : "+r"(x));
  return x;
}

SEGSCATTER_DEVICE float float_of_bits(std::uint32_t bits) {
  return __uint_as_float(bits);
}
SEGSCATTER_DEVICE std::uint32_t bits_of_float(float value) {
  return __float_as_uint(value);
}

SEGSCATTER_DEVICE std::uint64_t bits_of_double(double value) {
  return static_cast<std::uint64_t>(__double_as_longlong(value));
}

/// IEEE half precision and back, rounding to nearest even.
SEGSCATTER_DEVICE float float_of_half(std::uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
SEGSCATTER_DEVICE std::uint16_t half_of_float(float value) {
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

/// Single instructions for 32-bit integers.
template <class T>
SEGSCATTER_DEVICE T minimum(T a, T b) {
  return min(a, b);
}
template <class T>
SEGSCATTER_DEVICE T maximum(T a, T b) {
  return max(a, b);
}

}  // namespace segscatter::core::cuda

#endif  // SEGSCATTER_SIMT
