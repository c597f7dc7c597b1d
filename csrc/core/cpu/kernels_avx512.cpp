// SPDX-License-Identifier: Apache-2.0
// The kernels with AVX-512 (F, BW, DQ, VL).
#include "chunk_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace segscatter::core::detail {
namespace {

struct Avx512 {
  static std::uint64_t live(const std::uint8_t* mask, std::uint8_t ignore) {
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(mask), _mm512_set1_epi8(static_cast<char>(ignore)));
  }
  static std::uint64_t live(const std::int32_t* mask, std::int32_t ignore) {
    std::uint64_t bits = 0;
    for (int i = 0; i < 4; ++i) {
      const __mmask16 live = _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(mask + 16 * i), _mm512_set1_epi32(ignore));
      bits |= static_cast<std::uint64_t>(live) << (16 * i);
    }
    return bits;
  }
  static std::uint64_t live(const std::int64_t* mask, std::int64_t ignore) {
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) {
      const __mmask8 live = _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(mask + 8 * i), _mm512_set1_epi64(ignore));
      bits |= static_cast<std::uint64_t>(live) << (8 * i);
    }
    return bits;
  }
  static std::uint64_t live(const float* mask, float ignore) {
    std::uint64_t bits = 0;
    for (int i = 0; i < 4; ++i) {
      const __mmask16 live = _mm512_cmp_ps_mask(_mm512_loadu_ps(mask + 16 * i), _mm512_set1_ps(ignore), _CMP_NEQ_UQ);
      bits |= static_cast<std::uint64_t>(live) << (16 * i);
    }
    return bits;
  }

  // Eight live values as float64, zeros for dead ones.
  static __m512d load(const double* p, __mmask8 live) { return _mm512_maskz_loadu_pd(live, p); }
  static __m512d load(const float* p, __mmask8 live) { return _mm512_maskz_cvtps_pd(live, _mm256_loadu_ps(p)); }
  static __m512d load(const BFloat16* p, __mmask8 live) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_maskz_cvtps_pd(live, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
  }
  static __m512d load(const Float16* p, __mmask8 live) {
    return _mm512_maskz_cvtps_pd(live, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }

  template <class V>
  struct Lanes {
    __m512d low, high;
    Lanes() : low(_mm512_setzero_pd()), high(_mm512_setzero_pd()) {}
    explicit Lanes(const double* from) : low(_mm512_loadu_pd(from)), high(_mm512_loadu_pd(from + 8)) {}
    void add(const V* values, std::uint32_t live) {
      low = _mm512_add_pd(low, load(values, static_cast<__mmask8>(live)));
      high = _mm512_add_pd(high, load(values + 8, static_cast<__mmask8>(live >> 8)));
    }
    void store(double* to) const {
      _mm512_storeu_pd(to, low);
      _mm512_storeu_pd(to + 8, high);
    }
    double sum() const {
      const __m512d s8 = _mm512_add_pd(low, high);
      const __m256d s4 = _mm256_add_pd(_mm512_castpd512_pd256(s8), _mm512_extractf64x4_pd(s8, 1));
      const __m128d s2 = _mm_add_pd(_mm256_castpd256_pd128(s4), _mm256_extractf128_pd(s4, 1));
      return _mm_cvtsd_f64(_mm_add_sd(s2, _mm_unpackhi_pd(s2, s2)));
    }
  };
};

}  // namespace

Kernels kernels_avx512(FloatType type, MaskType mask) {
  return kernels_of<Avx512>(type, mask);
}

}  // namespace segscatter::core::detail

#else
namespace segscatter::core::detail {
Kernels kernels_avx512(FloatType, MaskType) {
  return {};
}
}  // namespace segscatter::core::detail
#endif
