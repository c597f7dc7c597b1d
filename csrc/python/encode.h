// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace segscatter::python {

// A hash map from channel names to group ids, built once and asked for every document: open addressing with linear
// probing, at most half full, hashes kept beside the entries. Names are compared byte for byte (UTF-8).
class NameTable {
 public:
  static constexpr std::int32_t kAbsent = -1;

  NameTable();

  // Requires id >= 0. A name that is present keeps its place and takes the new id.
  void insert(std::string_view name, std::int32_t id);

  // The id of the name, or kAbsent.
  std::int32_t find(std::string_view name) const noexcept;

  std::size_t size() const noexcept { return names_.size(); }

 private:
  struct Entry {
    std::uint64_t hash = 0;
    std::int32_t name = kAbsent;  // index into names_; kAbsent: the entry is free
    std::int32_t id = kAbsent;
  };

  // The entry that holds the name, or the free one where it belongs.
  std::size_t probe(std::string_view name, std::uint64_t hash) const noexcept;
  void grow();

  std::vector<Entry> entries_;  // a power of two
  std::vector<std::string> names_;
};

}  // namespace segscatter::python
