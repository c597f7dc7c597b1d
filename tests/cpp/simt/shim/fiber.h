// SPDX-License-Identifier: Apache-2.0
/// A stackful coroutine that AddressSanitizer and ThreadSanitizer understand. One fiber plays one CUDA thread.
#pragma once

#include <cstddef>

namespace segscatter::simt {

/// Runs a function on a stack of its own. The host calls resume(); the function calls suspend() to go back to it. One
/// fiber runs at a time, all on one operating-system thread.
///
/// ThreadSanitizer sees every fiber as a thread, and switching between them orders nothing: only tsan_release() and
/// tsan_acquire() do.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes the next resume() call entry(argument). The fiber must be new or finished.
  void start(void (*entry)(void*), void* argument);

  /// Runs the fiber until it suspends or its function returns. Only the host may call it.
  void resume();

  /// Goes back to the host. Only the running fiber may call it.
  static void suspend();

  bool finished() const { return finished_; }

 private:
  static void run_entry();
  void switch_to_host();

  char* stack_ = nullptr;
  void* stack_pointer_ = nullptr;
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  void* asan_stack_ = nullptr;
  void* tsan_fiber_ = nullptr;
  bool finished_ = true;
};

/// Happens-before edges for ThreadSanitizer: what was done before release(tag) is seen after acquire(tag). Without that
/// sanitizer they do nothing.
void tsan_release(void* tag);
void tsan_acquire(void* tag);

/// While one lives, ThreadSanitizer takes what this fiber does, including its malloc and free, as no access at all: the
/// book-keeping of the shim is not part of the program under test.
class TsanIgnore {
 public:
  TsanIgnore();
  ~TsanIgnore();
  TsanIgnore(const TsanIgnore&) = delete;
  TsanIgnore& operator=(const TsanIgnore&) = delete;
};

}  // namespace segscatter::simt
