// SPDX-License-Identifier: Apache-2.0
#include "support/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

namespace segscatter::testing {

bool Problem::sorted() const {
  return std::is_sorted(offsets.begin(), offsets.end());
}

std::string Problem::describe() const {
  std::ostringstream text;
  text << "T=" << num_tokens << " K=" << num_rows << " S=" << num_segments() << " G=" << num_groups
       << (identity ? " identity" : "") << " value_type=" << int(value_type) << " mask_type=" << int(mask_type)
       << " ignore=" << ignore_index << " offset_type=" << int(offset_type) << " id_type=" << int(id_type)
       << " sum_type=" << int(sum_type) << " accumulate=" << accumulate << " layout=" << int(layout) << " rank=" << rank
       << "/" << ranks << " misalignment=" << misalignment << " row_padding=" << row_padding << "\n  offsets:";
  const auto list = [&text](const std::vector<std::int64_t>& numbers) {
    for (std::size_t i = 0; i < numbers.size() && i < 40; ++i) text << ' ' << numbers[i];
    if (numbers.size() > 40) text << " ...";
  };
  list(offsets);
  text << "\n  ids:";
  list(ids);
  return text.str();
}

std::int64_t uniform(Rng& rng, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
}

std::vector<std::int64_t> make_offsets(Rng& rng, Documents kind, std::int64_t num_tokens) {
  const std::int64_t end = num_tokens;
  std::vector<std::int64_t> offsets{0};
  const auto cut = [&](auto length) {
    while (offsets.back() < end) offsets.push_back(std::min(end, offsets.back() + length()));
  };
  const auto cut_beside = [&](std::int64_t multiple) {
    for (std::int64_t at = 0; at < end; at += multiple * uniform(rng, 1, 3)) {
      offsets.push_back(std::clamp<std::int64_t>(at + uniform(rng, -1, 1), offsets.back(), end));
    }
    offsets.push_back(end);
  };
  switch (kind) {
    case Documents::kOne:
      offsets.push_back(end);
      break;
    case Documents::kEqual: {
      const std::int64_t length = choose<std::int64_t>(rng, {3, 8, 60, 256, 700});
      cut([&] { return length; });
      break;
    }
    case Documents::kRandom:
      cut([&] { return uniform(rng, 1, choose<std::int64_t>(rng, {4, 40, 400, 3000})); });
      break;
    case Documents::kSingle:
      cut([] { return 1; });
      break;
    case Documents::kShort:
      cut([&] { return uniform(rng, 0, 20); });
      break;
    case Documents::kEmpties: {
      offsets.insert(offsets.end(), uniform(rng, 0, 70), 0);
      cut([&] { return uniform(rng, 0, 2) ? 0 : uniform(rng, 1, 60); });
      offsets.insert(offsets.end(), uniform(rng, 0, 70), end);
      break;
    }
    case Documents::kEmptyRun: {
      cut([&] { return uniform(rng, 1, 300); });
      const auto at = offsets.begin() + uniform(rng, 0, static_cast<std::int64_t>(offsets.size()) - 1);
      offsets.insert(at, 5000, *at);
      break;
    }
    case Documents::kLaneEdges:
      cut_beside(8);
      break;
    case Documents::kRowEdges:
      cut_beside(256);
      break;
    case Documents::kGaps:
      offsets[0] = uniform(rng, 0, end / 2);
      while (offsets.back() < end - end / 4) {
        offsets.push_back(std::min(end, offsets.back() + uniform(rng, 0, 200)));
      }
      break;
    case Documents::kOutside: {
      offsets.clear();
      const std::int64_t count = uniform(rng, 2, 60);
      for (std::int64_t i = 0; i < count; ++i) offsets.push_back(uniform(rng, -2 * end - 5, 3 * end + 5));
      if (uniform(rng, 0, 1)) offsets.push_back(std::numeric_limits<std::int64_t>::max());
      if (uniform(rng, 0, 1)) offsets.push_back(std::numeric_limits<std::int64_t>::min());
      std::sort(offsets.begin(), offsets.end());
      break;
    }
    case Documents::kGarbage: {
      offsets.clear();
      const std::int64_t count = choose<std::int64_t>(rng, {1, 2, 31, 32, 33, 64, 300, 1200, 3000});
      for (std::int64_t i = 0; i <= count; ++i) {
        const std::int64_t around = uniform(rng, -50, end + 50);
        offsets.push_back(uniform(rng, 0, 9) ? around : static_cast<std::int64_t>(rng()));
      }
      // Runs that look sorted lead further into the kernels.
      if (uniform(rng, 0, 1)) std::sort(offsets.begin() + count / 4, offsets.end() - count / 4);
      break;
    }
  }
  return offsets;
}

std::vector<std::int64_t> make_ids(Rng& rng, Ids kind, std::int64_t num_segments, std::int64_t num_groups) {
  std::vector<std::int64_t> ids(num_segments);
  if (num_groups == 0) kind = Ids::kSomeOutside;
  const std::int64_t last = num_groups - 1;
  const std::int64_t one = num_groups ? uniform(rng, 0, last) : 0, other = num_groups ? uniform(rng, 0, last) : 0;
  for (std::int64_t d = 0; d < num_segments; ++d) {
    switch (kind) {
      case Ids::kRandom:
        ids[d] = uniform(rng, 0, last);
        break;
      case Ids::kSame:
        ids[d] = one;
        break;
      case Ids::kAlternating:
        ids[d] = d % 2 ? one : other;
        break;
      case Ids::kSorted:
        ids[d] = d * num_groups / num_segments;
        break;
      case Ids::kSomeOutside:
        ids[d] = choose<std::int64_t>(rng, {-1, num_groups, num_groups + 7, std::numeric_limits<std::int32_t>::max(),
                                            std::numeric_limits<std::int32_t>::min()});
        if (num_groups && uniform(rng, 0, 2)) ids[d] = uniform(rng, 0, last);
        break;
    }
  }
  return ids;
}

namespace {

template <class To, class From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

std::uint64_t special_value(Rng& rng, FloatType type) {
  const double value =
      choose<double>(rng, {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity()});
  switch (type) {
    case FloatType::kFloat16:
      return std::isnan(value) ? 0x7e01 : value > 0 ? 0x7c00 : 0xfc00;
    case FloatType::kBFloat16:
      return bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16;
    case FloatType::kFloat32:
      return bit_cast<std::uint32_t>(static_cast<float>(value));
    case FloatType::kFloat64:
      break;
  }
  return bit_cast<std::uint64_t>(value);
}

// Signs and magnitudes over many binades; sometimes zero, subnormal or exact small integers.
std::uint64_t finite_value(Rng& rng, FloatType type) {
  const std::uint64_t sign = rng() & 1;
  switch (type) {
    case FloatType::kFloat16:
      return sign << 15 | static_cast<std::uint64_t>(uniform(rng, 0, 24)) << 10 | (rng() & 0x3ff);
    case FloatType::kBFloat16:
      return sign << 15 | static_cast<std::uint64_t>(uniform(rng, 110, 140)) << 7 | (rng() & 0x7f);
    case FloatType::kFloat32:
      if (uniform(rng, 0, 15) == 0) return sign << 31 | (rng() & 0xff);  // subnormal
      return sign << 31 | static_cast<std::uint64_t>(uniform(rng, 110, 140)) << 23 | (rng() & 0x7fffff);
    case FloatType::kFloat64:
      break;
  }
  return sign << 63 | static_cast<std::uint64_t>(uniform(rng, 1000, 1040)) << 52 | (rng() & 0xfffffffffffff);
}

std::uint64_t mask_pattern(Rng& rng, const Problem& problem, bool live) {
  const std::int64_t ignore = problem.ignore_index;
  if (!live) {
    if (problem.mask_type == MaskType::kFloat32) {
      const bool negative_zero = ignore == 0 && uniform(rng, 0, 1);
      return negative_zero ? 0x80000000u : bit_cast<std::uint32_t>(static_cast<float>(ignore));
    }
    return static_cast<std::uint64_t>(ignore);  // the bytes that do not fit are cut off when it is stored
  }
  for (;;) {
    std::uint64_t bits = rng();
    switch (problem.mask_type) {
      case MaskType::kNone:
        return 0;
      case MaskType::kUInt8:
      case MaskType::kInt8:
        bits &= 0xff;
        break;
      case MaskType::kInt32:
        // Often one bit away from what is ignored.
        bits = uniform(rng, 0, 1) ? static_cast<std::uint64_t>(ignore) ^ std::uint64_t{1} << uniform(rng, 0, 31) : bits;
        bits &= 0xffffffffu;
        break;
      case MaskType::kInt64:
        bits = uniform(rng, 0, 1) ? static_cast<std::uint64_t>(ignore) ^ std::uint64_t{1} << uniform(rng, 0, 63) : bits;
        break;
      case MaskType::kFloat32:
        bits = choose<std::uint32_t>(
            rng, {0x3f800000u, 0x7fc00000u, 1u, 0x80000001u, 0x7f800000u,
                  bit_cast<std::uint32_t>(static_cast<float>(-ignore)), static_cast<std::uint32_t>(bits)});
        break;
    }
    if (decode(problem.mask_type, bits) != static_cast<long double>(ignore)) return bits;
  }
}

}  // namespace

void fill_tokens(Rng& rng, Problem& problem, double live) {
  const std::int64_t tokens = problem.num_tokens;
  std::vector<bool> dead(tokens, false);
  problem.mask.assign(tokens, 0);
  if (problem.mask_type != MaskType::kNone) {
    // Some stretches are all dead or all live, as padding and prompts are.
    int stretch = 0;
    bool mixed = true, same = false;
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (stretch-- == 0) {
        stretch = static_cast<int>(uniform(rng, 1, 600));
        mixed = uniform(rng, 0, 2) != 0;
        same = std::bernoulli_distribution(live)(rng);
      }
      const bool is_live = mixed ? std::bernoulli_distribution(live)(rng) : same;
      problem.mask[t] = mask_pattern(rng, problem, is_live);
      dead[t] = decode(problem.mask_type, problem.mask[t]) == static_cast<long double>(problem.ignore_index);
    }
  }
  problem.values.resize(problem.num_rows * tokens);
  for (std::size_t i = 0; i < problem.values.size(); ++i) {
    const bool special = dead[i % tokens] && uniform(rng, 0, 3) == 0;
    problem.values[i] = special ? special_value(rng, problem.value_type) : finite_value(rng, problem.value_type);
  }
}

