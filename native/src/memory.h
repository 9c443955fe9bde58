// Zeroed memory in huge pages where the system has them: a step streams through all of it.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace ridgeline {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (!bytes) return;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    at_ = at;
#if defined(MADV_HUGEPAGE)
    if (bytes >= (size_t(8) << 20)) madvise(at, bytes, MADV_HUGEPAGE);
#endif
  }
  Memory(Memory&& other) noexcept : at_(std::exchange(other.at_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (at_) munmap(at_, bytes_);
  }

  size_t bytes() const { return bytes_; }
  uint8_t* data() const { return static_cast<uint8_t*>(at_); }
  float* floats() const { return static_cast<float*>(at_); }

 private:
  void* at_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ridgeline
