// SPDX-License-Identifier: Apache-2.0
/// Memory that tells when something was written beside it (and, with AddressSanitizer, read).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace segscatter::testing {

/// `bytes` bytes that begin `misalignment` bytes past a multiple of 256, between two guard zones, filled with 0xff: as
/// a float that is NaN, as an integer -1.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(std::size_t bytes, std::size_t misalignment = 0)
      : bytes_(bytes), storage_(kAlignment + kGuard + misalignment + bytes + kGuard, kGuardByte) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data()) + kGuard;
    data_ = reinterpret_cast<unsigned char*>((address + kAlignment - 1) / kAlignment * kAlignment + misalignment);
    std::memset(data_, 0xff, bytes_);
    guard(true);
  }
  ~GuardedBuffer() { guard(false); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  void* data() { return data_; }
  std::size_t size() const { return bytes_; }

  template <class T>
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, data_ + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void set(std::size_t i, T value) {
    std::memcpy(data_ + i * sizeof(T), &value, sizeof(T));
  }
  std::vector<unsigned char> contents() const { return {data_, data_ + bytes_}; }

  /// Whether both guard zones are as they were.
  bool intact() {
    guard(false);
    bool same = true;
    for (const unsigned char* byte = storage_.data(); byte < data_; ++byte) same &= *byte == kGuardByte;
    const unsigned char* end = storage_.data() + storage_.size();
    for (const unsigned char* byte = data_ + bytes_; byte < end; ++byte) same &= *byte == kGuardByte;
    guard(true);
    return same;
  }

 private:
  static constexpr std::size_t kAlignment = 256, kGuard = 256;
  static constexpr unsigned char kGuardByte = 0x5a;

  void guard(bool on) {
#if defined(__SANITIZE_ADDRESS__)
    if (on) {
      ASAN_POISON_MEMORY_REGION(storage_.data(), storage_.size());
      ASAN_UNPOISON_MEMORY_REGION(data_, bytes_);
    } else {
      ASAN_UNPOISON_MEMORY_REGION(storage_.data(), storage_.size());
    }
#else
    static_cast<void>(on);
#endif
  }

  std::size_t bytes_;
  std::vector<unsigned char> storage_;
  unsigned char* data_;
};

}  // namespace segscatter::testing
