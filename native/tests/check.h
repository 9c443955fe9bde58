// What the tests share: checks that say where and why, random numbers that repeat, and the instruction set to test.
//
// A test is a program: main() calls its cases and returns report(). A failed check is printed and counted; the case
// goes on. Random numbers start from a constant, so a failure can be seen again.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "ridgeline_native.h"

// TSan looks at threads, not at numbers, and slows numbers down twentyfold: what checks those takes fewer cases under it.
#if defined(__SANITIZE_THREAD__)
constexpr bool kUnderThreadSanitizer = true;
#else
constexpr bool kUnderThreadSanitizer = false;
#endif
// ASan and an emulated CPU slow them down tenfold and more.
#if defined(__SANITIZE_ADDRESS__) || defined(RL_EMULATED)
constexpr bool kSlowedDown = true;
#else
constexpr bool kSlowedDown = false;
#endif

inline int failed_checks = 0;
inline char checking[200] = "";

// Says what the next checks are about: printed with those that fail.
[[gnu::format(printf, 1, 2)]] inline void about(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(checking, sizeof checking, format, values);
  va_end(values);
}

inline bool check_failed(const char* file, int line, const std::string& what) {
  if (++failed_checks <= 20) std::fprintf(stderr, "%s:%d: %s (%s)\n", file, line, what.c_str(), checking);
  return false;
}

// Each is an expression: true if it held, so that a case can stop where going on makes no sense.
#define CHECK(condition) ((condition) || check_failed(__FILE__, __LINE__, #condition))
#define CHECK_EQUAL(a, b) check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_NEAR(a, b, tolerance) check_near((a), (b), (tolerance), #a " near " #b, __FILE__, __LINE__)
// The call must return 0, or fail with a reason that holds these words.
#define CHECK_OK(call) check_call((call), nullptr, #call, __FILE__, __LINE__)
#define CHECK_REFUSED(call, words) check_call((call), (words), #call, __FILE__, __LINE__)

template <class A, class B>
bool check_equal(const A& a, const B& b, const char* what, const char* file, int line) {
  return a == b || check_failed(file, line, std::string(what) + ": " + std::to_string(a) + " and " + std::to_string(b));
}

inline bool check_near(double a, double b, double tolerance, const char* what, const char* file, int line) {
  char text[160];
  std::snprintf(text, sizeof text, ": %.9g and %.9g differ by more than %.3g", a, b, tolerance);
  return std::fabs(a - b) <= tolerance || check_failed(file, line, what + std::string(text));
}

inline bool check_call(int64_t result, const char* words, const char* what, const char* file, int line) {
  const std::string reason = result ? rl_last_error() : "no error";
  if (words ? result == -1 && reason.find(words) != std::string::npos : result == 0) return true;
  return check_failed(file, line, std::string(what) + ": returned " + std::to_string(result) + " (" + reason + ")" +
                                      (words ? std::string("; expected a refusal with: ") + words : ""));
}

inline int report() {
  if (failed_checks) std::fprintf(stderr, "%d checks failed\n", failed_checks);
  return failed_checks ? 1 : 0;
}

class Random {  // SplitMix64
 public:
  explicit Random(uint64_t seed = 1) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int integer(int low, int high) { return low + int(bits() % uint64_t(int64_t(high) - low + 1)); }  // both included
  float uniform(float low, float high) { return low + (high - low) * float(double(bits() >> 11) * 0x1p-53); }
  float normal() {  // close enough to a Gaussian: twelve uniform numbers
    float sum = 0.0f;
    for (int i = 0; i < 12; i++) sum += uniform(-0.5f, 0.5f);
    return sum;
  }

 private:
  uint64_t state_;
};

// Memory as the library wants it (64-byte aligned), and of exactly this size, so that a sanitizer sees one byte more.
template <class T>
class Aligned {
 public:
  explicit Aligned(size_t count) : count_(count), memory_(allocate(count * sizeof(T)), std::free) {}
  T* data() { return memory_.get(); }
  const T* data() const { return memory_.get(); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return memory_.get()[i]; }
  const T& operator[](size_t i) const { return memory_.get()[i]; }

 private:
  static T* allocate(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes ? bytes : 1)) std::abort();
    std::memset(memory, 0xa5, bytes);  // not zero: what is read must have been written
    return static_cast<T*>(memory);
  }
  size_t count_;
  std::unique_ptr<T, void (*)(void*)> memory_;
};

// The instruction set RIDGELINE_ISA asks for; ends the program as skipped where it does not run here.
inline std::string isa_under_test() {
  const std::string available = std::string(",") + rl_available_isas() + ",";
  const char* wanted = std::getenv("RIDGELINE_ISA");
  if (!wanted) return available.substr(1, available.find(',', 1) - 1);
  if (available.find(std::string(",") + wanted + ",") == std::string::npos) {
    std::printf("skipped: %s does not run here, only%s\n", wanted, available.c_str());
    std::exit(77);
  }
  return wanted;
}
