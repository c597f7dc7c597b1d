// SPDX-License-Identifier: Apache-2.0
// The kernels with AVX-512 (F, BW, DQ, VL). Masked loads touch no byte outside their range.
#include "chunk_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace segscatter::core::detail {
namespace {

struct Avx512 {
  static std::uint32_t live(const std::uint8_t* mask, std::uint8_t ignore, std::uint32_t range) {
    const __mmask16 lanes = static_cast<__mmask16>(range);
    const __m128i bytes = _mm_maskz_loadu_epi8(lanes, mask);
    return _mm_mask_cmpneq_epi8_mask(lanes, bytes, _mm_set1_epi8(static_cast<char>(ignore)));
  }
  static std::uint32_t live(const std::int32_t* mask, std::int32_t ignore, std::uint32_t range) {
    const __mmask16 lanes = static_cast<__mmask16>(range);
    return _mm512_mask_cmpneq_epi32_mask(lanes, _mm512_maskz_loadu_epi32(lanes, mask), _mm512_set1_epi32(ignore));
  }
  static std::uint32_t live(const std::int64_t* mask, std::int64_t ignore, std::uint32_t range) {
    const __mmask8 low = static_cast<__mmask8>(range), high = static_cast<__mmask8>(range >> 8);
    const __m512i dead = _mm512_set1_epi64(ignore);
    const std::uint32_t first = _mm512_mask_cmpneq_epi64_mask(low, _mm512_maskz_loadu_epi64(low, mask), dead);
    const std::uint32_t second = _mm512_mask_cmpneq_epi64_mask(high, _mm512_maskz_loadu_epi64(high, mask + 8), dead);
    return first | second << 8;
  }
  static std::uint32_t live(const float* mask, float ignore, std::uint32_t range) {
    const __mmask16 lanes = static_cast<__mmask16>(range);
    return _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, mask), _mm512_set1_ps(ignore), _CMP_NEQ_UQ);
  }
  template <class M>
  static std::uint32_t live(const M* mask, M ignore) {
    return live(mask, ignore, 0xffff);
  }

  struct Values {
    __m512d low, high;
  };
  static Values widen(__m512 x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
  }
  static Values load(const double* p, __mmask16 live) {
    return {_mm512_maskz_loadu_pd(static_cast<__mmask8>(live), p),
            _mm512_maskz_loadu_pd(static_cast<__mmask8>(live >> 8), p + 8)};
  }
  static Values load(const float* p, __mmask16 live) { return widen(_mm512_maskz_loadu_ps(live, p)); }
  static Values load(const BFloat16* p, __mmask16 live) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live, p));
    return widen(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
  }
  static Values load(const Float16* p, __mmask16 live) {
    return widen(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(live, p)));
  }

  template <class V>
  struct Lanes {
    __m512d low, high;
    explicit Lanes(const double* from) : low(_mm512_loadu_pd(from)), high(_mm512_loadu_pd(from + 8)) {}
    void add(const V* values, std::uint32_t live) {
      const Values more = load(values, static_cast<__mmask16>(live));
      low = _mm512_add_pd(low, more.low);
      high = _mm512_add_pd(high, more.high);
    }
    void store(double* to) const {
      _mm512_storeu_pd(to, low);
      _mm512_storeu_pd(to + 8, high);
    }
  };

  template <class V>
  static void add(double* lanes, const V* values, std::uint32_t live) {
    Lanes<V> sums(lanes);
    sums.add(values, live);
    sums.store(lanes);
  }
};

}  // namespace

Kernels reduce_kernels_avx512(FloatType value, MaskType mask) { return reduce_kernels_of<Avx512>(value, mask); }
GatherChunk gather_kernel_avx512(FloatType out, MaskType mask) { return gather_kernel_of(out, mask); }

}  // namespace segscatter::core::detail

#else
namespace segscatter::core::detail {
Kernels reduce_kernels_avx512(FloatType, MaskType) { return {}; }
GatherChunk gather_kernel_avx512(FloatType, MaskType) { return nullptr; }
}  // namespace segscatter::core::detail
#endif
