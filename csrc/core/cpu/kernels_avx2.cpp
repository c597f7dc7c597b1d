// SPDX-License-Identifier: Apache-2.0
// The kernels with AVX2 and F16C.
#include "chunk_kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace segscatter::core::detail {
namespace {

__m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

struct Avx2 {
  static std::uint64_t live(const std::uint8_t* mask, std::uint8_t ignore) {
    std::uint64_t dead = 0;
    for (int i = 0; i < 2; ++i) {
      const __m256i equal = _mm256_cmpeq_epi8(load(mask + 32 * i), _mm256_set1_epi8(static_cast<char>(ignore)));
      dead |= static_cast<std::uint64_t>(static_cast<std::uint32_t>(_mm256_movemask_epi8(equal))) << (32 * i);
    }
    return ~dead;
  }
  static std::uint64_t live(const std::int32_t* mask, std::int32_t ignore) {
    std::uint64_t dead = 0;
    for (int i = 0; i < 8; ++i) {
      const __m256i equal = _mm256_cmpeq_epi32(load(mask + 8 * i), _mm256_set1_epi32(ignore));
      dead |= static_cast<std::uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal))) << (8 * i);
    }
    return ~dead;
  }
  static std::uint64_t live(const std::int64_t* mask, std::int64_t ignore) {
    std::uint64_t dead = 0;
    for (int i = 0; i < 16; ++i) {
      const __m256i equal = _mm256_cmpeq_epi64(load(mask + 4 * i), _mm256_set1_epi64x(ignore));
      dead |= static_cast<std::uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) << (4 * i);
    }
    return ~dead;
  }
  static std::uint64_t live(const float* mask, float ignore) {
    std::uint64_t live = 0;
    for (int i = 0; i < 8; ++i) {
      const __m256 differs = _mm256_cmp_ps(_mm256_loadu_ps(mask + 8 * i), _mm256_set1_ps(ignore), _CMP_NEQ_UQ);
      live |= static_cast<std::uint64_t>(_mm256_movemask_ps(differs)) << (8 * i);
    }
    return live;
  }

  static __m256d widen(const double* p) { return _mm256_loadu_pd(p); }
  static __m256d widen(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
  static __m256d widen(const BFloat16* p) {
    const __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(bits, 16)));
  }
  static __m256d widen(const Float16* p) {
    return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }

  template <class V>
  struct Lanes {
    __m256d sums[4];
    Lanes() {
      for (__m256d& s : sums) s = _mm256_setzero_pd();
    }
    explicit Lanes(const double* from) {
      for (int i = 0; i < 4; ++i) sums[i] = _mm256_loadu_pd(from + 4 * i);
    }
    void add(const V* values, std::uint32_t live) {
      const __m256i bits = _mm256_set1_epi64x(live);
      for (int i = 0; i < 4; ++i) {
        const __m256i bit = _mm256_slli_epi64(_mm256_set_epi64x(8, 4, 2, 1), 4 * i);
        const __m256i select = _mm256_cmpeq_epi64(_mm256_and_si256(bits, bit), bit);
        sums[i] = _mm256_add_pd(sums[i], _mm256_and_pd(widen(values + 4 * i), _mm256_castsi256_pd(select)));
      }
    }
    void store(double* to) const {
      for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, sums[i]);
    }
    double sum() const {
      const __m256d s4 = _mm256_add_pd(_mm256_add_pd(sums[0], sums[2]), _mm256_add_pd(sums[1], sums[3]));
      const __m128d s2 = _mm_add_pd(_mm256_castpd256_pd128(s4), _mm256_extractf128_pd(s4, 1));
      return _mm_cvtsd_f64(_mm_add_sd(s2, _mm_unpackhi_pd(s2, s2)));
    }
  };
};

}  // namespace

Kernels kernels_avx2(FloatType type, MaskType mask) {
  return kernels_of<Avx2>(type, mask);
}

}  // namespace segscatter::core::detail

#else
namespace segscatter::core::detail {
Kernels kernels_avx2(FloatType, MaskType) {
  return {};
}
}  // namespace segscatter::core::detail
#endif
