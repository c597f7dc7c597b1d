// SPDX-License-Identifier: Apache-2.0
#include "encode.h"

#include <cstring>
#include <utility>

namespace segscatter::python {
namespace {

constexpr std::size_t kInitialEntries = 16;

std::uint64_t mix(std::uint64_t x) noexcept {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93u;  // odd, bits well spread: a bijection of 64-bit words
  x ^= x >> 32;
  return x;
}

template <typename Word>
std::uint64_t load(const char* data) noexcept {
  Word word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// Eight bytes a step, the last step overlapping the one before, so that no length needs a byte loop. The table is built
// anew in every process: the hash need not be stable.
std::uint64_t hash_bytes(std::string_view bytes) noexcept {
  const char* const data = bytes.data();
  const std::size_t size = bytes.size();
  if (size > 8) {
    std::uint64_t hash = size;
    for (std::size_t i = 0; i + 8 < size; i += 8) hash = mix(hash ^ load<std::uint64_t>(data + i));
    return mix(hash ^ load<std::uint64_t>(data + size - 8));
  }
  if (size >= 4) return mix(size ^ load<std::uint32_t>(data) << 32 ^ load<std::uint32_t>(data + size - 4) << 8);
  if (size == 0) return 0;
  return mix(size ^ load<std::uint8_t>(data) << 8 ^ load<std::uint8_t>(data + size / 2) << 16 ^
             load<std::uint8_t>(data + size - 1) << 24);
}

}  // namespace

NameTable::NameTable() : entries_(kInitialEntries) {}

void NameTable::insert(std::string_view name, std::int32_t id) {
  const std::uint64_t hash = hash_bytes(name);
  Entry& entry = entries_[probe(name, hash)];
  if (entry.name != kAbsent) {
    entry.id = id;
    return;
  }
  names_.emplace_back(name);
  entry = {hash, static_cast<std::int32_t>(names_.size() - 1), id};
  if (names_.size() * 2 > entries_.size()) grow();
}

std::int32_t NameTable::find(std::string_view name) const noexcept {
  return entries_[probe(name, hash_bytes(name))].id;  // a free entry's id is kAbsent
}

std::size_t NameTable::probe(std::string_view name, std::uint64_t hash) const noexcept {
  const std::size_t last = entries_.size() - 1;
  for (std::size_t i = hash & last;; i = (i + 1) & last) {
    const Entry& entry = entries_[i];
    if (entry.name == kAbsent || (entry.hash == hash && names_[entry.name] == name)) return i;
  }
}

void NameTable::grow() {
  std::vector<Entry> old(entries_.size() * 2);
  std::swap(old, entries_);
  for (const Entry& entry : old) {
    if (entry.name != kAbsent) entries_[probe(names_[entry.name], entry.hash)] = entry;
  }
}

}  // namespace segscatter::python
