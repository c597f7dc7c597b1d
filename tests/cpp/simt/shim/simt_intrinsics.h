// SPDX-License-Identifier: Apache-2.0
/// The names of csrc/core/cuda/intrinsics.cuh (its comments are the contracts) on the SIMT shim, so that the kernels
/// compile as plain C++17. Included by that header where SEGSCATTER_SIMT is defined.
#pragma once

#include <cstdint>
#include <cstring>

#include "simt.h"

#define SEGSCATTER_DEVICE inline
#define SEGSCATTER_KERNEL(threads, blocks) void
#define SEGSCATTER_GRID_CONSTANT
#define SEGSCATTER_UNROLL

namespace segscatter::simt {

template <class T>
T shuffle_as(WarpOp op, T value, int source_lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "__shfl_sync takes 32 and 64 bits");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_collective(op, bits, source_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace segscatter::simt

namespace segscatter::core::cuda {

constexpr int kWarpSize = 32;

// ---- threads ----

inline int thread_index() {
  return static_cast<int>(simt::this_thread->thread);
}
inline int block_threads() {
  return static_cast<int>(simt::this_thread->block_threads);
}
inline unsigned block_index() {
  return simt::this_thread->block;
}
inline unsigned grid_blocks() {
  return simt::this_thread->grid_blocks;
}

inline unsigned char* shared_memory() {
  return static_cast<unsigned char*>(simt::shared_memory());
}

// ---- blocks ----

inline void block_barrier() {
  simt::block_barrier(simt::BlockBarrier::kSync, false);
}
inline bool block_any(bool condition) {
  return simt::block_barrier(simt::BlockBarrier::kAny, condition);
}

// ---- warps ----

inline void warp_barrier() {
  simt::warp_collective(simt::WarpOp::kBarrier, 0, 0);
}
inline std::uint32_t warp_ballot(bool condition) {
  return static_cast<std::uint32_t>(simt::warp_collective(simt::WarpOp::kBallot, condition, 0));
}
inline bool warp_any(bool condition) {
  return simt::warp_collective(simt::WarpOp::kAny, condition, 0) != 0;
}
inline std::uint32_t warp_match(std::uint32_t key) {
  return static_cast<std::uint32_t>(simt::warp_collective(simt::WarpOp::kMatch, key, 0));
}

template <class T>
T shuffle(T value, int lane) {
  return simt::shuffle_as(simt::WarpOp::kShuffle, value, lane & (kWarpSize - 1));
}
template <class T>
T shuffle_down(T value, int distance) {
  const int lane = thread_index() % kWarpSize;
  return simt::shuffle_as(simt::WarpOp::kShuffleDown, value, lane + distance < kWarpSize ? lane + distance : lane);
}
template <class T>
T shuffle_xor(T value, int mask) {
  return simt::shuffle_as(simt::WarpOp::kShuffleXor, value, (thread_index() ^ mask) & (kWarpSize - 1));
}

// ---- clusters ----

inline unsigned cluster_blocks() {
  return simt::cluster_blocks();
}
inline unsigned cluster_rank() {
  return simt::cluster_rank();
}
inline void cluster_arrive() {
  simt::cluster_arrive();
}
inline void cluster_wait() {
  simt::cluster_wait();
}
template <class T>
T* cluster_shared(T* shared, unsigned rank) {
  return static_cast<T*>(simt::map_shared_rank(shared, rank));
}

// ---- programmatic dependent launch ----

inline void allow_next_kernel() {
  simt::allow_next_launch();
}
inline void wait_for_previous_kernel() {
  simt::wait_for_previous_launch();
}

// ---- instructions ----

inline int count_ones(std::uint32_t x) {
  return __builtin_popcount(x);
}
inline int leading_zeros(std::uint32_t x) {
  return x != 0 ? __builtin_clz(x) : 32;
}
inline int lowest_one(std::uint32_t x) {
  return x != 0 ? __builtin_ctz(x) : -1;
}
inline std::uint32_t add_bytes(std::uint32_t x, std::uint32_t addend) {
  return addend + (x & 0xff) + (x >> 8 & 0xff) + (x >> 16 & 0xff) + (x >> 24);
}
inline std::uint32_t select_bits(std::uint32_t bits, std::uint32_t flags, int i) {
  return flags >> (8 * i + 7) & 1 ? bits : 0;
}
template <class T>
T keep(T x) {
  return x;
}

inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline std::uint64_t bits_of_double(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float float_of_half(std::uint16_t bits);
std::uint16_t half_of_float(float value);

template <class T>
T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T maximum(T a, T b) {
  return a < b ? b : a;
}

}  // namespace segscatter::core::cuda
