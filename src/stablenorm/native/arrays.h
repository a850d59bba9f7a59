// NumPy's arrays as plain rows, and new ones for results. Included by module.cpp alone.
#pragma once
#define PY_SSIZE_T_CLEAN
#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030b0000
#endif
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <array>
#include <cstring>
#include <initializer_list>

#include "jobs.h"
#include "memory.h"

namespace {

// The scalar types of the four dtypes, in the order of `Type`. New dtypes of others share type
// numbers; these share nothing.
PyObject* scalar_types[4];

bool is_given(PyObject* object) { return object != Py_None; }

bool type_of(PyArrayObject* a, Type& type) {
    for (Type known : {F32, BF16, F16, F64})
        if ((PyObject*)PyArray_DESCR(a)->typeobj == scalar_types[known]) {
            type = known;
            return true;
        }
    return false;
}

// True for an array of NumPy's own class with elements, of floats in this machine's byte order.
bool is_of_floats(PyObject* object, Type& type) {
    if (!PyArray_CheckExact(object)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    return !PyArray_ISBYTESWAPPED(a) && PyArray_NDIM(a) && PyArray_SIZE(a) && type_of(a, type);
}

Index last_length(PyArrayObject* a) { return PyArray_DIM(a, PyArray_NDIM(a) - 1); }

// Sees an array as plain rows: one without gaps, or one of two dimensions with rows without gaps.
bool see_rows(PyObject* object, Rows& rows) {
    if (!is_of_floats(object, rows.type)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    Index n = last_length(a);
    Index bytes = BYTES[rows.type];
    rows.data = PyArray_BYTES(a);
    rows.stride = n * bytes;
    if (PyArray_IS_C_CONTIGUOUS(a)) return true;
    if (PyArray_NDIM(a) != 2 || (n > 1 && PyArray_STRIDE(a, 1) != bytes)) return false;
    rows.stride = PyArray_STRIDE(a, 0);
    return true;
}

// Whether an array can take results as distinct plain rows, in either direction.
bool see_room(PyObject* object, Rows& rows) {
    if (!see_rows(object, rows)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    Index apart = rows.stride < 0 ? -rows.stride : rows.stride;
    return apart >= last_length(a) * BYTES[rows.type] || PyArray_SIZE(a) == last_length(a);
}

// True if an array does not overlap `other`: their ranges of addresses are disjoint. None overlaps
// nothing.
bool are_apart(PyArrayObject* a, PyObject* other) {
    if (!is_given(other)) return true;
    if (!PyArray_Check(other)) return false;
    PyArrayObject* both[] = {a, (PyArrayObject*)other};
    const char *first[2], *last[2];
    for (int i = 0; i < 2; i++) {
        first[i] = PyArray_BYTES(both[i]);
        last[i] = first[i] + PyArray_ITEMSIZE(both[i]);
        for (int k = 0; k < PyArray_NDIM(both[i]); k++) {
            Index way = (PyArray_DIM(both[i], k) - 1) * PyArray_STRIDE(both[i], k);
            (way < 0 ? first : last)[i] += way;
        }
    }
    return last[0] <= first[1] || last[1] <= first[0];
}

// Whether the user's array `out` has the shape of a result, and is apart from others.
bool is_room(PyObject* out, PyObject* like, std::initializer_list<PyObject*> others) {
    if (!PyArray_CheckExact(out) || !is_given(like)) return false;
    PyArrayObject* a = (PyArrayObject*)out;
    PyArrayObject* b = (PyArrayObject*)like;
    bool fits = PyArray_SAMESHAPE(a, b) && PyArray_ISWRITEABLE(a);
    for (PyObject* other : others) fits = fits && are_apart(a, other);
    return fits;
}

// ---- memory of large results, by NumPy's own interface for it ----

// Smaller results are as quick by NumPy's cache and malloc.
constexpr Index LARGE = 1 << 20;

void* handler_malloc(void*, size_t size) { return memory::take(size); }
void* handler_calloc(void*, size_t count, size_t size) {
    void* zeros = size && count > SIZE_MAX / size ? nullptr : memory::take(count * size);
    return zeros ? memset(zeros, 0, count * size) : nullptr;
}
void* handler_realloc(void*, void* old, size_t size) { return memory::grow(old, size); }
void handler_free(void*, void* old, size_t) { memory::give(old); }
PyDataMem_Handler handler = {
    "stablenorm", 1, {nullptr, handler_malloc, handler_calloc, handler_realloc, handler_free}};
PyObject* capsule;

// Tells the bytes that may be kept; called at the first large result, when a worker of Dask has set
// its own limit.
PyObject* default_limit;

bool set_limit(PyObject* value) {
    size_t limit = value ? PyLong_AsSize_t(value) : 0;
    if (PyErr_Occurred()) return false;
    Py_CLEAR(default_limit);
    memory::set_limit(limit);
    return true;
}

// Makes an array; a large one is in recycled memory, which its handler takes back when it goes.
PyObject* new_array(PyArray_Descr* descr, int ndim, const npy_intp* shape) {
    Index elements = 1;
    for (int k = 0; k < ndim; k++) elements *= shape[k];
    bool large = elements * (Index)PyDataType_ELSIZE(descr) >= LARGE;
    if (large && default_limit) {
        PyObject* limit = PyObject_CallNoArgs(default_limit);
        bool known = set_limit(limit);
        Py_XDECREF(limit);
        if (!known) return nullptr;
    }
    Py_INCREF((PyObject*)descr);
    PyObject* before = large ? PyDataMem_SetHandler(capsule) : nullptr;
    PyObject* array =
        PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, nullptr, nullptr, 0, nullptr);
    if (large) {
        PyObject* ours = PyDataMem_SetHandler(before);
        Py_XDECREF(ours);
        Py_XDECREF(before);
    }
    return array;
}

// Returns the user's array for a result, or a new one like another.
PyObject* result_like(PyObject* out, PyArrayObject* like) {
    return is_given(out) ? Py_NewRef(out)
                         : new_array(PyArray_DESCR(like), PyArray_NDIM(like), PyArray_DIMS(like));
}

// Makes a vector of one number for each row or column.
template <class T> PyObject* new_vector(npy_intp count, int type, T*& data) {
    PyObject* made = PyArray_SimpleNew(1, &count, type);
    if (made) data = (T*)PyArray_DATA((PyArrayObject*)made);
    return made;
}

}  // namespace
