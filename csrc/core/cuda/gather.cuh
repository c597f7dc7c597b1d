// SPDX-License-Identifier: Apache-2.0
/// The adjoint: every live token of a group gets the group's number, every other token zero.
#pragma once

#include "csrc/core/cuda/reduce.cuh"

namespace segscatter::core::cuda {

constexpr int kGatherWarps = kGatherPolicy.warps();

struct GatherParams {
  WalkParams walk;
  const void* source = nullptr;  ///< [K, G]
  FloatType source_type = FloatType::kFloat32;
  FloatType out_type = FloatType::kFloat32;
  void* out = nullptr;  ///< [K, T]
  int num_rows = 1;
};

/// Element `i` of an array, converted to the bits of another type of sizeof(Bits) bytes. Both types are branches that
/// all threads take alike: this happens once per document, not per token.
template <class Bits>
SEGSCATTER_DEVICE Bits load_converted(const void* from, std::int64_t i, FloatType from_type, FloatType to_type) {
  float value;
  switch (from_type) {
    case FloatType::kFloat16:
      value = float_of_half(static_cast<const std::uint16_t*>(from)[i]);
      break;
    case FloatType::kBFloat16:
      value = float_of_bits(static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(from)[i]) << 16);
      break;
    case FloatType::kFloat32:
      value = static_cast<const float*>(from)[i];
      break;
    default: {
      const double wide = static_cast<const double*>(from)[i];
      if constexpr (sizeof(Bits) == 8) {
        return bits_of_double(wide);
      } else {
        value = static_cast<float>(wide);
      }
    }
  }
  if constexpr (sizeof(Bits) == 8) {
    return bits_of_double(static_cast<double>(value));
  } else if constexpr (sizeof(Bits) == 4) {
    return bits_of_float(value);
  } else {
    return to_type == FloatType::kFloat16 ? half_of_float(value) : bfloat16_of_float(value);
  }
}

/// A sink that writes tokens instead of reading them. Bits: uint16, uint32 or uint64, of the output type's size.
template <class Bits>
struct GatherOut {
  using Code = std::uint32_t;
  static constexpr Label kLabel = Label::kGroup;

  const GatherParams& p;
  Bits* out;  ///< the lane's tokens where the chunk begins
  Bits value = 0;
  int code = kNoLabel;  ///< of `value`
  std::int64_t source_row;

  SEGSCATTER_DEVICE Bits look_up(int group_code) const {
    return group_code < kFirstLabel
               ? Bits{0}
               : load_converted<Bits>(p.source, source_row + group_code - kFirstLabel, p.source_type, p.out_type);
  }

  SEGSCATTER_DEVICE void prepare() {}
  SEGSCATTER_DEVICE void begin(int new_code) {
    code = new_code;
    value = look_up(code);
  }
  SEGSCATTER_DEVICE void enter(int new_code) {
    if (new_code != code) begin(new_code);
  }

  SEGSCATTER_DEVICE void add(const Octet<NoValue>&, const LiveFlags& live, const Row& row) {
    Octet<Bits> bits;
    SEGSCATTER_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) bits[i] = is_live(live, i) ? value : Bits{0};
    store(bits, row);
  }

  SEGSCATTER_DEVICE void add_split(const Octet<NoValue>&, const LiveFlags& live, const Row& row, int, int lane_code,
                                   const RowStarts<Code>& starts) {
    Bits started[kLaneTokens];  // looked up ahead of use, so that the loads overlap
    SEGSCATTER_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) started[i] = look_up(starts[i]);
    enter(lane_code);
    Octet<Bits> bits;
    SEGSCATTER_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      if (starts[i]) {
        code = starts[i];
        value = started[i];
      }
      bits[i] = is_live(live, i) ? value : Bits{0};
    }
    store(bits, row);
  }

  SEGSCATTER_DEVICE void finish() {}

 private:
  static SEGSCATTER_DEVICE bool is_live(const LiveFlags& live, int i) {
    return live.word[i / 4] & (0x80u << (8 * (i % 4)));
  }
  SEGSCATTER_DEVICE void store(const Octet<Bits>& bits, const Row& row) const {
    if (row.vector) {
      bits.store(out + row.begin);
    } else {
      bits.store(out + row.begin, row.lane_tokens);
    }
  }
};

/// Grid: K * chunks.
template <class Bits, class MaskWord>
SEGSCATTER_KERNEL(kGatherPolicy.threads, kGatherPolicy.min_blocks)
gather(const SEGSCATTER_GRID_CONSTANT GatherParams p) {
  const RowAndChunk at = split_index(block_index(), p.num_rows);
  const std::int64_t chunk_begin = static_cast<std::int64_t>(at.chunk) * (kGatherWarps * p.walk.warp_tokens);
  Bits* row_out = static_cast<Bits*>(p.out) + at.row * p.walk.num_tokens;
  Bits* lane_out = row_out + chunk_begin + lane_index() * kLaneTokens;
  GatherOut<Bits> sink{p, lane_out, 0, kNoLabel, at.row * p.walk.segments.num_groups};
  walk_chunk<kGatherPolicy.threads, kGatherPolicy.rows_ahead, NoValue, MaskWord>(
      p.walk, reinterpret_cast<const NoValue*>(row_out), allows_vectors<Bits, MaskWord>(p.walk, row_out), at.chunk,
      sink);
}

}  // namespace segscatter::core::cuda
