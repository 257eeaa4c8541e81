// Memory that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <cstdlib>

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  void need(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    std::free(data_);
    size_ = (bytes + 4095) / 4096 * 4096;
    data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
    if (data_ == nullptr) std::abort();
  }

  template <class Number>
  Number* take(size_t count) {
    char* start = data_ + used_;
    used_ += bytes_of<Number>(count);
    return reinterpret_cast<Number*>(start);
  }

  template <class Number>
  static size_t bytes_of(size_t count) {
    return (count * sizeof(Number) + 63) / 64 * 64;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0, used_ = 0;
};
