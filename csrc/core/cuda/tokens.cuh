// SPDX-License-Identifier: Apache-2.0
/// A lane's eight consecutive tokens: their values, and which of them are live.
#pragma once

#include "csrc/core/cuda/policy.h"
#include "csrc/core/cuda/sum.cuh"

namespace segscatter::core::cuda {

SEGSCATTER_DEVICE int lane_index() {
  return thread_index() & (kLanes - 1);
}
SEGSCATTER_DEVICE int warp_index() {
  return thread_index() >> 5;
}

/// Eight consecutive elements, loaded in pieces of 16 bytes or less.
template <class T>
struct Octet {
  static constexpr int kPieceElements = sizeof(T) * 8 > 16 ? 16 / static_cast<int>(sizeof(T)) : 8;
  struct alignas(sizeof(T) * kPieceElements) Piece {
    T element[kPieceElements];
  };
  Piece pieces[8 / kPieceElements];

  SEGSCATTER_DEVICE T operator[](int i) const { return pieces[i / kPieceElements].element[i % kPieceElements]; }
  SEGSCATTER_DEVICE T& operator[](int i) { return pieces[i / kPieceElements].element[i % kPieceElements]; }

  /// `from` has to be aligned to a piece.
  SEGSCATTER_DEVICE void load(const T* from) {
    SEGSCATTER_UNROLL
    for (int i = 0; i < 8 / kPieceElements; ++i) pieces[i] = reinterpret_cast<const Piece*>(from)[i];
  }
  /// Only the first `n` exist, the others become zero. Any alignment of T.
  SEGSCATTER_DEVICE void load(const T* from, int n) {
    SEGSCATTER_UNROLL
    for (int i = 0; i < 8; ++i) (*this)[i] = i < n ? from[i] : T{};
  }
  SEGSCATTER_DEVICE void store(T* to) const {
    SEGSCATTER_UNROLL
    for (int i = 0; i < 8 / kPieceElements; ++i) reinterpret_cast<Piece*>(to)[i] = pieces[i];
  }
  SEGSCATTER_DEVICE void store(T* to, int n) const {
    SEGSCATTER_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < n) to[i] = (*this)[i];
    }
  }
};

/// Bytes as two words, so that four are tested at once.
template <>
struct Octet<std::uint8_t> {
  struct alignas(8) Piece {
    std::uint32_t word[2];
  };
  Piece words;

  SEGSCATTER_DEVICE void load(const std::uint8_t* from) { words = *reinterpret_cast<const Piece*>(from); }
  SEGSCATTER_DEVICE void load(const std::uint8_t* from, int n) {
    words = {};
    SEGSCATTER_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < n) words.word[i / 4] |= static_cast<std::uint32_t>(from[i]) << (8 * (i % 4));
    }
  }
};

/// Which of the eight tokens are live: bit 7 of byte i % 4 of word i / 4.
struct LiveFlags {
  std::uint32_t word[2];

  SEGSCATTER_DEVICE bool any() const { return (word[0] | word[1]) != 0; }
  /// 128 per live token, plus `addend`. Counts stay in units of 128 (kCountUnit) until the end of a chunk.
  SEGSCATTER_DEVICE std::uint32_t count(std::uint32_t addend = 0) const {
    return add_bytes(word[1], add_bytes(word[0], addend));
  }
  /// 128 per live token among the first `i`, which is known when compiling.
  SEGSCATTER_DEVICE std::uint32_t count_before(int i) const {
    return i < 4 ? add_bytes(word[0] & ((1u << (8 * i)) - 1), 0)
                 : add_bytes(word[1] & ((1u << (8 * i - 32)) - 1), add_bytes(word[0], 0));
  }
  /// Leaves only the first `n`.
  SEGSCATTER_DEVICE void limit(int n) {
    word[0] &= first_bytes(n);
    word[1] &= first_bytes(n - 4);
  }

 private:
  static SEGSCATTER_DEVICE std::uint32_t first_bytes(int n) { return n <= 0 ? 0u : n < 4 ? (1u << (8 * n)) - 1 : ~0u; }
};
constexpr int kCountShift = 7;

/// What makes a token dead. Masks are compared as bit patterns of 1, 4 or 8 bytes.
struct MaskTest {
  std::uint64_t ignored = 0;     ///< the pattern; 1-byte masks: in each of four bytes
  std::uint32_t compared = ~0u;  ///< 4-byte masks: the bits that count (a float's sign does not where 0 is ignored)
};

SEGSCATTER_DEVICE std::uint32_t live_word(const Octet<std::uint8_t>& mask, int half, const MaskTest& test) {
  constexpr std::uint32_t kSigns = 0x80808080u;
  const std::uint32_t differ = mask.words.word[half] ^ static_cast<std::uint32_t>(test.ignored);
  return keep((((differ & ~kSigns) + ~kSigns) | differ) & kSigns);  // a byte's sign is set unless the byte is zero
}
SEGSCATTER_DEVICE std::uint32_t live_word(const Octet<std::uint32_t>& mask, int half, const MaskTest& test) {
  std::uint32_t word = 0;
  SEGSCATTER_UNROLL
  for (int i = 0; i < 4; ++i) {
    if ((mask[4 * half + i] & test.compared) != static_cast<std::uint32_t>(test.ignored)) word |= 0x80u << (8 * i);
  }
  return word;
}
SEGSCATTER_DEVICE std::uint32_t live_word(const Octet<std::uint64_t>& mask, int half, const MaskTest& test) {
  std::uint32_t word = 0;
  SEGSCATTER_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (mask[4 * half + i] != test.ignored) word |= 0x80u << (8 * i);
  }
  return word;
}

/// In place of a value type: the walk reads no values.
struct NoValue {};
template <>
struct Octet<NoValue> {
  SEGSCATTER_DEVICE void load(const NoValue*) {}
  SEGSCATTER_DEVICE void load(const NoValue*, int) {}
};

/// A lane's part of a row. Without a mask `mask` is all zeros, and MaskTest::ignored is chosen so that zero is live.
template <class Value, class MaskWord>
struct Tokens {
  Octet<Value> values;
  Octet<MaskWord> mask;

  SEGSCATTER_DEVICE void load(const Value* values_at, const MaskWord* mask_at, bool has_mask) {
    values.load(values_at);
    if (has_mask) mask.load(mask_at);
  }
  SEGSCATTER_DEVICE LiveFlags live(const MaskTest& test) const {
    return {live_word(mask, 0, test), live_word(mask, 1, test)};
  }
};

}  // namespace segscatter::core::cuda
