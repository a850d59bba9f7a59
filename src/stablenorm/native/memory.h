// Memory of large results, kept when it is given back and handed out again: the system would clear its pages anew.
#pragma once
#include <cstddef>

namespace memory {

// As malloc, realloc and free, but that memory begins at a cache line.
void* take(size_t bytes);
void* grow(void* memory, size_t bytes);
void give(void* memory);

// The bytes that are kept now; and the most that are.
size_t idle_bytes();
void set_limit(size_t bytes);

}  // namespace memory
