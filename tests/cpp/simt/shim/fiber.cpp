// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "The SIMT shim knows how to switch stacks on x86-64 and AArch64 only"
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// This file is compiled without -fsanitize=thread, so that its own work is invisible to that sanitizer; hence a macro
// of the build instead of __SANITIZE_THREAD__.
#if defined(SEGSCATTER_SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

// Saves the callee-saved registers on this stack, stores the stack pointer through `save`, and goes on where the stack
// `load` stopped.
extern "C" void segscatter_simt_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl segscatter_simt_switch
.type segscatter_simt_switch,@function
segscatter_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size segscatter_simt_switch,.-segscatter_simt_switch
)");
#else
asm(R"(
.text
.globl segscatter_simt_switch
.type segscatter_simt_switch,%function
segscatter_simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size segscatter_simt_switch,.-segscatter_simt_switch
)");
#endif

namespace segscatter::simt {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kStackBytes = 256 * 1024;  // redzones make frames large
constexpr std::size_t kOutermostFrames = 4096;
#else
constexpr std::size_t kStackBytes = 64 * 1024;
#endif

// Of the operating-system thread that runs all fibers.
struct Host {
  void* stack_pointer = nullptr;
  void* asan_stack = nullptr;
  const void* asan_bottom = nullptr;
  std::size_t asan_size = 0;
  void* tsan_fiber = nullptr;
};
Host host;
Fiber* running = nullptr;

std::size_t page_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

// An inaccessible page below the stack turns an overflow into a fault.
Fiber::Fiber() {
  const std::size_t guard = page_bytes();
  void* memory =
      mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
    std::perror("SIMT shim: no memory for a fiber's stack");
    std::abort();
  }
  stack_ = static_cast<char*>(memory) + guard;
#if defined(SEGSCATTER_SIMT_TSAN)
  tsan_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(SEGSCATTER_SIMT_TSAN)
  __tsan_destroy_fiber(tsan_fiber_);
#endif
  munmap(stack_ - page_bytes(), page_bytes() + kStackBytes);
}

void Fiber::start(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  finished_ = false;
  asan_stack_ = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  // The outermost frames of the run before never returned; inner ones did and left nothing behind.
  __asan_unpoison_memory_region(stack_ + kStackBytes - kOutermostFrames, kOutermostFrames);
#endif
  auto* top = reinterpret_cast<std::uint64_t*>(stack_ + kStackBytes);
  const auto first = reinterpret_cast<std::uint64_t>(&Fiber::run_entry);
#if defined(__x86_64__)
  // As after a call: the stack pointer is 8 below a multiple of 16 once `ret` has taken the address of run_entry.
  top[-1] = 0;
  top[-2] = 0;
  top[-3] = 0;
  top[-4] = first;
  std::uint64_t* saved = top - 10;
  for (int i = 0; i < 6; ++i) saved[i] = 0;
#else
  std::uint64_t* saved = top - 20;
  for (int i = 0; i < 20; ++i) saved[i] = 0;
  saved[11] = first;  // x30, the link register
#endif
  stack_pointer_ = saved;
}

void Fiber::resume() {
  running = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&host.asan_stack, stack_, kStackBytes);
#endif
#if defined(SEGSCATTER_SIMT_TSAN)
  host.tsan_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(tsan_fiber_, /*no synchronisation*/ 1);
#endif
  segscatter_simt_switch(&host.stack_pointer, stack_pointer_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(host.asan_stack, nullptr, nullptr);
#endif
  running = nullptr;
}

void Fiber::switch_to_host() {
#if defined(__SANITIZE_ADDRESS__)
  // Null tells that this stack will not be come back to.
  __sanitizer_start_switch_fiber(finished_ ? nullptr : &asan_stack_, host.asan_bottom, host.asan_size);
#endif
#if defined(SEGSCATTER_SIMT_TSAN)
  __tsan_switch_to_fiber(host.tsan_fiber, /*no synchronisation*/ 1);
#endif
  segscatter_simt_switch(&stack_pointer_, host.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(asan_stack_, &host.asan_bottom, &host.asan_size);
#endif
}

void Fiber::suspend() {
  running->switch_to_host();
}

void Fiber::run_entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &host.asan_bottom, &host.asan_size);
#endif
  Fiber* self = running;
  self->entry_(self->argument_);
  self->finished_ = true;
  self->switch_to_host();
  std::abort();  // a finished fiber was resumed
}

#if defined(SEGSCATTER_SIMT_TSAN)
void tsan_release(void* tag) {
  __tsan_release(tag);
}
void tsan_acquire(void* tag) {
  __tsan_acquire(tag);
}
TsanIgnore::TsanIgnore() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
TsanIgnore::~TsanIgnore() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
void tsan_release(void*) {}
void tsan_acquire(void*) {}
TsanIgnore::TsanIgnore() {}
TsanIgnore::~TsanIgnore() {}
#endif

}  // namespace segscatter::simt
