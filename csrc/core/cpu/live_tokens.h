// SPDX-License-Identifier: Apache-2.0
/// Which tokens of a chunk are live, one bit each: masks are read once, whatever the number of rows, and the loops over
/// values know nothing of mask types.
#pragma once

#include <cstdint>

namespace segscatter::core::detail {

/// Bit t % 16 of windows[t / 16] says whether token t of the chunk is live; bits behind the last token are 0. Windows
/// come in blocks of four, so that 64 bits can be written and read at once (compilers make one access of the four).
struct LiveTokens {
  static constexpr std::uint32_t kWindow = 16, kBlock = 64;  ///< tokens

  /// Windows that a chunk of `num_tokens` needs.
  static constexpr std::int64_t windows_for(std::int64_t num_tokens) {
    return (num_tokens + kBlock - 1) / kBlock * (kBlock / kWindow);
  }

  void set_block(std::uint32_t block, std::uint64_t bits) const {
    for (int i = 0; i < 4; ++i) windows[4 * block + i] = static_cast<std::uint16_t>(bits >> (16 * i));
  }
  std::uint64_t block(std::uint32_t block) const {
    const std::uint16_t* w = windows + 4 * block;
    return w[0] | std::uint64_t{w[1]} << 16 | std::uint64_t{w[2]} << 32 | std::uint64_t{w[3]} << 48;
  }
  bool operator[](std::uint32_t token) const { return windows[token / kWindow] >> token % kWindow & 1; }

  std::uint16_t* windows;  ///< [windows_for(chunk size)]
};

}  // namespace segscatter::core::detail
