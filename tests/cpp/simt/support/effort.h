// SPDX-License-Identifier: Apache-2.0
/// How much the tests try. Sanitizers make everything slower, so their builds do less of the same.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace segscatter::testing {

#if defined(__SANITIZE_THREAD__)
constexpr int kDefaultEffort = 1;
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kDefaultEffort = 10;
#else
constexpr int kDefaultEffort = 100;
#endif

/// In percent of the full effort; the environment variable SEGSCATTER_SIMT_EFFORT overrides it.
inline int effort() {
  static const int percent = [] {
    const char* text = std::getenv("SEGSCATTER_SIMT_EFFORT");
    return text != nullptr ? std::atoi(text) : kDefaultEffort;
  }();
  return percent;
}

/// A share of `full` rounds, at least `least`.
inline int rounds(int full, int least = 1) {
  const int share = static_cast<int>(std::int64_t{full} * effort() / 100);
  return share > least ? share : least;
}

}  // namespace segscatter::testing