void fill_old_results(Rng& rng, Problem& problem) {
  problem.old_sums.resize(problem.num_rows * problem.num_groups);
  problem.old_counts.resize(problem.num_groups);
  for (double& sum : problem.old_sums) {
    sum = std::normal_distribution<double>(0, 1000)(rng);
    if (problem.sum_type == FloatType::kFloat32) sum = static_cast<float>(sum);
  }
  for (std::int64_t& count : problem.old_counts) count = uniform(rng, 0, std::int64_t{1} << 40);
}

double decode(FloatType type, std::uint64_t bits) {
  switch (type) {
    case FloatType::kFloat16: {
      const double sign = bits >> 15 & 1 ? -1 : 1;
      const int exponent = static_cast<int>(bits >> 10 & 31);
      const double fraction = static_cast<double>(bits & 0x3ff) / 1024;
      if (exponent == 31) {
        return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                             : sign * std::numeric_limits<double>::infinity();
      }
      return sign * (exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15));
    }
    case FloatType::kBFloat16:
      return bit_cast<float>(static_cast<std::uint32_t>(bits << 16));
    case FloatType::kFloat32:
      return bit_cast<float>(static_cast<std::uint32_t>(bits));
    case FloatType::kFloat64:
      break;
  }
  return bit_cast<double>(bits);
}

long double decode(MaskType type, std::uint64_t bits) {
  switch (type) {
    case MaskType::kUInt8:
      return static_cast<std::uint8_t>(bits);
    case MaskType::kInt8:
      return static_cast<std::int8_t>(bits);
    case MaskType::kInt32:
      return static_cast<std::int32_t>(bits);
    case MaskType::kInt64:
      return static_cast<std::int64_t>(bits);
    case MaskType::kFloat32:
      return bit_cast<float>(static_cast<std::uint32_t>(bits));
    case MaskType::kNone:
      break;
  }
  return 0;
}

std::size_t size_of(MaskType type) {
  switch (type) {
    case MaskType::kUInt8:
    case MaskType::kInt8:
      return 1;
    case MaskType::kInt32:
    case MaskType::kFloat32:
      return 4;
    case MaskType::kInt64:
      return 8;
    case MaskType::kNone:
      break;
  }
  return 0;
}

}  // namespace segscatter::testing
