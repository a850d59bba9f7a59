// Recycles the memory of large results: the system would clear fresh pages anew.
#pragma once
#include <cstddef>

namespace memory {

// Like malloc, realloc and free; memory begins at a cache line.
void* take(size_t bytes);
void* grow(void* memory, size_t bytes);
void give(void* memory);

// The bytes that are kept now, and their limit.
size_t idle_bytes();
void set_limit(size_t bytes);

}  // namespace memory
