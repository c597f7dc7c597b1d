// SPDX-License-Identifier: Apache-2.0
/// One call of the reduction or its adjoint, as numbers and bit patterns, and where such calls come from.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "segscatter/core.h"

namespace segscatter::testing {

using core::ContextParallelLayout;
using core::FloatType;
using core::IndexType;
using core::MaskType;

struct Problem {
  std::int64_t num_tokens = 0;
  std::int64_t num_rows = 1;
  std::int64_t num_groups = 1;

  FloatType value_type = FloatType::kFloat32;
  std::vector<std::uint64_t> values;  ///< bit patterns, [num_rows][num_tokens]
  std::int64_t row_padding = 0;       ///< elements between rows that belong to none

  IndexType offset_type = IndexType::kInt64;
  std::vector<std::int64_t> offsets{0};
  IndexType id_type = IndexType::kInt64;
  std::vector<std::int64_t> ids;  ///< one per segment; empty where `identity`
  bool identity = false;

  MaskType mask_type = MaskType::kNone;
  std::vector<std::uint64_t> mask;  ///< bit patterns, [num_tokens]
  std::int64_t ignore_index = 0;

  ContextParallelLayout layout = ContextParallelLayout::kNone;
  std::int64_t ranks = 1, rank = 0;

  FloatType sum_type = FloatType::kFloat32;
  bool accumulate = false;
  std::vector<double> old_sums;  ///< [num_rows][num_groups], where `accumulate`
  std::vector<std::int64_t> old_counts;

  std::size_t misalignment = 0;  ///< elements by which values and mask miss an alignment of 256 bytes

  std::int64_t num_segments() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
  /// Only then is there a right answer.
  bool sorted() const;
  std::string describe() const;
};

using Rng = std::mt19937_64;

/// A number in [low, high].
std::int64_t uniform(Rng& rng, std::int64_t low, std::int64_t high);
template <class T>
T choose(Rng& rng, std::initializer_list<T> of) {
  return *(of.begin() + uniform(rng, 0, static_cast<std::int64_t>(of.size()) - 1));
}

/// How a row is cut into documents.
enum class Documents {
  kOne,        ///< one of everything
  kEqual,      ///< equal lengths
  kRandom,     ///< random lengths, long and short
  kSingle,     ///< one token each
  kShort,      ///< 0 to 20 tokens
  kEmpties,    ///< two of three are empty, at the ends too
  kEmptyRun,   ///< 5000 empty ones in one place
  kLaneEdges,  ///< starts at multiples of 8, or one beside
  kRowEdges,   ///< starts at multiples of 256, or one beside
  kGaps,       ///< tokens before the first and after the last document
  kOutside,    ///< sorted, with offsets below 0 and beyond the end
  kGarbage,    ///< any numbers, unsorted
};
constexpr int kDocumentKinds = 12;

std::vector<std::int64_t> make_offsets(Rng& rng, Documents kind, std::int64_t num_tokens);

/// How documents get their groups.
enum class Ids { kRandom, kSame, kAlternating, kSorted, kSomeOutside };
constexpr int kIdKinds = 5;

std::vector<std::int64_t> make_ids(Rng& rng, Ids kind, std::int64_t num_segments, std::int64_t num_groups);

/// Random values and mask for the types and sizes already set. Dead tokens often hold NaN or infinity; live ones hold
/// finite numbers. `live` is the share of live tokens.
void fill_tokens(Rng& rng, Problem& problem, double live);

/// Old sums and counts to accumulate to.
void fill_old_results(Rng& rng, Problem& problem);

/// A bit pattern of a value type, mask type as the number it is.
double decode(FloatType type, std::uint64_t bits);
long double decode(MaskType type, std::uint64_t bits);

std::size_t size_of(MaskType type);

}  // namespace segscatter::testing
